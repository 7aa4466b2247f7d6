"""How good the labels are that a site is taught with, against masks that a simulation hides from it.

The masks in the files are taken as the truth, also for organs the site does not annotate. They are read here, after
the run, and reach no training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from consilium.analysis.figures import MANY
from consilium.analysis.opening import OpenRun
from consilium.analysis.sharp_figures import site_panels
from consilium.data.cache import open_site
from consilium.data.cases import Cases
from consilium.errors import RunError, StudyError
from consilium.learning.main_teacher import refined
from consilium.learning.pseudo_labels import opinions, said, with_truth
from consilium.method import Method, timeline
from consilium.methods.pseudo_labelled import PseudoLabelled
from consilium.methods.ufps import UFPS
from consilium.reports.figures import FAINT, PALETTE
from consilium.run_folder import RunFolder
from consilium.site import Batch, Site
from consilium.tasks.overlap import overlap
from consilium.weights import SiteName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEACHERS, GLOBAL, REFINED = "teachers", "global model", "main teacher"  # who labels
_TINTS = {TEACHERS: FAINT, GLOBAL: PALETTE[0], REFINED: PALETTE[1]}


@dataclass(frozen=True, eq=False)
class Labelled:
    """A training case and the labels it can be taught with; all (*spatial) integers, 0 background."""

    case: str
    image: Tensor  # (channels, *spatial)
    truth: Tensor  # with the labels that the site does not annotate
    labels: Mapping[str, Tensor]  # by who labels, after the site's own annotation was put in
    ignored: Tensor  # Boolean: nothing is learned from these voxels when the main teacher labels
    claimed: Tensor  # the teachers' claims on all labels, before the site's own annotation
    decided: Tensor | None  # the global model's; None where it never teaches


class Quality(NamedTuple):
    """Of one organ's labels at one site."""

    dice: float | None  # mean over cases, on the voxels something is learned from; None: no case has any of it
    left_out: float  # the share of the organ's voxels that nothing is learned from, mean over cases


Qualities = dict[SiteName, dict[str, dict[str, Quality]]]  # site → organ → who labels


def teaches(run: OpenRun) -> bool:
    return isinstance(run.study.method, PseudoLabelled)


def main_teacher(method: Method) -> TypeGuard[UFPS]:
    """Whether the global model becomes a teacher at some time."""
    return isinstance(method, UFPS) and method.gmt != "pretrained"


def checked(run: OpenRun) -> PseudoLabelled:
    """The method of a run whose sites learn from teachers' labels, or a sentence that this one's do not."""
    method = run.study.method
    if not isinstance(method, PseudoLabelled):
        raise RunError(f"{run.path} has no pseudo labels: give a run of ufps, fedavg-pl or another with teachers.")
    return method


def taught_sites(run: OpenRun, site: SiteName | None) -> list[SiteName]:
    """The site asked for, or all that train."""
    if site is not None and site not in run.roster:
        raise StudyError(f"there is no site '{site}' that is taught; there are {', '.join(run.members)}.")
    return run.members if site is None else [site]


def labelled(run: OpenRun, name: SiteName, server: Any) -> Iterator[Labelled]:
    """A site's whole training cases as the teachers and the global model of a server's state label them.

    In training the main teacher sees the same cases cut and augmented as the study asks.
    """
    site = run.worker(name).site
    assert isinstance(site.data, Cases)
    full = open_site(run.federation, run.federation.sites[name], run.study.preprocess, annotated=run.federation.labels)
    for batch in replace(site.data, parts=(full,)).whole("train", site.local.batch_size):
        found = _of_batch(checked(run), site, server, batch)
        if batch.volume:  # its slices are one case
            turned = replace(found, image=batch.images.transpose(0, 1))
            yield replace(turned, case=batch.volume)
            continue
        for i, case in enumerate(batch.cases):
            yield Labelled(
                case,
                batch.images[i],
                batch.truth[i],
                {who: masks[i] for who, masks in found.labels.items()},
                found.ignored[i],
                found.claimed[i],
                None if found.decided is None else found.decided[i],
            )


def _of_batch(method: PseudoLabelled, site: Site, server: Any, batch: Batch) -> Labelled:
    """The same for a batch, every tensor with its axis of cases."""
    task, own = site.task, site.card.labels
    drawn = {name: site.roster[name].labels for name in server.teachers}
    heard = said(opinions(task, server.teachers, drawn, batch.images), task.labels, own, batch.bare, method.priority)
    is_own = torch.tensor([False, *(label in own for label in task.labels)])
    annotation = torch.where(is_own[batch.truth.long()], batch.truth, 0)
    labels = {TEACHERS: with_truth(heard.others, annotation)}
    ignored, decided = torch.zeros_like(annotation, dtype=torch.bool), None
    if main_teacher(method):
        decided = task.infer(server.global_, batch.images).argmax(1).to(heard.others)
        foreign = torch.where(is_own[decided.long()], 0, decided)
        meets = method.gmt == "intersection"
        drawn_here = is_own.expand(len(decided), -1)
        made = refined(heard, decided, drawn_here, method.agreement, meets, method.gmt_guard)
        labels |= {GLOBAL: with_truth(foreign, annotation), REFINED: with_truth(made.labels, annotation)}
        ignored = made.ignored & (annotation == 0)
    return Labelled("", batch.images, batch.truth, labels, ignored, heard.everything, decided)


