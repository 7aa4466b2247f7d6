"""The one local loop, step by step: w = 2, x = 3, t = 1 has loss (6 − 1)²/2 = 12.5 and gradient (6 − 1)·3 = 15."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.fit import Fit, Job, fit
from consilium.learning.optimizers import learning_rate
from consilium.learning.server_step import adam_step
from consilium.learning.training_networks import training_network
from consilium.local_training import Local
from consilium.machine import check_compiler
from consilium.method import OptimizerState
from consilium.site import Round
from consilium.site_opening import open_worker
from consilium.weights import Weights
from tests.learning.small import FIRST, batch, line, site, value
from tests.toy import SIZES, toy_study

ONE = batch([3.0], [1.0])


def trained(job: Job, *batches: Batch, **local: Any) -> Fit:
    return fit(site(*(batches or (ONE,)), **local), {"model": job}, FIRST)["model"]


# ---------------------------------------------------------------------------------------------- single steps


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ({"lr": 0.1}, 2 - 0.1 * 15),
        ({"lr": 0.1, "weight_decay": 0.5}, 2 - 0.1 * (15 + 0.5 * 2)),
        ({"lr": 0.1, "clip": 1.0}, 2 - 0.1 * 1),
        ({"lr": 0.1, "clip": 100.0}, 2 - 0.1 * 15),
        ({"lr": 0.1, "optimizer": "adam"}, 2 - 0.1),  # the first step of Adam is lr · g/|g|
        ({"lr": 0.1, "optimizer": "adamw", "weight_decay": 0.5}, 2 * (1 - 0.1 * 0.5) - 0.1),
    ],
    ids=["sgd", "decayed", "clipped", "not clipped", "adam", "adamw"],
)
def test_one_step_by_hand(local: dict[str, Any], expected: float) -> None:
    done = trained(Job(line(2.0)), **local)
    assert value(done.weights) == pytest.approx(expected, abs=1e-5)
    assert (done.steps, done.loss) == (1, 12.5)


def test_momentum_by_hand() -> None:
    """x = 1, t = 0, w = 1: v = 1, w = .9; then v = .9·1 + .9 = 1.8, w = .72."""
    zero = batch([1.0], [0.0])
    assert value(trained(Job(line(1.0)), zero, zero, momentum=0.9).weights) == pytest.approx(0.72)


def test_the_loss_is_the_mean_over_cases() -> None:
    """Losses .5, 2 | 8 with w held at 1 by a tiny step: (.5 + 2 + 8)/3, not the mean of the batch means."""
    done = trained(Job(line(1.0), lr=1e-9), batch([1.0, 2.0], [0.0, 0.0]), batch([4.0], [0.0]))
    assert done.loss == pytest.approx(10.5 / 3)
    assert done.steps == 2


def test_a_penalty_is_added_to_the_loss_but_not_told() -> None:
    """(μ/2)(w − 1)² with μ = 4 adds 4·(2 − 1) to the gradient."""
    done = trained(Job(line(2.0), penalty=lambda parameters: 2 * (parameters["weight"] - 1).square().sum()))
    assert value(done.weights) == pytest.approx(2 - 0.1 * (15 + 4))
    assert done.loss == 12.5


def test_a_correction_is_added_to_every_gradient() -> None:
    zero = batch([0.0], [0.0])  # no gradient of its own
    assert value(trained(Job(line(2.0), correct=line(-5.0)), zero, zero).weights) == pytest.approx(2 + 2 * 0.1 * 5)


def test_a_correction_is_clipped_with_its_gradient() -> None:
    assert value(trained(Job(line(2.0), correct=line(100.0)), clip=1.0).weights) == pytest.approx(1.9)


def test_a_job_may_have_its_own_learning_rate_and_loss() -> None:
    done = trained(Job(line(2.0), lr=0.01, loss=lambda output, batch: output.sum()))
    assert value(done.weights) == pytest.approx(2 - 0.01 * 3)


# ------------------------------------------------------------------------------------------------ gradients


def test_without_steps_the_mean_gradient_over_cases() -> None:
    """x = 1, 2 | 3 with t = 0 and w = 1 have gradients 1, 4 and 9: 14/3. The weights stay."""
    job = Job(line(1.0), step=False)
    done = trained(job, batch([1.0, 2.0], [0.0, 0.0]), batch([3.0], [0.0]))
    assert done.gradient is not None
    assert value(done.gradient) == pytest.approx(14 / 3)
    assert value(done.weights) == 1.0
    assert (done.steps, done.state) == (0, None)


def toy_site(federation: Path, tmp_path: Path, **changes: Any) -> Any:
    from consilium.site import SiteCard

    study = toy_study(federation, **changes)
    roster = {name: SiteCard(name, i, n, ("blob",)) for i, (name, (n, _, _)) in enumerate(SIZES.items())}
    return open_worker(study, study.federation(), "bea", roster, tmp_path).site


def test_the_mean_gradient_is_autograd_over_the_whole_set(federation: Path, tmp_path: Path) -> None:
    here = toy_site(federation, tmp_path, local__batch_size=5)
    start = here.task.initial("selector", labels=["ada", "bea", "cid"])

    def loss(output: Any, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(output, torch.ones(len(batch.cases), dtype=torch.int64))

    job = Job(start, kind="selector", labels=["ada", "bea", "cid"], loss=loss, step=False)
    gradient = fit(here, {"selector": job}, FIRST)["selector"].gradient
    assert gradient is not None
    network = here.task.network("selector", ["ada", "bea", "cid"])
    network.load_state_dict(dict(start))
    (everything,) = here.data.whole("train", 100)
    loss(network(everything.images), everything).backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ kept state

FIVE = [batch([[1.0, 2.0, -1.0], [0.5, 0.1, 3.0]], [1.0, -1.0]), batch([[0.3, -2.0, 0.7]], [0.2])]


@pytest.mark.parametrize(
    "local",
    [{"optimizer": "adam"}, {"optimizer": "adamw", "weight_decay": 0.1}, {"optimizer": "sgd", "momentum": 0.9}],
    ids=lambda local: local["optimizer"],
)
def test_a_kept_optimiser_is_one_longer_training_bit_by_bit(local: dict[str, Any]) -> None:
    short, long = site(*FIVE, inputs=3, **local), site(*FIVE, inputs=3, **local, epochs=3)
    once = fit(long, {"m": Job(line(0.1, 0.2, 0.3))}, FIRST)["m"]
    weights, states = line(0.1, 0.2, 0.3), dict[str, OptimizerState]()
    for _ in range(3):
        fits = fit(short, {"m": Job(weights)}, FIRST, states)
        weights, states = fits["m"].weights, fits.states
    assert weights.digest == once.weights.digest
    state = states["m"]
    assert once.state is not None
    assert {name: slot.digest for name, slot in state.slots.items()} == {
        name: slot.digest for name, slot in once.state.slots.items()
    }
    assert state.step == once.state.step == (6 if local["optimizer"] != "sgd" else 0)


def test_a_fresh_optimiser_is_not() -> None:
    short = site(*FIVE, inputs=3, optimizer="adam")
    first = fit(short, {"m": Job(line(0.1, 0.2, 0.3))}, FIRST, {})
    start, states = first["m"].weights, first.states
    fresh, kept = (fit(short, {"m": Job(start)}, FIRST, before)["m"].weights for before in ({}, states))
    assert fresh.digest != kept.digest
    forgetful = replace(short, local=replace(short.local, optimizer_state="fresh"))
    ways = {
        "the study keeps none": fit(forgetful, {"m": Job(start)}, FIRST, states),
        "the method keeps none": fit(short, {"m": Job(start)}, FIRST),
        "the job keeps none": fit(short, {"m": Job(start, fresh=True)}, FIRST, states),
    }
    assert {why: (fits["m"].weights.digest, fits.states) for why, fits in ways.items()} == dict.fromkeys(
        ways, (fresh.digest, {})
    )


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_an_optimiser_that_served_another_site_is_like_a_new_one(optimizer: str, kept: bool) -> None:
    """A process makes one optimiser for all of its sites; not even its learning rate is left of the site before."""
    here = site(*FIVE, inputs=3, optimizer=optimizer, momentum=0.9)
    start = fit(here, {"m": Job(line(0.3, 0.2, 0.1))}, FIRST, {}).states if kept else {}
    there = replace(site(batch([[9.0, -9.0, 4.0]], [7.0]), inputs=3), task=here.task, local=here.local)
    training_network.cache_clear()
    alone = fit(here, {"m": Job(line(0.1, 0.2, 0.3))}, FIRST, start)
    weights, state = alone["m"].weights.digest, alone.states["m"]
    before = training_network.cache_info().misses
    fit(there, {"m": Job(line(5.0, -5.0, 5.0), lr=7.0)}, FIRST, start)
    after = fit(here, {"m": Job(line(0.1, 0.2, 0.3))}, FIRST, start)
    assert after["m"].weights.digest == weights
    assert after.states["m"].step == state.step
    assert {name: slot.digest for name, slot in after.states["m"].slots.items()} == {
        name: slot.digest for name, slot in state.slots.items()
    }
    assert training_network.cache_info().misses == before  # it was the same network


def test_plain_sgd_keeps_nothing() -> None:
    assert trained(Job(line(2.0))).state is None


def test_a_state_is_not_changed_by_its_use() -> None:
    here = site(*FIVE, inputs=3, optimizer="adam")
    states = fit(here, {"m": Job(line(0.1, 0.2, 0.3))}, FIRST, {}).states
    state = states["m"]
    before = {name: slot.digest for name, slot in state.slots.items()}
    fit(here, {"m": Job(line(0.1, 0.2, 0.3))}, FIRST, states)
    fresh = OptimizerState(state.step, {name: Weights(dict(slot)) for name, slot in state.slots.items()})
    assert {name: slot.digest for name, slot in fresh.slots.items()} == before


# ------------------------------------------------------------------------------------------------ many jobs


def test_every_job_sees_the_same_batches(federation: Path, tmp_path: Path) -> None:
    here = toy_site(federation, tmp_path, task__augment=["flip", "noise"], local__epochs=2, local__batch_size=2)
    seen: dict[str, list[Any]] = {"first": [], "second": []}

    def watched(name: str) -> Job:
        def loss(output: Any, batch: Batch) -> torch.Tensor:
            seen[name].append((batch.cases, batch.images.sum().item(), batch.truth.sum().item()))
            return here.task.loss(output, batch)

        return Job(here.task.initial(), loss=loss)

    done = fit(here, {name: watched(name) for name in seen}, FIRST)
    assert seen["first"] == seen["second"]
    assert len(seen["first"]) == 2 * 6  # 12 cases in batches of 2, twice
    assert done["first"].weights.digest == done["second"].weights.digest


def test_a_job_is_not_disturbed_by_the_one_beside_it() -> None:
    alone = fit(site(*FIVE, inputs=3), {"m": Job(line(0.1, 0.2, 0.3))}, FIRST)["m"]
    beside = fit(site(*FIVE, inputs=3), {"o": Job(line(9.0, 9.0, 9.0)), "m": Job(line(0.1, 0.2, 0.3))}, FIRST)["m"]
    assert alone.weights.digest == beside.weights.digest


def test_a_job_with_dropout_is_not_disturbed_by_the_one_beside_it(federation: Path, tmp_path: Path) -> None:
    here = toy_site(federation, tmp_path, task__dropout=0.3)
    start = here.task.initial()
    alone = fit(here, {"m": Job(start)}, FIRST)["m"]
    beside = fit(here, {"other": Job(start), "m": Job(start)}, FIRST)["m"]
    assert alone.weights.digest == beside.weights.digest


def test_fit_leaves_the_callers_randomness_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(Job(line(2.0)))
    assert torch.rand(3).equal(expected)


# ------------------------------------------------------------------------------------------------ schedules


def at(step: int, total: int = 10, **local: Any) -> float:
    return learning_rate(Local(lr=0.8, **local), Round(99, "train", step, total))


def test_constant() -> None:
    assert [at(step) for step in (0, 5, 9)] == [0.8, 0.8, 0.8]


def test_decay_by_round() -> None:
    assert [at(step, schedule="decay", decay=0.5) for step in range(4)] == pytest.approx([0.8, 0.4, 0.2, 0.1])


def test_warmup_then_cosine() -> None:
    """Two of ten rounds warm up: .4, .8; then .8·(1 + cos(π d))/2 with d = 0, 1/8 … 7/8."""
    rates = [at(step, schedule="warmup-cosine", warmup=0.2) for step in range(10)]
    assert rates[:3] == pytest.approx([0.4, 0.8, 0.8])
    assert rates[6] == pytest.approx(0.4)  # half-way: cos(π/2) = 0
    assert rates[9] == pytest.approx(0.8 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_cosines_that_start_again() -> None:
    """One of ten rounds warms up; then cycles of three: 1, (1 + cos π/3)/2 = .75, .25, over a floor of a hundredth."""
    rates = [at(step, schedule="warmup-restarts", warmup=0.1, restart=3) for step in range(10)]
    cycle = [0.8, 0.8 * (0.01 + 0.99 * 0.75), 0.8 * (0.01 + 0.99 * 0.25)]
    assert rates == pytest.approx([0.8, *cycle, *cycle, *cycle])


def test_warmup_takes_at_least_one_round() -> None:
    assert at(0, total=1, schedule="warmup-cosine") == 0.8


def test_the_schedule_reaches_the_step() -> None:
    decayed = site(ONE, schedule="decay", decay=0.5)
    done = fit(decayed, {"m": Job(line(2.0))}, Round(2, "train", 2, 4))["m"]
    assert value(done.weights) == pytest.approx(2 - 0.1 * 0.25 * 15)


# ------------------------------------------------------------------------------------------------ precision


MIXED = """
import math, sys, torch
from dataclasses import replace
from pathlib import Path
from consilium.learning.fit import Job, fit
from tests.learning.small import FIRST
from tests.learning.test_fit import toy_site

