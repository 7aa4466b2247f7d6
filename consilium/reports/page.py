"""One self-contained page about one or more runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.errors import RunError
from consilium.reports import drawings
from consilium.reports.case_counts import case_grid
from consilium.reports.comparing import compare, difference, one_task
from consilium.reports.drawings import Overlay
from consilium.reports.findings import findings
from consilium.reports.grouping import Group, groups, once
from consilium.reports.labels import label_tables, site_tables
from consilium.reports.leaks import LeakPage
from consilium.reports.reading import RunView, flat, settings
from consilium.reports.rendering import check_page_place, unplaced, write_html
from consilium.reports.table_formats import difference_grid
from consilium.reports.tables import SITE_MEAN, Comparison, TableLine, called

__all__ = ["Overlay", "write_page"]

_MISSED = ("away", "lost", "refused")  # journal events of a site that is missing from a round

_NAMED = ("study.name", "study.seed", "method.name")


def write_page(
    runs: Sequence[RunView],
    to: Path,
    overlays: Sequence[Overlay] = (),
    title: str | None = None,
    leaks: Sequence[LeakPage] = (),
) -> None:
    """Write the report; a section without data is left out, and the file appears whole or not at all."""
    if not runs:
        raise RunError("there is no run to report on; name at least one run folder.")
    check_page_place(to, RunError)
    write_html("page.html", _content(once(runs), overlays, title, leaks), to, RunError)


def _content(
    runs: Sequence[RunView], overlays: Sequence[Overlay], title: str | None, leaks: Sequence[LeakPage]
) -> dict[str, Any]:
    one_task(runs)
    comparison = compare(runs) if any(run.summary for run in runs) else None
    every = groups(runs)
    tints = drawings.tints(every, comparison)
    sites = _sites(runs)
    return {
        "title": title or f"Federated training across {_number(len(sites))} site{'s' * (len(sites) != 1)}",
        "lead": _lead(comparison) if comparison else "No run is finished yet; this page shows how far they are.",
        "unfinished": [run.name for run in runs if not run.summary],
        "unscored": [(run.name, ", ".join(run.unscored)) for run in runs if run.unscored],
        "comparison": comparison,
        "differences": difference_grid(comparison) if comparison else [],
        "bounded": any(group.kind == "bound" and group.runs[0].summary for group in every),
        "gap": drawings.gap(comparison, tints) if comparison else None,
        "curves": drawings.curves(every, tints),
        "matrix": drawings.site_matrix(comparison) if comparison else None,
        "elsewhere": [picture for group in every if (picture := drawings.elsewhere(group))],
        "selection": [picture for group in every if (picture := drawings.selected(group))],
        "relations": [picture for group in every if (picture := drawings.relations(group))],
        "examples": drawings.examples(overlays),
        "legend": drawings.legend(overlays),
        "cases": case_grid(runs),
        "findings": findings(every),
        "kept": _kept(every),
        "costs": drawings.cost_grid(comparison.groups) if comparison else [],
        "cost": drawings.cost_picture(comparison.groups, tints) if comparison else None,
        "labels": label_tables(comparison) if comparison else [],
        "site_labels": list(site_tables(comparison).values()) if comparison else [],
        "hidden": _hidden(runs),
        "missed": _missed(every),
        "odd": _odd(runs),
        "leaks": leaks,
        "same": _same(runs),
        "differing": _differing(every),
        "origin": _origin(runs),
        "groups": every,
        "run_names": [run.name for run in runs],
    }


def _lead(comparison: Comparison) -> str:
    """The result in a sentence or two; of runs with both optimiser states, for each."""
    if len(comparison.states) > 1:
        return " ".join(f"Optimiser state {part.state}: {_lead(part)}" for part in comparison.apart())
    lines = [line for line in comparison.lines if SITE_MEAN in line.cells and line.kind != "elsewhere"]
    if not lines:
        return "The runs are finished, but they hold no test scores of sites inside the federation."
    federated = [line for line in lines if line.kind == "federated"]
    leaders = comparison.best(SITE_MEAN)
    first = next((line for line in federated if line.name in leaders), (federated or lines)[0])
    rest = [line for line in lines if line is not first and line.sites == first.sites and not comparison.unlike]
    rest = [line for line in rest if line.kind != "federated" or line.name == "FedAvg"] or rest[:3]
    others = [f"{_said(line)} {line.cells[SITE_MEAN].text(3)}" for line in rest]
    n = len(first.sites)
    where = f"Over {_number(n)} site{'s' * (n != 1)}"
    sentence = f"{where}, {_said(first)} reaches a test {called(comparison.metric)} of {_level(first)}"
    sentence += f"; for comparison: {', '.join(others)}." if others else "."
    return f"{sentence} {_against(comparison, first)}".strip()


def _number(n: int) -> str:
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    return words[n] if n < len(words) else str(n)


def _said(line: TableLine) -> str:
    return {"bound": "training on pooled data", "local": "each site alone"}.get(line.kind, line.name)


def _level(line: TableLine) -> str:
    text = line.cells[SITE_MEAN].text(3)
    if line.interval:
        return text + " (95 % interval {:.3f} to {:.3f})".format(*line.interval)
    return text + (f" (mean ± standard deviation over {line.count} seeds)" if line.count > 1 else "")


def _against(comparison: Comparison, first: TableLine) -> str:
    """The leader against FedAvg on the same cases, if both are there once."""
    runs = {group.name: group.runs for group in comparison.groups if len(group.runs) == 1}
    if first.name not in runs or "FedAvg" not in runs or first.name == "FedAvg":
        return ""
    found = difference(runs[first.name][0], runs["FedAvg"][0])
    if not found:
        return ""
    way = "above" if found["difference"] >= 0 else "below"
    size, ends = abs(found["difference"]), sorted(abs(found[end]) for end in ("low", "high"))
    if found["low"] * found["high"] <= 0:
        return f"On the same {found['cases']} cases {first.name} and FedAvg cannot be told apart."
    return (
        f"On the same {found['cases']} cases {first.name} is {size:.3f} {way} FedAvg "
        f"(95 % interval {ends[0]:.3f} to {ends[1]:.3f})."
    )


def _sites(runs: Sequence[RunView]) -> list[str]:
    found: dict[str, None] = {}
    for run in runs:
        found |= dict.fromkeys(run.summary["headline"]["sites"] if run.summary else run.curve.sites)
    return list(found)


@dataclass(frozen=True)
class BestRounds:
    """Which rounds a run's best models are of, and what the jointly best round would have given."""

    run: str
    rounds: str
    each: float | None  # test site mean of the models at their own best rounds
    joint: int
    together: float | None  # test site mean of all models at the jointly best round