def qualities(run: OpenRun, server: Any, sites: Sequence[SiteName]) -> Qualities:
    """Of the organs that a site does not annotate but a teacher knows, over the cases whose masks show them."""
    known = {label for name in server.teachers for label in run.roster[name].labels}
    found: Qualities = {}
    for name in sites:
        foreign = {
            label: value
            for value, label in enumerate(run.study.task.labels, start=1)
            if label in known and label not in run.roster[name].labels
        }
        if not foreign:
            continue
        cases = [_judged(one, foreign) for one in labelled(run, name, server)]
        by_label = {label: _together([case[label] for case in cases if label in case]) for label in foreign}
        if shown := {label: by for label, by in by_label.items() if by}:
            found[name] = shown
    return found


def _judged(one: Labelled, values: Mapping[str, int]) -> dict[str, dict[str, Quality]]:
    """One case, by the labels its truth shows."""
    found: dict[str, dict[str, Quality]] = {}
    for label, value in values.items():
        true = one.truth == value
        if not true.any():
            continue
        found[label] = {}
        for who, mask in one.labels.items():
            used = ~one.ignored if who == REFINED else torch.ones_like(one.ignored)
            scores = overlap((mask == value)[used].numpy(), true[used].numpy(), full=False)
            found[label][who] = Quality(scores.get("dice"), float((true & ~used).sum() / true.sum()))
    return found


def _together(cases: Sequence[Mapping[str, Quality]]) -> dict[str, Quality]:
    found = {}
    for who in cases[0] if cases else ():
        dice = [case[who].dice for case in cases]
        scored = [value for value in dice if value is not None]
        found[who] = Quality(fmean(scored) if scored else None, fmean(case[who].left_out for case in cases))
    return found


@dataclass(frozen=True)
class Kept:
    """The state after a round of a run that keeps all of them."""

    round: int
    teaches: bool  # the main teacher labels in the round that follows
    found: Qualities


def by_round(run: OpenRun, sites: Sequence[SiteName]) -> Iterator[Kept]:
    """After every round of the common model; nothing unless the run kept its states and has a main teacher."""
    method = checked(run)
    if run.study.plan.keep_rounds != "all" or not main_teacher(method):
        return
    line = timeline(method, run.study.plan.rounds)
    for index, server in RunFolder.open(run.path).states(method):
        (phase, round), (_, after) = line[index], line[min(index + 1, len(line) - 1)]
        if phase.counts:
            told = method.send(server, run.roster[run.members[0]], after)
            yield Kept(round.number, told.gmt, qualities(run, server, sites))


def to_json(found: Qualities) -> dict[str, Any]:
    return {
        site: {label: {who: one._asdict() for who, one in by.items()} for label, by in organs.items()}
        for site, organs in found.items()
    }


def to_markdown(found: Qualities) -> str:
    makers = list(dict.fromkeys(who for organs in found.values() for by in organs.values() for who in by))
    heads = ["site", "organ", *makers, *(["left out"] if REFINED in makers else [])]
    lines = [heads, ["---"] * len(heads)]
    for site, organs in found.items():
        for label, by in organs.items():
            texts = ["–" if by[who].dice is None else f"{by[who].dice:.3f}" for who in makers]
            left_out = [f"{100 * by[REFINED].left_out:.0f} %"] if REFINED in makers else []
            lines.append([site, label, *texts, *left_out])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def bars(found: Qualities) -> Figure:
    """A panel per site: for every organ it does not annotate, Dice of each one's labels."""
    from matplotlib.patches import Patch

    makers = list(dict.fromkeys(who for organs in found.values() for by in organs.values() for who in by))
    with site_panels(found, 2.4) as (figure, panels):
        for axes, (site, organs) in zip(panels, found.items(), strict=True):
            for k, who in enumerate(makers):
                places = [i + (k - (len(makers) - 1) / 2) * 0.8 / len(makers) for i in range(len(organs))]
                heights = [by[who].dice or 0.0 for by in organs.values()]
                axes.bar(places, heights, width=0.74 / len(makers), color=_TINTS[who])
            axes.set_xticks(range(len(organs)), list(organs))
            axes.set(title=f"taught to {site}", ylim=(0, 1))
            axes.grid(axis="y")
        panels[0].set_ylabel("Dice of the labels")
        handles = [Patch(color=_TINTS[who], label=who) for who in makers]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(makers), frameon=False)
        return figure


def curves(kept: Sequence[Kept], labels: Sequence[str]) -> Figure:
    """A panel per site, a colour per organ: the main teacher's labels over rounds, the teachers' dashed.

    A dotted line is where the main teacher begins to be heard.
    """
    from matplotlib.lines import Line2D

    tint = {label: MANY[k % len(MANY)] for k, label in enumerate(labels)}
    rounds = [one.round for one in kept]
    start = next((one.round for one in kept if one.teaches), None)
    with site_panels(kept[0].found, 2.6) as (figure, panels):
        for axes, (site, organs) in zip(panels, kept[0].found.items(), strict=True):
            for label in organs:
                for who, dash in ((REFINED, "-"), (TEACHERS, "--")):
                    heights = [one.found[site][label][who].dice for one in kept]
                    line = [float("nan") if value is None else value for value in heights]
                    axes.plot(rounds, line, color=tint[label], linewidth=1.4, linestyle=dash)
            if start is not None:
                axes.axvline(start, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
            axes.set(title=f"taught to {site}", xlabel="round", ylim=(0, 1))
            axes.locator_params(axis="x", integer=True)
            axes.grid(axis="y")
        panels[0].set_ylabel("Dice of the labels")
        handles = [Line2D([], [], color=tint[label], label=label) for label in labels]
        kinds = {REFINED: "-", TEACHERS: "--", **({f"{REFINED} begins": ":"} if start is not None else {})}
        handles += [Line2D([], [], color=FAINT, linestyle=dash, label=who) for who, dash in kinds.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), frameon=False)
        return figure