here = toy_site(Path(sys.argv[1]), Path(sys.argv[2]))
start = here.task.initial()
for precision in ("bfloat16", "float16"):
    mixed = replace(here, local=replace(here.local, precision=precision, batch_size=6))
    done = fit(mixed, {"m": Job(start)}, FIRST)["m"]
    assert math.isfinite(done.loss)
    assert all(t.dtype == torch.float32 and torch.isfinite(t).all() for t in done.weights.values())
    assert done.weights.digest != start.digest
    print(precision, done.steps)
"""


@pytest.mark.federation  # it starts a process
def test_mixed_precision_runs_and_stays_finite(federation: Path, tmp_path: Path) -> None:
    """In a process of its own, without AMX: on virtual machines that announce AMX but forbid it, torch's transposed
    convolution in bfloat16 ends the process with SIGILL."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    command = [sys.executable, "-c", MIXED, str(federation), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.stdout.splitlines() == ["bfloat16 2", "float16 2"], done.stderr


# ------------------------------------------------------------------------------------------------ server step


def test_a_server_step_is_adam() -> None:
    """Three steps of 0.1 against torch.optim.Adam on one parameter, bit by bit."""
    parameter = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    adam = torch.optim.Adam([parameter], 0.1)
    weights, state = line(2.0, -1.0), None
    for gradient in ([[1.0, 3.0]], [[-2.0, 0.5]], [[0.1, 0.1]]):
        parameter.grad = torch.tensor(gradient)
        adam.step()
        weights, state = adam_step(weights, Weights({"weight": torch.tensor(gradient)}), state, 0.1)
    assert weights["weight"].equal(parameter.detach())
    assert state is not None and state.step == 3
    first, _ = adam_step(line(2.0), line(15.0), None, 0.1)
    assert value(first) == pytest.approx(1.9)


