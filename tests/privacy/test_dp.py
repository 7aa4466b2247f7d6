"""Noise before anything leaves: ε by known values, the mechanism by hand, and what noise would not cover is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consilium import simulation
from consilium.contract import run_and_copy, state
from consilium.errors import StudyError
from consilium.hospital import Limits, too_little_privacy
from consilium.privacy.accounting import epsilon
from consilium.privacy.dp import Noise, Privacy
from consilium.privacy.keyed import normal
from consilium.run_folder import RunFolder
from consilium.site import Round
from consilium.tree import Packet
from tests.toy import toy_study

ROUND = Round(3, "train", 3, 9)


def delta_by_sum(mean: float, eps: float) -> float:
    """δ(ε) = ∫ max(0, p − e^ε q) of two unit normals `mean` apart, as a plain sum."""
    x = np.linspace(-12, 12 + mean, 400_001)
    p, q = (np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mean, 0.0))
    return float(np.maximum(0.0, p - math.exp(eps) * q).sum() * (x[1] - x[0]))


@pytest.mark.parametrize("mean", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_epsilon_is_exact(mean: float, delta: float) -> None:
    assert delta_by_sum(mean, epsilon(mean, delta)) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("rounds", [1, 60, 150])
@pytest.mark.parametrize("noise", [1.0, 8.0, 60.0])
def test_epsilon_is_below_the_bound_by_renyi_divergence(rounds: int, noise: float) -> None:
    """The rounds compose to ρ-zCDP with ρ = rounds (2/noise)²/2, so ε ≤ ρ + 2 √(ρ ln 1/δ); it is not far below."""
    rho = rounds * (2 / noise) ** 2 / 2
    bound = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert 0.5 * bound < Privacy(1.0, noise).told(rounds) < bound


def packet(**tensors: list[float]) -> Packet:
    return Packet("{}", {name: torch.tensor(values) for name, values in tensors.items()})


def test_an_update_is_clipped_and_covered() -> None:
    """(3, 4) in `a` and (0, 12) in `b` have length 13 together: clipped to 1 they are divided by 13."""
    order, reply = packet(a=[1.0, 1.0], b=[0.0, 0.0]), packet(a=[4.0, 5.0], b=[0.0, 12.0])
    privacy = Privacy(clip=1.0, noise=1e-9)  # next to no noise shows the clipping
    covered = Noise(privacy, b"key").over(reply, order, "run", ROUND).tensors
    assert covered["a"].tolist() == pytest.approx([1 + 3 / 13, 1 + 4 / 13], abs=1e-6)
    assert covered["b"].tolist() == pytest.approx([0.0, 12 / 13], abs=1e-6)
    inside = packet(a=[1.3, 1.4], b=[0.0, 0.0])  # length 0.5: as it is
    assert Noise(privacy, b"key").over(inside, order, "run", ROUND).tensors["a"].tolist() == pytest.approx([1.3, 1.4])


def test_the_noise_has_the_size_that_is_told() -> None:
    order = Packet("{}", {"a": torch.zeros(100_000)})
    covered = Noise(Privacy(clip=0.5, noise=3.0), b"key").over(order, order, "run", ROUND).tensors["a"]
    assert covered.std().item() == pytest.approx(1.5, rel=0.01)
    assert covered.mean().item() == pytest.approx(0.0, abs=0.02)


def test_normal_values_are_normal() -> None:
    values = normal(b"key", 200_001).numpy()
    assert len(values) == 200_001
    for level, share in ((0.0, 0.5), (1.0, 0.158655), (2.0, 0.022750), (3.0, 0.001350)):
        assert (values > level).mean() == pytest.approx(share, abs=4 * math.sqrt(share / len(values)))
        assert (values < -level).mean() == pytest.approx(share, abs=4 * math.sqrt(share / len(values)))


def test_a_repeated_order_gets_the_same_answer_and_nothing_else_the_same_noise() -> None:
    order, reply = packet(a=[0.0] * 8), packet(a=[0.1] * 8)
    mechanism = Noise(Privacy(clip=1.0, noise=1.0), b"key")

    def noise(
        how: Noise = mechanism, reply: Packet = reply, order: Packet = order, round: Round = ROUND
    ) -> list[float]:
        covered = how.over(reply, order, "run", round).tensors["a"]
        found: list[float] = (covered - reply.tensors["a"]).tolist()
        return found

    assert noise() == noise()
    others = [
        noise(reply=packet(a=[0.2] * 8)),
        noise(order=packet(a=[0.01] * 8)),
        noise(round=Round(4, "train", 4, 9)),
        noise(how=Noise(mechanism.privacy, b"another key")),
        noise(how=Noise(Privacy(clip=1.0, noise=2.0), b"key")),
    ]
    for other in others:
        ratio = [a / b for a, b in zip(noise(), other)]
        assert max(ratio) - min(ratio) > 0.5  # not even a multiple


def test_counters_go_back_as_they_came() -> None:
    order = Packet("{}", {"n": torch.tensor(3), "a": torch.zeros(2)})
    reply = Packet("{}", {"n": torch.tensor(9), "a": torch.zeros(2)})
    mechanism = Noise(Privacy(clip=1.0, noise=1.0), b"key")
    assert mechanism.over(reply, order, "run", ROUND).tensors["n"].item() == 3
    with pytest.raises(StudyError, match="'n' is made of whole numbers, which noise does not cover"):
        mechanism.over(reply, packet(a=[0.0, 0.0]), "run", ROUND)


# ------------------------------------------------------------------------------------------- runs


@pytest.mark.xdist_group("pool")
def test_a_private_run_has_the_same_bits_however_it_is_made(federation: Path, tmp_path: Path, pool: Any) -> None:
    study = toy_study(federation, "scaffold", privacy__clip=0.5, privacy__noise=0.01)
    whole, cut = run_and_copy(study, tmp_path / "whole")
    across = simulation.run(study, tmp_path / "across", pool=pool)
    assert state(whole) == state(across) == state(simulation.resume(cut, workers=0))
    told = whole.summary["privacy"]
    assert (told["delta"], told["rounds"]) == (1e-5, 3)
    assert told["epsilon"] == pytest.approx(epsilon(2 * math.sqrt(3) / 0.01, 1e-5), abs=1e-3)
    train = [event for event in RunFolder.open(whole.folder).events() if event["event"] == "train"]
    assert all(event["loss"] is None for event in train)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fedavg", {"privacy__clip": 1.0}, r"\[privacy\] clip and noise go together"),
    ("fedavg", {"privacy__clip": 1.0, "privacy__noise": -1.0}, r"\[privacy\] clip and noise must be numbers from 0 up"),
    ("fedavg", {"privacy__delta": 1.0}, r"\[privacy\] delta = 1.0: it must be in \(0, 1\)"),
    ("fedavg", {"privacy__epsilon": 1.0}, r"\[privacy\] epsilon is a target for unit = 'patient'"),
    ("apple", {"privacy__clip": 1.0, "privacy__noise": 1.0}, r"with 'apple' sites use models of their own"),
    (
        "fedavg",
        {"privacy__clip": 1.0, "privacy__noise": 1.0, "local__batchnorm": "local"},
        r"batchnorm = 'local' keeps normalisation without noise",
    ),
]


@pytest.mark.parametrize(("method", "changes", "words"), REFUSED)
def test_what_noise_would_not_cover_is_refused(
    method: str, changes: dict[str, Any], words: str, federation: Path
) -> None:
    with pytest.raises(StudyError, match=words):
        toy_study(federation, method, **changes)


def test_a_hospital_that_demands_privacy_says_what_is_missing(federation: Path) -> None:
    limits = Limits(epsilon=2.0)
    none = too_little_privacy(limits, toy_study(federation))
    assert "demands differential privacy (ε of at most 2.0) and the study has none" in none
    little = toy_study(federation, privacy__clip=1.0, privacy__noise=1.0)
    assert "ε of at most 2.0 at δ = 1e-05, and the study's" in too_little_privacy(limits, little)
    enough = toy_study(federation, privacy__clip=1.0, privacy__noise=20.0)
    assert enough.privacy.told(3) < 2.0
    assert too_little_privacy(limits, enough) == ""
    assert too_little_privacy(Limits(), toy_study(federation)) == ""
