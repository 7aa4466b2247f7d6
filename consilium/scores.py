"""Scores as a table: the rows, their file, and what a run's summary says of them."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from consilium.errors import RunError

MEAN = "mean"  # the label of a case's mean over its labels
EMPTY = "empty"  # value 1: the truth has nothing of this label, so the case has no other score for it
CHOSEN = "chosen:"  # chosen:<model>, value 1 if the selector sent the case there
_SHARES = (
    "dice",
    "jaccard",
    "sensitivity",
    "specificity",
    "accuracy",
    "auc",
    "confidence",
    "routed",
    "empty",
    "missed",
)
_DISTANCES = ("hd", "hd95", "hd_mm", "hd95_mm")  # a distance to nothing is not finite
RANGES = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    **dict.fromkeys((*_DISTANCES, "false_positive_volume"), (0.0, math.inf)),
    "volume_error": (-1.0, math.inf),
}
_CHUNK = 4_000_000  # resampled values held at once, 32 MB


@dataclass(frozen=True, slots=True)
class Row:
    """One number: what `model` scored on one case."""

    round: int
    phase: str
    model: str  # global, personal, super, local, pooled, ensemble, teacher
    of: str  # the site the model belongs to, or empty
    when: str  # merged, trained, adapted
    site: str  # where the case lies
    outside: bool  # the site takes no part in the federation
    split: str
    case: str
    label: str
    metric: str
    value: float


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Row))
_case_of = attrgetter(*COLUMNS[:9], "metric")
_cells = attrgetter(*COLUMNS[:-1])  # all but the value

ByCase = dict[str, dict[str, float]]  # site → case → value


class Entry(TypedDict, total=False):
    """What is said of one model, metric and label. A key without data is left out, so JSON never holds NaN."""

    sites: dict[str, float]  # mean over the site's cases
    site_mean: float  # unweighted mean over the sites inside the federation
    pooled: float  # mean over all cases of those sites
    outside: dict[str, float]
    cases: dict[str, int]
    empty: dict[str, int]  # cases left out because the truth has nothing of this label
    undefined: dict[str, int]  # cases left out because the value is not finite (a distance to an empty prediction)


Summary = dict[str, dict[str, dict[str, Entry]]]  # model → metric → label


def range_of(metric: str) -> tuple[float, float, bool] | None:
    """The lowest and highest value a metric can have, and whether NaN is one; None: there is no such metric."""
    if metric.startswith(CHOSEN):
        return 0.0, 1.0, False
    name = metric.removeprefix("slice_").removeprefix("clean_")
    return (*RANGES[name], name in _DISTANCES) if name in RANGES else None


# the file


def write_rows(rows: Iterable[Row]) -> str:
    """CSV lines without the header; floats by repr, so that they come back exactly."""
    rows = list(rows)
    text = _csv(rows, csv.QUOTE_MINIMAL)
    # the writer leaves a carriage return unquoted, and the reader would end the line there
    return _csv(rows, csv.QUOTE_ALL) if "\r" in text else text


def _csv(rows: Iterable[Row], quoting: Literal[0, 1]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    for row in rows:
        cells = [int(cell) if isinstance(cell, bool) else cell for cell in _cells(row)]
        writer.writerow([*cells, repr(float(row.value))])
    return text.getvalue()


def read_rows(path: Path) -> list[Row]:
    """The rows of a scores.csv; a last line cut short by a crash is dropped."""
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        records = list(csv.reader(io.StringIO(whole.decode() + "\n", newline="")))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; is it a run folder's scores.csv?") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RunError(f"{path} is damaged ({error}); restore it, or repeat the run.") from None
    if not whole:
        return []
    if tuple(records[0]) != COLUMNS:
        raise RunError(f"{path} does not start with the line {','.join(COLUMNS)}; it is not a table of scores.")
    if len(records[-1]) < len(COLUMNS):  # cut inside a quoted name that holds a line break
        records.pop()
    return [_parse(record, number, path) for number, record in enumerate(records[1:], start=2)]


def _parse(record: list[str], number: int, path: Path) -> Row:
    try:
        round_, phase, model, of, when, site, outside, split, case, label, metric, value = record
        flag = {"0": False, "1": True}[outside]
        return Row(int(round_), phase, model, of, when, site, flag, split, case, label, metric, float(value))
    except (ValueError, KeyError):
        raise RunError(f"{path}: record {number} is not a score: {','.join(record)!r}; restore the file.") from None


# from rows to means


def with_label_mean(rows: Iterable[Row]) -> list[Row]:
    """The rows and, for every metric with labels, one more per case: the mean over the labels it has.

    A label that is empty in the truth has no row and so does not count; a value that is not finite makes the mean
    undefined rather than flattering it.
    """
    rows = list(rows)
    cases: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.label and row.metric != EMPTY:
            cases[_case_of(row)][row.label] = row
    without = [list(found.values()) for found in cases.values() if MEAN not in found]
    return rows + [replace(found[0], label=MEAN, value=_mean(row.value for row in found)) for found in without]


def by_case(
    rows: Iterable[Row], model: str, metric: str, label: str, split: str, of: str | None = None, outside: bool = False
) -> ByCase:
    """Finite values by inside (or `outside`) site and case: of each site's own model, or of the one that is `of`'s.

    Of a case that was scored twice (after a resume, or merged and then trained) the last value counts.
    """
    found: ByCase = defaultdict(dict)
    for row in rows:
        if row.outside != outside or (row.model, row.metric, row.label, row.split) != (model, metric, label, split):
            continue
        if row.of == of if of is not None else _own(row):
            found[row.site][row.case] = row.value
    finite = {s: {c: v for c, v in sorted(found[s].items()) if math.isfinite(v)} for s in sorted(found)}
    return {site: cases for site, cases in finite.items() if cases}


def summarise(rows: Sequence[Row], split: str) -> Summary:
    """Means by model, metric and label of one split; a model with owners counts only at its own site."""
    values: dict[tuple[str, str, str], ByCase] = defaultdict(lambda: defaultdict(dict))
    empty: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    outside: set[str] = set()
    for row in rows:
        if row.split != split or not _own(row):
            continue
        if row.outside:
            outside.add(row.site)
        if row.metric != EMPTY:
            values[row.model, row.metric, row.label][row.site][row.case] = row.value
        elif row.value:
            empty[row.model, row.label][row.site].add(row.case)
    summary: Summary = {}
    for (model, metric, label), sites in sorted(values.items()):
        missing = {site: len(cases) for site, cases in sorted(empty[model, label].items())}
        summary.setdefault(model, {}).setdefault(metric, {})[label] = _entry(sites, outside, missing)
    return summary


def matrix(rows: Iterable[Row], model: str, metric: str, label: str, split: str) -> dict[str, dict[str, float]]:
    """Owner → site → mean over the site's cases: how each site's model does elsewhere, outside sites included."""
    values: dict[str, ByCase] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.of and (row.model, row.metric, row.label, row.split) == (model, metric, label, split):
            values[row.of][row.site][row.case] = row.value
    return {of: means for of in sorted(values) if (means := _means(values[of]))}


def selection(rows: Iterable[Row], split: str) -> dict[str, dict[str, float]]:
    """Site → choice → how often the selector sent the site's cases there ("global", "personal/hk")."""
    chosen: dict[str, ByCase] = defaultdict(lambda: defaultdict(dict))
    cases: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.metric.startswith(CHOSEN) and row.split == split:
            chosen[row.site][row.metric.removeprefix(CHOSEN)][row.case] = row.value
            cases[row.site].add(row.case)
    # divided by the cases, not by the rows, so that a table without the zeros says the same
    return {
        site: {choice: math.fsum(hits.values()) / len(cases[site]) for choice, hits in sorted(chosen[site].items())}
        for site in sorted(chosen)
    }


