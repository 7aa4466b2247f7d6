"""Shows for a case where the teachers and the global model agree: figure S4 of UFPS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilium.analysis import overlays
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.labelled_cases import REFINED, Labelled, checked, labelled, main_teacher, taught_sites
from consilium.analysis.opening import OpenRun, Runs
from consilium.analysis.overlays import Masks, OverlayCase
from consilium.data.orientation import Axes, turned
from consilium.errors import RunError
from consilium.methods.ufps import UFPS
from consilium.site_opening import open_arrays
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName


@dataclass(frozen=True, eq=False)
class AgreementExample:
    """The first training case of a site."""

    shown: OverlayCase
    share: float | None  # of the global model's foreground on which the teachers agree; None: no foreground
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


def examples(run: OpenRun, sites: Sequence[SiteName]) -> list[AgreementExample]:
    """One case per site, by the run's best state."""
    method, task = checked(run), run.study.task
    if not main_teacher(method):
        raise RunError(
            f"{run.path} has no global main teacher: give a run of ufps whose main_teacher.labels is not 'pretrained'."
        )
    assert isinstance(task, Segmentation)
    found = []
    for site in sites:
        one = next(labelled(run, site, run.server), None)
        if one is not None:
            found.append(_example(site, one, task, method, _display_axes(run, site, one.case)))
    if not found:
        raise RunError("these sites have no training cases to show.")
    return found


def branch(share: float | None, method: UFPS) -> str:
    """The branch of Eq. 5: which labels are used. Without foreground of the global model, both agree."""
    if method.main_teacher.labels == "global":
        return "the global model's"
    meets = share is None or share >= method.main_teacher.agreement
    return (
        f"{'≥' if meets else '<'} {100 * method.main_teacher.agreement:g} %: {'both' if meets else 'the global model'}"
    )


def _display_axes(run: OpenRun, site: SiteName, case: str) -> Axes:
    arrays = open_arrays(run.study, run.federation, site)
    i = [one.name for one in arrays.cases].index(case)
    return arrays.display_axes(i, run.study.preprocess.orientation)


def _example(site: SiteName, one: Labelled, task: Segmentation, method: UFPS, axes: Axes) -> AgreementExample:
    assert one.decided is not None

    def masks(mask: Tensor) -> Masks:
        channels: Masks = turned(task.channels_of(mask[None])[0].numpy(), axes)
        return channels

    both = torch.where(one.claimed == one.decided, one.decided, 0)
    drawn = {"teachers": one.claimed, "global model": one.decided, "both": both, "taught": one.labels[REFINED]}
    share = shared(one.claimed, one.decided)
    shown = OverlayCase(
        site, one.case, turned(one.image.numpy(), axes), masks(one.truth), task.labels,
        {name: masks(mask) for name, mask in drawn.items()}, {"both": percent(share), "taught": branch(share, method)},
    )  # fmt: skip
    organs = {label: shared(one.claimed, one.decided, k) for k, label in enumerate(task.labels, start=1)}
    return AgreementExample(shown, share, organs)


def to_markdown(found: Sequence[AgreementExample]) -> str:
    heads = ["site", "case", "all", *found[0].organs]
    lines = [heads, ["---"] * len(heads)]
    lines += [[e.shown.site, e.shown.case, e.words, *map(percent, e.organs.values())] for e in found]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def analyse_agreement(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if main_teacher(run.study.method)] or runs.opened[:1]:
        found = examples(run, taught_sites(run, options.site))
        words = ", ".join(f"{one.shown.site} {one.words}" for one in found)
        yield Finding(
            "agreement",
            "Where the teachers and the global model agree",
            f"The first training case of every site; the share of the global model's foreground that the teachers "
            f"share: {words}",
            {
                "sites": {
                    one.shown.site: {"case": one.shown.case, "share": one.share, "organs": dict(one.organs)}
                    for one in found
                }
            },
            {"agreement": overlays.slices([one.shown for one in found], run.study.task.labels)},
            to_markdown(found),
            run.path,
        )
