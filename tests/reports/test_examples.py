"""Which cases a page shows of every site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from consilium.reporting import ranked_cases
from consilium.reports.reading import Headline, read_run
from consilium.scores.rows import ScoreRow


def test_the_worst_the_typical_and_the_best_case_of_every_site(run_folder: Callable[..., Path]) -> None:
    run = read_run(run_folder("fedsm", sites={"hk": (5, 0.8, 0.75), "basel": (2, 0.7, 0.72), "ulm": (1, 0.7, 0.7)}))
    found = ranked_cases(run)
    wanted = ("hk", "super", "mean", "dice", "test")
    rows = [row for row in run.best_rows if (row.site, row.model, row.label, row.metric, row.split) == wanted]
    values = {row.case: row.value for row in rows}
    order = sorted(values, key=lambda case: values[case])
    assert len(order) == 5
    assert found["hk"] == {order[0]: "worst", order[2]: "typical", order[4]: "best"}
    assert list(found["basel"].values()) == ["worst", "best"]
    assert list(found["ulm"].values()) == ["typical"]


def test_volumes_are_ranked_by_the_mean_of_their_slices(run_folder: Callable[..., Path]) -> None:
    """b has the worst slice and the best one, but the mean of its slices lies between those of a and c."""
    run = read_run(run_folder("fedavg", sites={"hk": (3, 0.8, 0.75)}))
    values = {"a": (0.3, 0.3), "b": (0.1, 0.9), "c": (0.6, 0.8)}
    rows = [
        ScoreRow(1, "best", "global", "", "merged", "hk", False, "test", f"{name}#{i:03d}", "mean", "slice_dice", value)
        for name, slices in values.items()
        for i, value in enumerate(slices)
    ]
    run.__dict__.update(headline=Headline("global", "slice_dice", "mean"), best_rows=rows)  # in place of those read
    assert ranked_cases(run) == {"hk": {"a": "worst", "b": "typical", "c": "best"}}
