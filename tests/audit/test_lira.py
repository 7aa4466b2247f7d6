"""The likelihood-ratio attack: by hand, and going on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from consilium.audit import lira
from consilium.audit.auditing import AuditOptions, audit, power_of
from consilium.audit.lira import confidence, halves, likelihood_ratios
from consilium.errors import RunError
from tests.audit.noise import moved, overfitted, write_noise

pytestmark = pytest.mark.xdist_group("audit")


def test_every_case_is_in_half_of_the_shadows() -> None:
    inside = halves(5, 6, seed=0)
    assert inside.shape == (6, 5)
    assert inside.sum(0).tolist() == [3] * 5
    assert (inside == halves(5, 6, seed=0)).all()
    assert len({tuple(column) for column in inside.T.tolist()}) > 1


def test_a_loss_like_those_with_the_case_in_training_is_a_members() -> None:
    # confidences: in 2 ± 1, out 0 ± 1 (each value twice); the common variance is 4 / (4 − 1) = 4/3
    loss = np.log1p(np.exp(-np.array([[3.0], [1.0], [3.0], [1.0], [1.0], [-1.0], [1.0], [-1.0]])))
    assert confidence(loss)[:, 0].tolist() == pytest.approx([3, 1, 3, 1, 1, -1, 1, -1])
    inside = np.array([[True]] * 4 + [[False]] * 4)
    at = [float(likelihood_ratios(np.log1p(np.exp(-np.array([x]))), loss, inside)[0]) for x in (1.0, 2.0, 0.0)]
    assert at == pytest.approx([0.0, 4 / (2 * 4 / 3), -4 / (2 * 4 / 3)])


def test_it_says_how_long_it_takes_and_goes_on_where_it_was_stopped(
    memorised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    real = lira.train_shadow

    def train(run, people, keys, target, plan):  # type: ignore[no-untyped-def]
        if trained.count("lira 2") == 0 and plan.name == "lira 2":
            trained.append(plan.name)
            raise KeyboardInterrupt
        trained.append(plan.name)
        return real(run, people, keys, target, plan)

    monkeypatch.setattr(lira, "train_shadow", train)
    options = AuditOptions(shadows=4, epochs=1, keep=tmp_path)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        audit(memorised, options, said.append)
    assert said[0].startswith("the likelihood-ratio attack trains 4 shadows: about ")
    audit(memorised, options, said.append)
    assert [name for name in trained if name != "estimate"] == ["lira 0", "lira 1", "lira 2", "lira 2", "lira 3"]
    assert "trains 2 shadows" in next(text for text in said[1:] if "likelihood" in text)
    again: list[str] = []
    audit(memorised, options, again.append)
    assert again == ["auditing global: 24 members"]  # all shadows are there


def test_an_odd_number_of_shadows_is_refused(memorised: Path) -> None:
    with pytest.raises(RunError, match="even and at least 4"):
        audit(memorised, AuditOptions(shadows=5))


@pytest.mark.slow
def test_members_are_found_and_strangers_are_not(tmp_path: Path) -> None:
    made = overfitted(write_noise(tmp_path / "federation", 0, 60, 10, 60), tmp_path / "runs", epochs=40)
    found = power_of(audit(made, AuditOptions(shadows=8)).models[0].attacks["likelihood ratio"])
    assert found.auc.value > 0.8
    areas = []
    for seed in (1, 2, 3):
        strangers = moved(made, write_noise(tmp_path / f"strangers{seed}", seed, 200, 10, 200))
        one = audit(strangers, AuditOptions(shadows=4, epochs=4)).models[0].attacks["likelihood ratio"]
        areas.append(power_of(one).auc.value)
    assert sum(areas) / 3 == pytest.approx(0.5, abs=0.05)
