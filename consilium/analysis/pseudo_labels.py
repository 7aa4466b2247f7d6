"""The quality of pseudo labels: Dice against the masks that a simulation hides from training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from consilium.analysis.figures import MANY, site_panels
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.labelled_cases import (
    GLOBAL,
    REFINED,
    TEACHERS,
    Labelled,
    checked,
    labelled,
    main_teacher,
    taught_sites,
    teaches,
)
from consilium.analysis.opening import OpenRun, Runs
from consilium.errors import RunError
from consilium.reports.style import FAINT, PALETTE
from consilium.run_folder import RunFolder
from consilium.tasks.overlap import overlap
from consilium.timeline import timeline
from consilium.weights import SiteName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TINTS = {TEACHERS: FAINT, GLOBAL: PALETTE[0], REFINED: PALETTE[1]}


class Quality(NamedTuple):
    """The quality of one organ's labels at one site."""

    dice: float | None  # mean over cases, on voxels with a loss; None: no case has any
    left_out: float  # the share of the organ's voxels without a loss, mean over cases


Qualities = dict[SiteName, dict[str, dict[str, Quality]]]  # site → organ → source of labels


def qualities(run: OpenRun, server: Any, sites: Sequence[SiteName]) -> Qualities:
    """The quality of organs that a site does not annotate but a teacher knows, over the cases whose masks show them."""
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
        cases = [_case_quality(one, foreign) for one in labelled(run, name, server)]
        by_label = {label: _mean_quality([case[label] for case in cases if label in case]) for label in foreign}
        if shown := {label: by for label, by in by_label.items() if by}:
            found[name] = shown
    return found


def _case_quality(one: Labelled, values: Mapping[str, int]) -> dict[str, dict[str, Quality]]:
    """The quality of one case, by the labels that its truth shows."""
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


def _mean_quality(cases: Sequence[Mapping[str, Quality]]) -> dict[str, Quality]:
    found = {}
    for who in cases[0] if cases else ():
        dice = [case[who].dice for case in cases]
        scored = [value for value in dice if value is not None]
        found[who] = Quality(fmean(scored) if scored else None, fmean(case[who].left_out for case in cases))
    return found


@dataclass(frozen=True)
class KeptRound:
    """The state after a round of a run that keeps all of them."""

    round: int
    teaches: bool  # the main teacher labels in the round that follows
    found: Qualities


def by_round(run: OpenRun, sites: Sequence[SiteName]) -> Iterator[KeptRound]:
    """The quality after every round; empty unless the run kept its states and has a main teacher."""
    method = checked(run)
    if run.study.plan.keep_rounds != "all" or not main_teacher(method):
        return
    line = timeline(method, run.study.plan.rounds)
    for index, server in RunFolder.open(run.path).states.all(method):
        (phase, round), (_, after) = line[index], line[min(index + 1, len(line) - 1)]
        if phase.counts:
            told = method.send(server, run.roster[run.members[0]], after)
            yield KeptRound(round.number, told.gmt, qualities(run, server, sites))


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


def curves(kept: Sequence[KeptRound], labels: Sequence[str]) -> Figure:
    """A panel per site, a colour per organ: the main teacher's labels over rounds, the teachers' dashed.

    A dotted line marks the first round with the main teacher.
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


def analyse_pseudo_labels(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if teaches(run)] or runs.opened[:1]:
        checked(run)
        sites = taught_sites(run, options.site)
        say(f"pseudo labels of {run.name}")
        found = qualities(run, run.server, sites)
        if not found:
            raise RunError(
                f"{run.name}: the masks of these sites' training cases show only what the sites annotate, so nobody "
                "knows how good the other labels are."
            )
        kept = list(by_round(run, sites))
        drawn = {"pseudo-labels": bars(found)}
        if len(kept) > 1:
            drawn["pseudo-labels-rounds"] = curves(kept, run.study.task.labels)
        worst = min(
            (one.dice, label, site)
            for site, organs in found.items()
            for label, by in organs.items()
            for one in [by[TEACHERS]]
            if one.dice is not None
        )
        yield Finding(
            "pseudo-labels",
            "How good the labels are that sites are taught with",
            f"Dice against the hidden masks of the training cases, by the run's best state; the teachers' worst is "
            f"{worst[1]} at {worst[2]}, {worst[0]:.3f}",
            {
                "sites": to_json(found),
                "rounds": {str(one.round): {"taught": one.teaches, "sites": to_json(one.found)} for one in kept},
            },
            drawn,
            to_markdown(found),
            run.path,
        )
