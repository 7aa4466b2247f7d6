"""Findings about what sites take from each other: relationships, teachers and their labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from consilium.analysis import agreement, overlays, pseudo_labels, relation_figures, schedules
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import RunError, StudyError
from consilium.method import timeline
from consilium.methods.ufps import UFPS
from consilium.reports import relationships
from consilium.reports.figures import relation_map
from consilium.study import load_study


def of_relationships(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for view in [view for view in runs.views if relationships.has_relationships(view)] or runs.views[:1]:
        found = relationships.read_relationships(view)
        site = options.site or next(iter(found.p))
        if site not in found.p:
            raise StudyError(f"there is no site '{site}' with relationships; there are {', '.join(found.p)}.")
        study = load_study(view.folder / "study.toml")
        method: Any = study.method
        fading = [method.fading(round) for _, round in timeline(method, study.plan.rounds)]
        words = [f"{one} {found.own(one)[-1]:.2f} from itself, most else from {found.friend(one)}" for one in found.p]
        yield Finding(
            "relationships",
            "Which hospitals help which",
            "After the last round: " + "; ".join(words) + ". A row of the map is a hospital, a number how much its "
            "personal model takes from the core of the hospital above; p never leaves a hospital, only a simulation "
            "shows all of them",
            found.to_json(),
            {
                "relationships": relation_map(found.matrix(), found.sites),
                f"relationships-{site}": relation_figures.of_one_site(found, site),
                "self-relationships": relation_figures.of_all_selves(found),
                "scheduler": relation_figures.fading(fading, method.scheduler),
            },
            run=view.folder,
        )


def of_schedules(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for view in [view for view in runs.views if view.method == "ufps"] or runs.views[:1]:
        method = load_study(view.folder / "study.toml").method
        if not isinstance(method, UFPS):
            raise RunError(f"{view.folder} weighs no cases by their uncertainty; give a run of ufps.")
        found = schedules.of_method(method)
        yield Finding(
            "schedules",
            "How much a case counts by its uncertainty",
            f"Weights in the loss over the rounds of the schedule; this run: {method.scheduler}",
            {"scheduler": method.scheduler, "weights": {kind: dict(by) for kind, by in found.items()}},
            {"schedules": schedules.draw(found, method.scheduler)},
            run=view.folder,
        )


def of_pseudo_labels(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if pseudo_labels.teaches(run)] or runs.opened[:1]:
        pseudo_labels.checked(run)
        sites = pseudo_labels.taught_sites(run, options.site)
        say(f"pseudo labels of {run.name}")
        found = pseudo_labels.qualities(run, run.server, sites)
        if not found:
            raise RunError(
                f"{run.name}: the masks of these sites' training cases show only what the sites annotate, so nobody "
                "knows how good the other labels are."
            )
        kept = list(pseudo_labels.by_round(run, sites))
        drawn = {"pseudo-labels": pseudo_labels.bars(found)}
        if len(kept) > 1:
            drawn["pseudo-labels-rounds"] = pseudo_labels.curves(kept, run.study.task.labels)
        worst = min(
            (one.dice, label, site)
            for site, organs in found.items()
            for label, by in organs.items()
            for one in [by[pseudo_labels.TEACHERS]]
            if one.dice is not None
        )
        yield Finding(
            "pseudo-labels",
            "How good the labels are that sites are taught with",
            f"Dice against the hidden masks of the training cases, by the run's best state; the teachers' worst is "
            f"{worst[1]} at {worst[2]}, {worst[0]:.3f}",
            {
                "sites": pseudo_labels.to_json(found),
                "rounds": {
                    str(one.round): {"taught": one.teaches, "sites": pseudo_labels.to_json(one.found)} for one in kept
                },
            },
            drawn,
            pseudo_labels.to_markdown(found),
            run.path,
        )


def of_agreement(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if pseudo_labels.main_teacher(run.study.method)] or runs.opened[:1]:
        found = agreement.examples(run, pseudo_labels.taught_sites(run, options.site))
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
            agreement.to_markdown(found),
            run.path,
        )
