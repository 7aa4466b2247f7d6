"""APFL: w ← w − η ∇f(w), v ← v − η α ∇f(v̄) with v̄ = α v + (1 − α) w, parameters mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilium import simulation
from consilium.errors import StudyError
from consilium.local_norm import LocalNorm
from consilium.methods.apfl import APFL, apfl_round
from consilium.site import SiteCard
from consilium.store import MemoryStore
from tests.learning.small import FIRST, batch, line, site, value
from tests.toy import toy_study


def test_one_step_by_hand() -> None:
    """x = 1, t = 0, η = .1, α = .25: w = 4 → 4 − .4 = 3.6; v̄ = .25·8 + .75·4 = 5, so v = 8 − .1·.25·5 = 7.875."""
    done = apfl_round(site(batch([1.0], [0.0])), line(4.0), line(8.0), 0.25, False, FIRST)
    assert value(done.shared) == pytest.approx(3.6)
    assert value(done.own) == pytest.approx(7.875)
    assert value(done.personal) == pytest.approx(0.25 * 7.875 + 0.75 * 3.6)
    assert done.mix == 0.25
    assert done.loss == pytest.approx(5.0**2 / 2)
    assert done.steps == 1


def test_the_mix_follows_its_own_slope() -> None:
    """∂f/∂α = (v − w) ∇f(v̄) = 4 · 5 = 20: α = .25 − .1·20, clipped at 0; with smaller numbers it is not clipped."""
    here = site(batch([1.0], [0.0]))
    steep = apfl_round(here, line(4.0), line(8.0), 0.25, True, FIRST)
    assert steep.mix == 0.0
    assert value(steep.own) == pytest.approx(8.0 - 0.1 * 0.25 * 5.0), "v moves by the α that v̄ was made with"
    gentle = apfl_round(here, line(0.4), line(0.8), 0.25, True, FIRST)
    assert gentle.mix == pytest.approx(0.25 - 0.1 * (0.4 * 0.5))


def test_alpha_zero_is_fedavg_and_keeps_v() -> None:
    done = apfl_round(site(batch([1.0], [0.0])), line(4.0), line(8.0), 0.0, False, FIRST)
    assert value(done.personal) == value(done.shared) == pytest.approx(3.6)
    assert value(done.own) == 8.0


@pytest.mark.parametrize(("optimizer", "norm"), [("sgd", "instance"), ("adam", "instance"), ("sgd", "batch")])
def test_alpha_one_is_training_alone(optimizer: str, norm: str, federation: Path, tmp_path: Path) -> None:
    """v̄ = v, so v makes the steps of a site that trains alone, with the convolutions and layouts of a real network, and
    its running statistics are those of all its rounds."""
    trained: dict[str, Any] = {}
    for name, own in (("apfl", "personal"), ("local", "local")):
        fields = {"method__mix": 1.0} if name == "apfl" else {}
        study = toy_study(federation, name, local__optimizer=optimizer, task__norm=norm, **fields)
        folder = simulation.run(study, tmp_path, workers=0).folder
        kept = LocalNorm(frozenset(), "bea").kept(study.method)
        held: Any = MemoryStore(folder / "sites" / "bea" / "memory", "bea").at(2, kept)
        trained[name] = getattr(held.memory, own)
    moved = (trained["local"] - study.task.initial()).norm()
    apart = (trained["apfl"] - trained["local"]).norm()
    assert apart < 1e-3 * moved, f"APFL's v̄ is {apart / moved:.2g} of the whole way from it"


def test_only_w_leaves_and_it_is_averaged_by_cases() -> None:
    method = APFL()
    here = site(batch([1.0], [0.0]))
    uplink, memory = method.train(here, APFL.Memory(line(8.0), 0.5, line(0.0)), APFL.Downlink(line(4.0)), FIRST)
    assert value(uplink.global_) == pytest.approx(3.6)
    assert set(vars(uplink)) == {"global_", "loss", "steps"}
    assert value(memory.own) != 8.0
    server = APFL.Server(line(0.0), {"ada": 1, "bea": 3})
    replies = {"ada": APFL.Uplink(line(2.0), 0.0, 1), "bea": APFL.Uplink(line(6.0), 0.0, 1)}
    assert value(method.merge(server, replies, FIRST).global_) == 5.0


def test_the_mixture_is_scored_and_outsiders_get_the_global_model() -> None:
    method, here = APFL(), site(batch([1.0], [0.0]))
    released = method.release(APFL.Server(line(2.0), {"ada": 1}), SiteCard("ada", 0, 1, ("y",)))
    predictor = method.deploy(here.task, APFL.Memory(line(8.0), 0.5, line(5.0)), released)
    assert (predictor.model, predictor.of, predictor.when) == ("personal", "ada", "trained")
    assert float(predictor.answer(batch([1.0], [0.0]).images).output) == 5.0
    outside = method.deploy(here.task, None, method.release(APFL.Server(line(2.0), {"ada": 1}), None))
    assert outside.model == "global"


def test_a_mix_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(StudyError, match="α must be in"):
        APFL(mix=1.5)
