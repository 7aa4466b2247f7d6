"""γ picks between two predictions of each case; λ is read from summaries."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from consilium.analysis.gamma_sweep import FINE_GRID, GammaSweep, Routed, gamma_sweep
from consilium.analysis.lambda_sweep import is_lambda_sweep, lambda_sweep
from consilium.analysis.opening import Runs
from consilium.errors import RunError
from consilium.methods.routing import GRID
from consilium.scores.views import selection

#            site, outside, split, case, top_site, sure, by_global, by_personal
CASES = (
    Routed("ada", False, "test", "1", "ada", 0.9, 0.5, 0.8),
    Routed("ada", False, "test", "2", "bea", 0.4, 0.6, 0.2),
    Routed("bea", False, "test", "3", "bea", 0.7, 0.5, 0.9),
    Routed("cid", True, "test", "4", "bea", 0.3, 0.4, 0.6),
    Routed("cid", True, "test", "5", "bea", 0.5, 0.7, 0.1),
)
SWEEP = GammaSweep((0.0, 0.3, 0.35, 0.4, 0.6, 0.8, 1.0), 0.6, CASES)


def test_scores_by_gamma_by_hand() -> None:
    """ada: (.8+.2)/2 at 0, (.8+.6)/2 from 0.4 on, (.5+.6)/2 at 1; bea: 0.9, then 0.5 from 0.7 on."""
    assert SWEEP.sites("test")["ada"] == pytest.approx((0.5, 0.5, 0.5, 0.7, 0.7, 0.7, 0.55))
    assert SWEEP.sites("test")["bea"] == pytest.approx((0.9, 0.9, 0.9, 0.9, 0.9, 0.5, 0.5))
    assert SWEEP.site_mean("test") == pytest.approx((0.7, 0.7, 0.7, 0.8, 0.8, 0.6, 0.525))
    assert SWEEP.site_mean("valid") == ()


def test_selection_by_gamma_by_hand() -> None:
    assert SWEEP.selection("test", 0.0)["ada"] == {"personal/ada": 0.5, "personal/bea": 0.5}
    assert SWEEP.selection("test", 0.4)["ada"] == {"global": 0.5, "personal/ada": 0.5}
    assert SWEEP.selection("test", 1.0) == {"ada": {"global": 1.0}, "bea": {"global": 1.0}}


def test_the_oracle_looks_at_the_outside_sites_own_test_cases() -> None:
    """cid: (.6+.1)/2 at 0, (.4+.1)/2 at 0.3, (.4+.7)/2 from 0.5 on; the best are 0.6, 0.8 and 1, so the middle one."""
    (oracle,) = SWEEP.oracle_gamma.values()
    assert oracle.gamma == 0.8
    assert (oracle.score, oracle.at_chosen, oracle.at_zero) == pytest.approx((0.55, 0.55, 0.35))
    assert SWEEP.to_json()["oracle_gamma"]["cid"]["selection"] == {"global": 1.0}


def test_the_grid_holds_the_calibrations() -> None:
    assert set(GRID) <= set(FINE_GRID)
    assert list(FINE_GRID) == sorted(set(FINE_GRID))
    assert (FINE_GRID[0], FINE_GRID[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["guest", "guest-0.9"])
def test_at_the_runs_gamma_the_sweep_is_the_run(finished: Mapping[str, Path], name: str) -> None:
    runs = Runs([finished[name]])
    (view,), (run,) = runs.views, runs.opened
    sweep = gamma_sweep(run)
    at = sweep.grid.index(sweep.chosen)
    assert view.summary is not None
    assert sweep.site_mean("test")[at] == pytest.approx(view.summary["headline"]["site_mean"], abs=1e-9)
    assert sweep.site_mean("valid")[at] == pytest.approx(view.summary["best"]["valid"]["site_mean"], abs=1e-9)
    inside, outside = (sweep.selection("test", sweep.chosen, outside=o) for o in (False, True))
    assert inside | outside == selection(view.best_rows, "test")
    assert sorted(sweep.oracle_gamma) == run.guests
    # calibration looked for the best validation site mean on a part of this grid
    means = dict(zip(sweep.grid, sweep.site_mean("valid")))
    assert means[sweep.chosen] == pytest.approx(max(means[gamma] for gamma in GRID), abs=1e-6)


def test_runs_that_differ_in_more_are_no_lambda_sweep(finished: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished["guest"], run)
    study = (run / "study.toml").read_text()
    (run / "study.toml").write_text(
        study.replace("pull = 0.6", "pull = 0.5").replace("batch_size = 4", "batch_size = 8")
    )
    with pytest.raises(RunError, match=r"differ in local\.batch_size too"):
        lambda_sweep(Runs([finished["guest"], run]).views)


def test_lambda_from_summaries(finished: Mapping[str, Path]) -> None:
    runs = Runs([finished["guest-0.9"], finished["guest"]])
    assert is_lambda_sweep(runs.views)
    sweep = lambda_sweep(runs.views)
    means = {view.study["method"]["pull"]: view.summary["headline"]["site_mean"] for view in runs.views}  # type: ignore[index]
    assert [(one.pull, one.test["super"].mean) for one in sweep.pulls] == sorted(means.items())
    assert set(sweep.models) == {"global", "personal", "super"}
    assert sweep.chosen in (0.6, 0.9)
    assert sweep.to_markdown().count("(chosen)") == 1
    assert "opened" not in vars(runs)  # no model was needed


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("guest", "fedavg"), "has no \\[method\\] pull"),
        (("guest",), "at least two values"),
    ],
)
def test_other_runs_are_no_lambda_sweep(finished: Mapping[str, Path], names: tuple[str, ...], sentence: str) -> None:
    runs = Runs([finished[name] for name in names])
    assert not is_lambda_sweep(runs.views)
    with pytest.raises(RunError, match=sentence):
        lambda_sweep(runs.views)
