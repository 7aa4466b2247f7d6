"""Scores a state at all sites, and keeps the best state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from consilium.engine.active import ActiveRun
from consilium.engine.repair import memory_made_again, stop_without_memory
from consilium.intake import scored
from consilium.messages import Envelope, Reply
from consilium.method import Best, Phase, Valid
from consilium.score_sheets import Scorer
from consilium.scores.means import summarise, with_label_mean
from consilium.scores.rows import ScoreRow, rows_check
from consilium.scores.summary import ENDS
from consilium.site import Round
from consilium.tree import Packet, flatten
from consilium.weights import SiteName


def score_if_due(
    active: ActiveRun, phase: Phase, round: Round, server: Any, merged: Mapping[SiteName, int], best: Best | None
) -> Best | None:
    if not round.scored or (round.number, phase.name) in active.folder.journal.scored():
        return best
    rows, missing = _score(active, server, merged, round, full=False)
    complete = not any(name in active.roster for name in missing)
    if complete or (best is None and (phase, round) == active.last_counting):
        # means over different sites are not comparable, so a round that some sites did not score cannot be the best
        now = Best(server, _valid(active, rows, round), dict(merged))
        best = active.folder.states.keep(active.method.keep(best, now) if best and now.valid else now)
    _seal(active, rows, round.number, phase.name)
    return best


def _score(
    active: ActiveRun,
    server: Any,
    merged: Mapping[SiteName, int],
    round: Round,
    full: bool,
    sites: Collection[SiteName] = (),
) -> tuple[list[ScoreRow], list[SiteName]]:
    """The scores of all sites, or of these, and the sites that did not answer."""
    releases = {}
    for name in sites or active.roll.audience:
        releases[name] = flatten(active.method.release(server, active.roster.get(name)))
    head = Envelope(active.folder.path.name, active.study.method_name, round, merged, full=full)
    answers: dict[SiteName, list[ScoreRow]] = {}
    lost = dict.fromkeys(releases, "")
    for name, reply in _score_replies(active, releases, head):
        rows, lost[name] = (None, reply.lost) if reply.packet is None else _scored(active, name, reply.packet, round)
        if rows is not None:
            answers[name] = rows
    missing = [name for name in releases if name not in answers]
    for name in missing:
        active.folder.note("unscored", round=round.number, phase=round.phase, site=name, why=lost[name])
    return [row for name in sorted(answers) for row in answers[name]], missing


def _score_replies(
    active: ActiveRun, releases: Mapping[SiteName, Packet], head: Envelope
) -> Iterator[tuple[SiteName, Reply]]:
    """The replies; after a repair of its memory a site is asked again."""
    damaged: dict[SiteName, Reply] = {}
    for name, reply in active.wire.score(releases, head):
        if reply.error == "memory":
            damaged[name] = reply
        else:
            yield name, reply
    for name, reply in damaged.items():
        if name in active.roster and memory_made_again(active, name, head.merged.get(name, -1)):
            reply = dict(active.wire.score({name: releases[name]}, head)).get(name, reply)
        stop_without_memory(active, reply)
        yield name, reply


def _scored(active: ActiveRun, name: SiteName, packet: Packet, round: Round) -> tuple[list[ScoreRow] | None, str]:
    """A site's scores, if all are plausible; the server, not the site, sets their site and round."""
    names, labels = frozenset(active.roll.facts), frozenset(active.task.labels)
    cases = active.roll.facts[name].scored
    return scored(packet, Scorer(name, active.roll.audience[name], cases, names, labels), round)


def _seal(
    active: ActiveRun,
    rows: list[ScoreRow],
    round: int,
    phase: str,
    missing: Sequence[SiteName] = (),
    before: Sequence[ScoreRow] = (),
) -> None:
    """Log the scores, which makes them valid; `before` are logged scores of the same state."""
    active.folder.add_scores(rows)
    rows = [*before, *rows]
    model, metric = active.method.headline, active.study.headline
    if rows and not any(row.model == model for row in rows):  # a phase before the method's headline model exists
        model = rows[0].model
    facts: dict[str, Any] = {}
    meant = with_label_mean(rows)
    for split in ("valid", "test"):
        entry = summarise(meant, split).get(model, {}).get(metric, {}).get("mean", {})
        facts[split] = {"site_mean": entry.get("site_mean"), "sites": entry.get("sites", {})}
    if phase in ENDS:
        facts["unscored"] = sorted(missing)
    active.folder.note(
        "score",
        round=round,
        phase=phase,
        model=model,
        metric=metric,
        rows=len(rows),
        check=rows_check(rows),
        **facts,
    )


def _valid(active: ActiveRun, rows: list[ScoreRow], round: Round) -> dict[str, Valid]:
    """The validation scores that `keep` uses: a model's site mean, `:pooled`, `:routed`, and each owner's own."""
    found: dict[str, float] = {}
    for model, metrics in summarise(with_label_mean(rows), "valid").items():
        entry = metrics.get(active.study.headline, {}).get("mean", {})
        routed = metrics.get("routed", {}).get("", {})
        values = {"": entry.get("site_mean"), ":pooled": entry.get("pooled"), ":routed": routed.get("site_mean")}
        found.update({f"{model}{key}": value for key, value in values.items() if value is not None})
        owned = any(row.of for row in rows if row.model == model)
        found.update({f"{model}/{site}": value for site, value in entry.get("sites", {}).items() if owned})
    return {key: Valid(value, round.number) for key, value in found.items()}


def score_end(active: ActiveRun, name: str, state: Best, round: Round) -> None:
    """All scores of the best or the last state; in a run that ended without some sites, only theirs."""
    sites: Sequence[SiteName] = ()
    before: list[ScoreRow] = []
    if (round.number, name) in active.folder.journal.scored():
        sites = active.folder.unscored().get(name, ())
        if not sites:
            return
        before = [row for row in active.folder.rows() if row.phase == name]
    if name == "last" and active.folder.states.best_is_last():  # a state that is both is scored once
        scored = [row for row in active.folder.rows() if row.phase == "best" and (row.site in sites or not sites)]
        rows = [replace(row, phase=name, round=round.number) for row in scored]
        missing = active.folder.unscored().get("best", ())
    else:
        rows, missing = _score(active, state.server, state.merged, round, full=True, sites=sites)
    if set(missing) != set(sites) or not before:
        _seal(active, rows, round.number, name, missing, before)
