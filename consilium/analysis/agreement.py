"""Where the teachers and the global model agree, case by case: figure S4 of UFPS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.analysis.overlays import Masks, Shown
from consilium.analysis.pseudo_labels import REFINED, Labelled, checked, labelled, main_teacher
from consilium.errors import RunError
from consilium.methods.ufps import UFPS
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName


@dataclass(frozen=True, eq=False)
class Example:
    """The first training case of a site."""

    shown: Shown
    share: float | None  # of the global model's foreground that the teachers share; None: it finds nothing
    organs: Mapping[str, float | None]  # the same organ by organ

    @property
    def words(self) -> str:
        return percent(self.share)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def shared(claimed: Tensor, decided: Tensor, value: int | None = None) -> float | None:
    """|teachers ∩ model| / |model| of one label or of all of them together, as Eq. 5 compares it with v."""
    found = decided > 0 if value is None else decided == value
    return float((found & (claimed == decided)).sum() / found.sum()) if found.any() else None


def examples(run: OpenRun, sites: Sequence[SiteName]) -> list[Example]:
    """One case per site, by the run's best state."""
    method, task = checked(run), run.study.task
    if not main_teacher(method):
        raise RunError(f"{run.path} has no global main teacher: give a run of ufps whose gmt is not 'pretrained'.")
    assert isinstance(task, Segmentation)
    found = []
    for site in sites:
        one = next(labelled(run, site, run.server), None)
        if one is not None:
            found.append(_example(site, one, task, method))
    if not found:
        raise RunError("these sites have no training cases to show.")
    return found


def branch(share: float | None, method: UFPS) -> str:
    """Which labels Eq. 5 takes; where the global model finds nothing, there is nothing to disagree with."""
    if method.gmt == "global":
        return "the global model's"
    meets = share is None or share >= method.agreement
    return f"{'≥' if meets else '<'} {100 * method.agreement:g} %: {'both' if meets else 'the global model'}"


def _example(site: SiteName, one: Labelled, task: Segmentation, method: UFPS) -> Example:
    assert one.decided is not None

    def masks(mask: Tensor) -> Masks:
        channels: Masks = task.channels_of(mask[None])[0].numpy()
        return channels

    both = torch.where(one.claimed == one.decided, one.decided, 0)
    drawn = {"teachers": one.claimed, "global model": one.decided, "both": both, "taught": one.labels[REFINED]}
    share = shared(one.claimed, one.decided)
    shown = Shown(
        site, one.case, one.image.numpy(), masks(one.truth), task.labels,
        {name: masks(mask) for name, mask in drawn.items()}, {"both": percent(share), "taught": branch(share, method)},
    )  # fmt: skip
    organs = {label: shared(one.claimed, one.decided, k) for k, label in enumerate(task.labels, start=1)}
    return Example(shown, share, organs)


def to_markdown(found: Sequence[Example]) -> str:
    heads = ["site", "case", "all", *found[0].organs]
    lines = [heads, ["---"] * len(heads)]
    lines += [[e.shown.site, e.shown.case, e.words, *map(percent, e.organs.values())] for e in found]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
