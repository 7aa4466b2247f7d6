"""Several models that know different organs, as one: the only place where personal outputs become one prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from consilium.errors import StudyError
from consilium.learning.pseudo_labels import Opinion, merged_chances
from consilium.site import Answer, Choice, Predictor, Task
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName, Weights

SMALLEST = 1e-30  # of a probability whose logarithm is taken


def merged_logits(outputs: Sequence[tuple[Sequence[str], Tensor]], labels: Sequence[str]) -> Tensor:
    """Logits (batch, 1 + labels, *spatial) from models with (1 + their labels) channels.

    They are the logarithms of `merged_chances`: background is what every model calls background, or an organ that only
    one of them knows would be outvoted by those who do not.
    """
    given = [Opinion(tuple(known), output.float().softmax(1)) for known, output in outputs]
    return merged_chances(given, labels).clamp_min(SMALLEST).log()


class MergedModel(Predictor):
    """Models of sites that annotate different organs, answering together for all organs."""

    when = "trained"

    def __init__(
        self,
        task: Task,
        models: Mapping[SiteName, Weights],
        labels: Mapping[SiteName, tuple[str, ...]],
        model: str,
        of: SiteName = "",
    ) -> None:
        self.task, self.models, self.labels = task, models, labels
        self.model, self.of = model, of

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        outputs = [
            (self.labels[name], self.task.infer(weights, images, "teacher", self.labels[name]))
            for name, weights in sorted(self.models.items())
        ]
        choice = Choice(self.model, self.of)
        return Answer(merged_logits(outputs, self.task.labels), (choice,) * len(images))


def check_exclusive(task: Task, local_batchnorm: str, what: str) -> None:
    """Teachers have a background channel and their own organs' channels; their normalisation travels with them."""
    if not isinstance(task, Segmentation) or task.overlapping:
        raise StudyError(f"{what} needs masks whose labels exclude each other; this task is of another kind.")
    if task.unannotated != "unknown":
        raise StudyError(f"[task] unannotated = '{task.unannotated}' is for methods without teachers; take it away.")
    if local_batchnorm != "average":
        raise StudyError(
            f"[local] batchnorm = '{local_batchnorm}' keeps normalisation at its site, so what other sites send cannot "
            f"be used; {what} needs batchnorm = 'average'."
        )
