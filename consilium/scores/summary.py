"""The scores in a run's summary, and the sites without scores."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from consilium.scores.means import MEAN, ScoreEntry, Summary, summarise, with_label_mean
from consilium.scores.rows import ScoreRow
from consilium.wording import counted, listed

ENDS = ("best", "last")  # the two states that are scored in full when a run ends


def unscored(events: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By state of `ENDS`: the sites whose scores are missing in the journal; empty if none is."""
    found: dict[str, list[str]] = {}
    waiting: dict[str, set[str]] = defaultdict(set)
    for event in events:
        phase = str(event.get("phase", ""))
        if event["event"] == "unscored":
            waiting[phase].add(str(event["site"]))
        elif event["event"] == "score" and phase in ENDS:
            found[phase] = list(event.get("unscored", sorted(waiting.pop(phase, ()))))  # older journals have no list
    return {phase: sites for phase, sites in found.items() if sites}


def passed_over(events: Iterable[Mapping[str, Any]], best: int) -> str:
    """Why rounds after the best one could not be chosen, in a sentence; empty if all of them could."""
    members: Collection[str] = ()
    waiting: set[str] = set()
    rounds, sites = 0, set[str]()
    for event in events:
        phase = event.get("phase")
        if event["event"] in ("start", "resume"):
            members, waiting = event["sites"], set()  # a round that a crash interrupted is scored again
        elif event["event"] == "unscored" and phase not in ENDS and event["site"] in members:
            waiting.add(str(event["site"]))
        elif event["event"] == "score" and phase not in ENDS:
            if waiting and event["round"] > best:
                rounds, sites = rounds + 1, sites | waiting
            waiting = set()
    if not rounds:
        return ""
    return (
        f"the best state is that of round {best}: {counted(rounds, 'later round')} could not be chosen, because "
        f"{listed(sorted(sites))} did not score {'it' if rounds == 1 else 'all of them'}."
    )


def missed_phases(events: Iterable[Mapping[str, Any]]) -> str:
    """Who answered nothing in a phase beside the counted rounds, such as a calibration, in sentences."""
    asides: Collection[str] = ()
    missed: dict[str, set[str]] = defaultdict(set)
    answered: set[tuple[str, str]] = set()
    for event in events:
        phase, site = str(event.get("phase", "")), str(event.get("site", ""))
        if event["event"] == "start":
            asides = event.get("aside", ())
        elif event["event"] == "train":
            answered.add((phase, site))
        elif event["event"] in ("lost", "refused", "away") and phase in asides:
            missed[site].add(phase)
    found = {site: sorted(p for p in phases if (p, site) not in answered) for site, phases in sorted(missed.items())}
    return " ".join(f"{site} took no part in {listed(phases)}." for site, phases in found.items() if phases)


def left_out(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The sites whose cards were not plausible, with the reason; not those that took part again later."""
    found: dict[str, str] = {}
    for event in events:
        if event["event"] == "left out":
            found[str(event["site"])] = str(event["why"])
        elif event["event"] == "train":
            found.pop(str(event["site"]), None)
    return found


def run_summary(
    method: str,
    seed: int,
    rounds: int,
    headline_model: str,
    headline_metric: str,
    best_rows: Iterable[ScoreRow],
    last_rows: Iterable[ScoreRow],
    best_round: int,
    last_round: int,
    seconds: float,
    bytes_up: int,
    bytes_down: int,
    peak_memory_mb: float,
    best_rounds: Mapping[str, int] | None = None,
    all_rows: Iterable[ScoreRow] = (),
    joint: Sequence[ScoreRow] = (),
) -> dict[str, Any]:
    """The content of summary.json: test scores of the best and of the last round.

    `best_rounds` are those of each model. `joint` are the rows of the training rounds, for the best round of all models
    together.
    """
    best_rows = with_label_mean(best_rows)
    scores, valid = summarise(best_rows, "test"), summarise(best_rows, "valid")
    best: dict[str, Any] = {
        "round": int(best_round),
        "scores": scores,
        "valid": _headline(valid, headline_model, headline_metric),
    }
    if best_rounds is not None:
        best["rounds"] = {name: int(round_) for name, round_ in best_rounds.items()}
    highest = bmcta(all_rows, headline_model) if headline_metric == "accuracy" else {}
    together = joint_best(joint, headline_model, headline_metric)
    return {
        "method": method,
        "seed": int(seed),
        "rounds": int(rounds),
        "headline": _headline(scores, headline_model, headline_metric),
        "best": best,
        **({"joint": together} if together else {}),
        "last": {"round": int(last_round), "scores": summarise(with_label_mean(last_rows), "test")},
        **({"bmcta": highest} if highest else {}),
        "seconds": float(seconds),
        "bytes_up": int(bytes_up),
        "bytes_down": int(bytes_down),
        "peak_memory_mb": float(peak_memory_mb),
    }


def bmcta(rows: Iterable[ScoreRow], model: str) -> dict[str, Any]:
    """The best mean client test accuracy of the APPLE paper: the highest site mean on test over all scored states.

    Test cases choose the round here, so it is reported only under this name.
    """
    states: dict[tuple[int, str], list[ScoreRow]] = defaultdict(list)
    for row in rows:
        if (row.model, row.metric, row.split) == (model, "accuracy", "test"):
            states[row.round, row.phase].append(row)
    found: dict[str, Any] = {}
    for (round_, _), scored in sorted(states.items()):
        entry = _headline(summarise(with_label_mean(scored), "test"), model, "accuracy")
        if "site_mean" in entry and entry["site_mean"] > found.get("site_mean", -math.inf):
            found = {"round": round_, **entry}
    return found


def joint_best(rows: Sequence[ScoreRow], model: str, metric: str) -> dict[str, Any] | None:
    """The best round of all models together on validation, and their test scores in it; ties go to the first.

    None if no round has validation scores.
    """
    rounds: dict[int, list[ScoreRow]] = defaultdict(list)
    for row in rows:
        if (row.model, row.metric) == (model, metric):
            rounds[row.round].append(row)
    found: dict[str, Any] | None = None
    for round_ in sorted(rounds):
        labelled = with_label_mean(rounds[round_])
        valid = _headline(summarise(labelled, "valid"), model, metric)
        if "site_mean" in valid and (found is None or valid["site_mean"] > found["valid"]["site_mean"]):
            found = {"round": round_, "valid": valid, "test": _headline(summarise(labelled, "test"), model, metric)}
    return found


def _headline(scores: Summary, model: str, metric: str) -> dict[str, Any]:
    entry = scores.get(model, {}).get(metric, {}).get(MEAN, ScoreEntry(sites={}))
    headline: dict[str, Any] = {"model": model, "metric": metric, "label": MEAN}
    return headline | {key: value for key, value in entry.items() if key in ("sites", "site_mean", "pooled", "outside")}
