"""The end of a run: full scores of the best and the last state, releases to all sites, the summary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from consilium.engine.active import ActiveRun, privacy_spent, round3
from consilium.engine.scoring import score_end
from consilium.errors import NotForOutsiders
from consilium.machine import peak_memory_mb
from consilium.messages import Envelope
from consilium.method import Best
from consilium.scores.summary import left_out, passed_over, run_summary
from consilium.site import SiteCard
from consilium.tree import flatten
from consilium.weights import SiteName


def finish(active: ActiveRun, server: Any, merged: Mapping[SiteName, int], best: Best | None) -> Mapping[str, Any]:
    assert best is not None
    final, last_round = active.line[-1][1], active.rounds
    end = active.last_counting[1].index
    if any(phase.from_best for phase, _ in active.line[end + 1 :]):  # adaptation and calibration refine the best
        best = active.folder.states.keep(replace(best, server=server, merged=dict(merged)))
    best_round = max(mark.round for mark in best.valid.values()) if best.valid else last_round
    last = active.folder.states.last(active.method)
    if not active.folder.finished and (why := passed_over(active.folder.events(), best_round)):
        active.folder.warn(why)
    for name, state, number in (("best", best, best_round), ("last", last, last_round)):
        score_end(active, name, state, replace(final, index=number - 1, before=0, phase=name))
    undelivered = active.wire.deliver(
        {name: flatten(active.method.release(best.server, card)) for name, card in _recipients(active).items()},
        Envelope(
            active.folder.path.name,
            active.study.method_name,
            final,
            best.merged,
            profile=active.folder.origin.trained_on(),
        ),
    )
    summary = {**_summary(active, best, best_round, last_round), **_lacking(active, undelivered)}
    active.folder.finish(active.method, summary)
    active.folder.note("finish", seconds=summary["seconds"])
    return summary


def _lacking(active: ActiveRun, undelivered: Collection[SiteName]) -> dict[str, Any]:
    """Sites that did not answer at the end: a later `resume` asks them again, except those that were left out."""
    unscored = sorted({site for sites in active.folder.unscored().values() for site in sites})
    found = {"unscored": unscored, "undelivered": sorted(undelivered), "left_out": left_out(active.folder.events())}
    return {key: sites for key, sites in found.items() if sites}


def _recipients(active: ActiveRun) -> dict[SiteName, SiteCard | None]:
    """Every site, or in a run that has ended before, the sites without a release."""
    names = active.folder.summary().get("undelivered", ()) if active.folder.finished else active.roll.audience
    return {name: active.roster.get(name) for name in names}


def _summary(active: ActiveRun, best: Best, best_round: int, last_round: int) -> Mapping[str, Any]:
    rows = active.folder.rows()
    keys = ("event", "phase", "round", "site")
    events = {tuple(event.get(key) for key in keys): event for event in active.folder.events()}.values()
    train = [event for event in events if event["event"] == "train"]
    rounds = {key: mark.round for key, mark in best.valid.items()}
    apart = bool(rounds) and active.method.headline not in rounds  # models of several rounds, chosen separately
    summary = run_summary(
        method=active.study.method_name,
        seed=active.study.plan.seed,
        rounds=active.study.plan.rounds,
        headline_model=active.method.headline,
        headline_metric=active.study.headline,
        best_rows=[row for row in rows if row.phase == "best"],
        last_rows=[row for row in rows if row.phase == "last"],
        best_round=best_round,
        last_round=last_round,
        seconds=round3(sum(event["seconds"] for event in events if event["event"] == "round")),
        bytes_up=sum(event["bytes_up"] for event in train),
        bytes_down=sum(event["bytes_down"] for event in train),
        peak_memory_mb=round3(peak_memory_mb() + max(active.memory_mb.values(), default=0.0)),
        best_rounds=rounds,
        all_rows=() if active.study.plan.test_rounds else rows,  # bmcta is of all rounds
        joint=[row for row in rows if row.phase not in ("best", "last")] if apart else (),
    )
    hidden = _hidden(active)
    privacy = {"privacy": privacy_spent(active)} if active.study.privacy.on else {}
    passes = {"passes": _passes(active, best.server)}
    return {**summary, **passes, **({"hidden": hidden} if hidden else {}), **privacy}


def _passes(active: ActiveRun, server: Any) -> int:
    """Forward passes per case at a member of the federation, of the headline model."""
    card = next(iter(active.roster.values()))
    try:
        return active.method.deploy(active.task, None, active.method.release(server, card)).passes
    except NotForOutsiders:  # the site uses its own model, which the server does not have
        return 1


def _hidden(active: ActiveRun) -> dict[SiteName, list[str]]:
    """The labels that were scored on test masks although the site does not annotate them: possible only in a trial."""
    if active.study.data.test_masks != "complete":
        return {}
    drawn = {name: facts.labels for name, facts in active.roll.facts.items()}
    unknown = {name: [x for x in active.task.labels if x not in labels] for name, labels in drawn.items()}
    return {name: labels for name, labels in sorted(unknown.items()) if labels}
