"""A site's scores as one message: made at the site, and accepted by the server only if every value is plausible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from consilium.messages import CASES, SCORED, ScoredModel, ScoreSheet
from consilium.scores.rows import ScoreRow, range_of
from consilium.site import SLICES, Round
from consilium.tree import PacketError
from consilium.weights import SiteName

WHOLE = -1  # in place of a slice: the whole case; in place of a case: the whole site


class Score(NamedTuple):
    """One score, at the site."""

    model: ScoredModel
    split: str
    case: str  # empty: of all cases of the site
    slice: int  # of a volume; `WHOLE`: of the case
    label: str
    metric: str
    value: float


def make_sheet(scores: Iterable[Score]) -> ScoreSheet:
    """The sheet of a site's scores, in their order."""
    models: dict[ScoredModel, int] = {}
    cases: dict[str, int] = {}
    labels: dict[str, int] = {}
    metrics: dict[str, int] = {}
    rows, values = [], []
    for score in scores:
        case = cases.setdefault(score.case, len(cases)) if score.case else WHOLE
        place = models.setdefault(score.model, len(models)), SCORED.index(score.split), case, score.slice
        rows.append(
            (*place, labels.setdefault(score.label, len(labels)), metrics.setdefault(score.metric, len(metrics)))
        )
        values.append(float(score.value))
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 6)
    names = tuple(models), tuple(cases), tuple(labels), tuple(metrics)
    return ScoreSheet(*names, table, torch.tensor(values, dtype=torch.float64))


class Scorer(NamedTuple):
    """The server's own facts about the sender of a sheet, from the roll call."""

    site: SiteName
    outside: bool
    cases: Mapping[str, int]  # by split, as its card declares
    members: frozenset[SiteName]
    labels: frozenset[str]  # of the study's task


def rows_of(sheet: ScoreSheet, scorer: Scorer, round: Round) -> list[ScoreRow]:
    """The rows of a sheet; the server adds site, round and whether it is outside. Raises PacketError if implausible."""
    table: NDArray[np.int32] = sheet.rows.numpy()
    values: NDArray[np.float64] = sheet.values.numpy()
    _check(sheet, scorer, table, values)
    head = round.number, round.phase
    rows = []
    for (m, split, case, slice_, label, metric), value in zip(table.tolist(), values.tolist(), strict=True):
        name = "" if case < 0 else sheet.cases[case] if slice_ < 0 else slice_name(sheet.cases[case], slice_)
        model = sheet.models[m]
        rows.append(
            ScoreRow(
                *head,
                model.model,
                model.of,
                model.when,
                scorer.site,
                scorer.outside,
                SCORED[split],
                name,
                sheet.labels[label],
                sheet.metrics[metric],
                value,
            )
        )
    return rows


def slice_name(case: str, slice: int) -> str:
    """The name of one slice of a volume in a table of scores."""
    return f"{case}#{slice:03d}"


def _check(sheet: ScoreSheet, scorer: Scorer, table: NDArray[np.int32], values: NDArray[np.float64]) -> None:
    if len(table) != len(values):
        raise PacketError(f"{len(table)} scores have {len(values)} values")
    strangers = {model.of for model in sheet.models} - scorer.members - {""}
    if strangers:
        raise PacketError(f"a model of '{min(strangers)}', which is not a member")
    if unknown := set(sheet.labels) - scorer.labels - {"", "class"}:
        raise PacketError(f"a score of the label '{min(unknown)}', which the study does not have")
    if len(set(sheet.cases)) < len(sheet.cases):
        raise PacketError("a case is listed twice")
    sides = (len(sheet.models), len(SCORED), len(sheet.cases), SLICES, len(sheet.labels), len(sheet.metrics))
    low, high = np.array([0, 0, WHOLE, WHOLE, 0, 0]), np.array(sides)
    if ((table < low) | (table >= high)).any() or (table[table[:, 2] < 0, 3] >= 0).any():
        raise PacketError("a score refers to what its sheet does not list")
    if len(np.unique(table, axis=0)) < len(table):
        raise PacketError("a case has the same score twice")
    for index, split in enumerate(SCORED):
        used = np.unique(table[table[:, 1] == index, 2])
        count, most = int((used >= 0).sum()), min(scorer.cases.get(split, 0), CASES)
        if count > most:
            raise PacketError(f"scores of {count} {split} cases, where the site has {most}")
    for index, metric in enumerate(sheet.metrics):
        _check_values(metric, values[table[:, 5] == index])


def _check_values(metric: str, values: NDArray[np.float64]) -> None:
    known = range_of(metric)
    if known is None:
        raise PacketError(f"there is no score '{metric[:60]}'")
    low, high, open_ = known
    wrong = ~((values >= low) & (values <= high)) & ~(np.isnan(values) & open_)
    if wrong.any():
        raise PacketError(f"a '{metric[:60]}' of {values[wrong][0]:g} cannot be: it must be from {low:g} to {high:g}")
