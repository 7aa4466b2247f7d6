"""A user's own loss and scores in a task."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from consilium.errors import StudyError

OwnLoss = Callable[[Tensor, Tensor], Tensor]  # of logits and truth: one number, or one per case
OwnScore = Callable[..., float]


def value_of(loss: OwnLoss, output: Tensor, truth: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of a user's own loss over the cases of a batch.

    Args:
        loss: gets `output` (batch, channels, *spatial) and `truth`: integers (batch, *spatial), or (batch, labels,
            *spatial) in 0..1 where labels overlap; in classification (batch, classes) and (batch,).
        weights: (batch,), how much each case counts; the loss must then give one value per case.
    """
    value = loss(output, truth)
    if weights is None:
        return value.mean()
    if value.shape != weights.shape:
        raise StudyError(
            "[task] loss gives one number, but this method weighs cases: return one value per case, (batch,)."
        )
    return (weights * value).mean()