def _kept(every: Sequence[Group]) -> list[BestRounds]:
    """Of runs whose models are of several rounds."""
    found = []
    for group in every:
        for run in group.runs:
            joint = run.summary.get("joint") if run.summary else None
            if not joint or not run.summary:
                continue
            name = group.name if len(group.runs) == 1 else f"{group.name}, seed {run.seed}"
            rounds = ", ".join(f"{_model_said(key)} {n}" for key, n in sorted(run.summary["best"]["rounds"].items()))
            ends = run.summary["headline"].get("site_mean"), joint["test"].get("site_mean")
            found.append(BestRounds(name, rounds, ends[0], joint["round"], ends[1]))
    return found


def _model_said(key: str) -> str:
    """ "personal/hk" of a summary as words."""
    words = {"super:routed": "selector", "global:pooled": "global model"}
    return words.get(key, key.removeprefix("personal/").replace(":", ", "))


def _hidden(runs: Sequence[RunView]) -> str:
    """What was scored though its site does not annotate it, site by site."""
    found = {(site, tuple(names)) for run in runs for site, names in (run.summary or {}).get("hidden", {}).items()}
    return "; ".join(f"{', '.join(names)} at {site}" for site, names in sorted(found))


def _missed(every: Sequence[Group]) -> list[tuple[str, str, str, int]]:
    """Run, site, what happened, in how many rounds."""
    counts = Counter(
        (run.name, str(event.get("site", "")), str(event["event"]))
        for group in every
        for run in group.runs
        for event in run.events
        if event.get("event") in _MISSED
    )
    return [(*key, n) for key, n in sorted(counts.items())]


def _odd(runs: Sequence[RunView]) -> list[tuple[str, str, str, str, str]]:
    """Updates that were refused or found odd: run, site, what became of them, in which rounds, and the first reason."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for run in runs:
        for event in run.events:
            verdict = event.get("firewall", {})
            if event.get("event") != "refused" and verdict.get("verdict") != "odd":
                continue
            what = "refused" if event["event"] == "refused" else "odd, but merged"
            phase = event.get("phase", "train")
            where = f"{event['round']}" if phase == "train" else f"{phase} {event['round']}"
            said = unplaced(str(event.get("why") or verdict.get("why", "")))
            found.setdefault((run.name, str(event.get("site", "")), what), []).append((where, said))
    return [(*key, ", ".join(where for where, _ in seen), seen[0][1]) for key, seen in sorted(found.items())]


def _same(runs: Sequence[RunView]) -> list[tuple[str, str]]:
    studies = [settings(run) for run in runs]
    return [(key, _text(value)) for key, value in studies[0].items() if all(s.get(key) == value for s in studies)]


def _differing(every: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all groups; names and seeds stand elsewhere on the page."""
    studies = [settings(group.runs[0]) for group in every]
    keys = dict.fromkeys(key for study in studies for key in study if key not in _NAMED)
    return [
        (key, [_text(study[key]) if key in study else "–" for study in studies])
        for key in keys
        if any(key not in study or study[key] != studies[0].get(key) for study in studies)
    ]


def _origin(runs: Sequence[RunView]) -> list[tuple[str, str]]:
    """Versions and machine, each value once; many runs usually share one origin."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in flat({key: part for key, part in run.origin.items() if key not in ("members", "sites")}):
            found.setdefault(key, {})[_text(value)] = None
    return [(key, ", ".join(values)) for key, values in found.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "(empty)"
    text = "(empty)" if value in ("", {}) else unplaced(str(value))
    return text if len(text) <= 60 else text[:57] + "…"