def _own(row: Row) -> bool:
    return row.of in ("", row.site)


def _mean(values: Iterable[float]) -> float:
    """Exactly rounded, so that it does not depend on who answered first."""
    found = [float(value) for value in values]
    return math.fsum(found) / len(found) if all(map(math.isfinite, found)) else math.nan


def _means(sites: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    finite = {site: [v for v in sites[site].values() if math.isfinite(v)] for site in sorted(sites)}
    return {site: _mean(values) for site, values in finite.items() if values}


def _entry(sites: ByCase, outside: set[str], empty: dict[str, int]) -> Entry:
    means = _means(sites)
    inside = [site for site in means if site not in outside]
    finite = {site: [v for v in sites[site].values() if math.isfinite(v)] for site in sorted(sites)}
    entry = Entry(sites={site: means[site] for site in inside})
    if inside:
        entry["site_mean"] = _mean(means[site] for site in inside)
        entry["pooled"] = _mean(value for site in inside for value in finite[site])
    if guests := {site: means[site] for site in means if site in outside}:
        entry["outside"] = guests
    entry["cases"] = {site: len(values) for site, values in finite.items() if values}
    if empty:
        entry["empty"] = empty
    if undefined := {site: n for site, cases in sorted(sites.items()) if (n := len(cases) - len(finite[site]))}:
        entry["undefined"] = undefined
    return entry


# how sure


def interval(values: Mapping[str, Sequence[float]], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the site mean, cases resampled within each site."""
    low, high = np.percentile(_resampled(values, seed, draws), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Paired:
    """How much higher `a` is than `b` on the cases both were scored on."""

    difference: float  # of the site means
    low: float  # 95 % bootstrap interval of the difference
    high: float
    p: float  # Wilcoxon signed-rank, two-sided, over the pooled cases
    cases: int


def paired(
    a: Mapping[str, Mapping[str, float]], b: Mapping[str, Mapping[str, float]], seed: int = 0, draws: int = 2000
) -> Paired | None:
    """Compare two runs case by case; None if they share no case."""
    gaps = {s: [a[s][c] - b[s][c] for c in sorted(a[s].keys() & b[s].keys())] for s in sorted(a.keys() & b.keys())}
    gaps = {site: found for site, found in gaps.items() if found}
    if not gaps:
        return None
    low, high = interval(gaps, seed, draws)
    pooled = [gap for found in gaps.values() for gap in found]
    difference = _mean(_mean(found) for found in gaps.values())
    return Paired(difference, low, high, _wilcoxon(pooled), len(pooled))


def _resampled(values: Mapping[str, Sequence[float]], seed: int, draws: int) -> NDArray[np.float64]:
    """Draws of the site mean, in site-name order."""
    generator = np.random.default_rng(seed)
    sites = [np.asarray(values[site], dtype=np.float64) for site in sorted(values) if len(values[site])]
    if not sites:
        raise ValueError("an interval needs at least one value")
    means: NDArray[np.float64] = np.stack([_resample(site, generator, draws) for site in sites]).mean(axis=0)
    return means


def _resample(values: NDArray[np.float64], generator: np.random.Generator, draws: int) -> NDArray[np.float64]:
    n = len(values)
    step = max(1, _CHUNK // n)
    sizes = [min(step, draws - start) for start in range(0, draws, step)]
    return np.concatenate([values[generator.integers(0, n, (size, n))].mean(axis=1) for size in sizes])


def _wilcoxon(gaps: Sequence[float]) -> float:
    from scipy.stats import wilcoxon  # here, because importing it takes longer than most uses of this file

    if not any(gaps):
        return 1.0
    return float(wilcoxon(gaps).pvalue)


# who did not score


ENDS = ("best", "last")  # the two states that are scored in full when a run ends


def unscored(events: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By state of `ENDS`: the sites whose scores of it a journal lacks; empty where all are there."""
    found: dict[str, list[str]] = {}
    waiting: dict[str, set[str]] = defaultdict(set)
    for event in events:
        phase = str(event.get("phase", ""))
        if event["event"] == "unscored":
            waiting[phase].add(str(event["site"]))
        elif event["event"] == "score" and phase in ENDS:
            found[phase] = list(event.get("unscored", sorted(waiting.pop(phase, ()))))  # older journals have no list
    return {phase: sites for phase, sites in found.items() if sites}


# the summary of a run


def run_summary(
    method: str,
    seed: int,
    rounds: int,
    headline_model: str,
    headline_metric: str,
    best_rows: Iterable[Row],
    last_rows: Iterable[Row],
    best_round: int,
    last_round: int,
    seconds: float,
    bytes_up: int,
    bytes_down: int,
    peak_memory_mb: float,
    best_rounds: Mapping[str, int] | None = None,
    all_rows: Iterable[Row] = (),
    joint: Sequence[Row] = (),
) -> dict[str, Any]:
    """What summary.json holds: test scores of the best and of the last round.

    `best_rounds` is each model's own; `joint` the rows of training's rounds, of which the best for all models together
    is then said beside.
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


def bmcta(rows: Iterable[Row], model: str) -> dict[str, Any]:
    """The best mean client test accuracy of the APPLE paper: over all states scored, the highest site mean on test.

    Test cases choose the round here, so it is reported under this name and nowhere else.
    """
    states: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        if (row.model, row.metric, row.split) == (model, "accuracy", "test"):
            states[row.round, row.phase].append(row)
    found: dict[str, Any] = {}
    for (round_, _), scored in sorted(states.items()):
        entry = _headline(summarise(with_label_mean(scored), "test"), model, "accuracy")
        if "site_mean" in entry and entry["site_mean"] > found.get("site_mean", -math.inf):
            found = {"round": round_, **entry}
    return found


def joint_best(rows: Sequence[Row], model: str, metric: str) -> dict[str, Any] | None:
    """The round whose models did best together on validation, and their test scores in that round; of equals the first.

    None if no round has validation scores.
    """
    rounds: dict[int, list[Row]] = defaultdict(list)
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
    entry = scores.get(model, {}).get(metric, {}).get(MEAN, Entry(sites={}))
    headline: dict[str, Any] = {"model": model, "metric": metric, "label": MEAN}
    return headline | {key: value for key, value in entry.items() if key in ("sites", "site_mean", "pooled", "outside")}