def test_a_server_step_leaves_what_has_no_gradient() -> None:
    both = Weights({"weight": torch.tensor([2.0]), "seen": torch.tensor(4)})
    stepped, _ = adam_step(both, Weights({"weight": torch.tensor([1.0])}), None, 0.5)
    assert (stepped["weight"].item(), stepped["seen"].item()) == (pytest.approx(1.5), 4)


# ---------------------------------------------------------------------------------------------- compiled


def test_a_machine_without_a_compiler_is_told_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(StudyError, match=r"\[local\] compile = true needs a C\+\+ compiler"):
        check_compiler("cpu")


def test_only_the_network_of_a_compiled_study_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are those of the module itself, on the same parameters."""
    asked: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda module: asked.append(module) or module)
    plain = trained(Job(line(2.0)), lr=0.1)
    assert not asked
    training_network.cache_clear()
    compiled = trained(Job(line(2.0)), lr=0.1, compile=True)
    assert len(asked) == 1
    assert value(compiled.weights) == value(plain.weights)


@pytest.mark.slow  # half a minute of the compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
def test_a_compiled_step_by_hand() -> None:
    training_network.cache_clear()
    done = trained(Job(line(2.0)), lr=0.1, compile=True)
    assert value(done.weights) == pytest.approx(2 - 0.1 * 15, abs=1e-5)
