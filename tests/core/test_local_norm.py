"""The BatchNorm policies on a toy network: what is averaged, what never leaves, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consilium import engine, simulation
from consilium.errors import StudyError
from consilium.local_norm import LocalNorm
from consilium.messages import Envelope, Reply
from consilium.run_folder import RunFolder
from consilium.site_opening import open_worker, place_in
from consilium.tree import Packet, flatten
from consilium.weights import SiteName, Weights, mean
from consilium.wires.in_process import InProcess
from tests.toy import toy_study

MEAN, VAR, COUNT = "running_mean", "running_var", "num_batches_tracked"


def copied(packet: Packet) -> dict[str, Tensor]:
    return {path: tensor.clone() for path, tensor in packet.tensors.items()}


class Recording(InProcess):
    """Remembers what went down and what came up, by round and site."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.down: list[dict[SiteName, dict[str, Tensor]]] = []
        self.up: list[dict[SiteName, dict[str, Tensor]]] = []

    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        self.down.append({name: copied(order) for name, order in orders.items()})
        replies = dict(super().train(orders, head))
        self.up.append({name: copied(reply.packet) for name, reply in replies.items() if reply.packet})
        return iter(replies.items())


@dataclass(frozen=True)
class Seen:
    wire: Recording
    folder: RunFolder
    statistics: list[str] = field(default_factory=list)  # paths of running means and variances
    affine: list[str] = field(default_factory=list)  # paths of the normalisation's weights and biases


def seen(federation: Path, runs: Path, policy: str, method: str = "fedavg", **changes: Any) -> Seen:
    how = {"task__norm": "batch", "local__batchnorm": policy, "study__rounds": 2, "local__batch_size": 4}
    study = toy_study(federation, method, **how, **changes)
    folder = RunFolder.create(study, runs)
    wire = Recording(study, folder.path)
    engine.run(study, wire, folder)
    paths = list(wire.down[0]["ada"])
    statistics = [path for path in paths if path.endswith((MEAN, VAR))]
    layers = {path.removesuffix(MEAN) for path in paths if path.endswith(MEAN)}
    affine = [layer + part for layer in sorted(layers) for part in ("weight", "bias")]
    return Seen(wire, folder, statistics, affine)


@pytest.fixture(scope="module", params=["average", "local-statistics", "local"])
def run(request: pytest.FixtureRequest, federation: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Seen]:
    return request.param, seen(federation, tmp_path_factory.mktemp("norm"), request.param)


def test_what_leaves_the_site(run: tuple[str, Seen]) -> None:
    """A tensor that stays comes back exactly as it was sent; a trained one does not."""
    policy, found = run
    stays = {"average": [], "local-statistics": found.statistics, "local": found.statistics + found.affine}[policy]
    assert found.statistics and found.affine
    for round in range(2):
        for site, reply in found.wire.up[round].items():
            for path in found.statistics + found.affine:
                unchanged = reply[path].equal(found.wire.down[round][site][path])
                assert unchanged == (path in stays), (policy, round, site, path)


def test_what_the_server_holds(run: tuple[str, Seen]) -> None:
    """Averaged by shares 8, 12, 10 as floats, with counters kept; or never changed at all."""
    policy, found = run
    shares = {"ada": 8, "bea": 12, "cid": 10}
    averaged = mean({site: Weights(up) for site, up in found.wire.up[0].items()}, shares)
    for path in found.statistics:
        now = found.wire.down[1]["ada"][path]
        assert now.is_floating_point()
        if policy == "average":
            by_hand = sum(found.wire.up[0][site][path] * n / 30 for site, n in shares.items())
            torch.testing.assert_close(now, by_hand, atol=1e-6, rtol=1e-6)
            assert now.equal(averaged[path])
        else:
            start = 0.0 if path.endswith(MEAN) else 1.0
            assert now.eq(start).all()


def test_counters_stay_whole_numbers(run: tuple[str, Seen]) -> None:
    policy, found = run
    counters = [path for path in found.wire.down[1]["ada"] if path.endswith(COUNT)]
    assert counters
    for path in counters:
        assert found.wire.down[1]["ada"][path].dtype == torch.int64
        # averaging keeps the first site's: ada made ⌈8/4⌉ = 2 steps
        assert found.wire.down[1]["ada"][path].item() == (2 if policy == "average" else 0)


def test_a_sites_own_come_back(run: tuple[str, Seen]) -> None:
    """In the next round and at scoring a site works with what it kept: two rounds of steps are counted in it."""
    policy, found = run
    if policy == "average":
        pytest.skip("nothing is kept")
    folder, study = found.folder, found.folder.study
    for site, steps in (("ada", 2), ("bea", 3), ("cid", 3)):
        worker = open_worker(study, study.federation(), site, found.wire.roster, place_in(folder.path, site))
        kept = worker.memories.at(1, worker.norm.kept(study.method)).norm  # type: ignore[union-attr]
        names = {path.split("/")[-1] for path in kept}
        assert {name.rsplit(".", 1)[1] for name in names} == (
            {MEAN, VAR, COUNT, "weight", "bias"} if policy == "local" else {MEAN, VAR, COUNT}
        )
        assert {kept[path].item() for path in kept if path.endswith(COUNT)} == {2 * steps}
        release = flatten(study.method.release(folder.states.last(study.method).server, worker.site.card))
        predictor: Any = worker.predictor(release, merged=1)
        for path, tensor in kept.items():
            assert predictor.weights[path.removeprefix("global/")].equal(tensor)
        untouched = [path for path in release.tensors if path not in kept]
        for path in untouched:
            assert predictor.weights[path.removeprefix("global/")].equal(release.tensors[path])


def test_sites_keep_different_statistics(federation: Path, tmp_path: Path) -> None:
    found = seen(federation, tmp_path, "local-statistics")
    study = found.folder.study
    kept = []
    for site in ("ada", "bea"):
        worker = open_worker(study, study.federation(), site, found.wire.roster, place_in(found.folder.path, site))
        kept.append(worker.memories.at(1, worker.norm.kept(study.method)).norm)  # type: ignore[union-attr]
    assert not kept[0][found.statistics[0]].equal(kept[1][found.statistics[0]])


@pytest.mark.parametrize("policy", ["local-statistics", "local"])
def test_a_network_without_batchnorm_is_refused(policy: str, federation: Path) -> None:
    task = toy_study(federation).task
    with pytest.raises(StudyError, match=rf"batchnorm = '{policy}', but the network has no BatchNorm; use 'average'"):
        LocalNorm.of(task, policy, "ada")


@pytest.mark.parametrize("policy", ["local-statistics", "local"])
@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("fedsm", {}, "FedSM lets every site use the other sites' models"),
        ("fedsm-extra", {}, "a super model lets every site use"),
        ("fedsm-ensemble", {}, "a super model lets every site use"),
        ("local", {}, r"share_local_parts = false in \[method\]"),
        ("pooled", {}, "pooled training is scored at sites that did not train"),
        ("fedavg", {"study__leave_out": ["cid"]}, r"\[study\] leave_out = \['cid'\] is scored without having trained"),
    ],
)
def test_where_models_are_used_without_their_normalisation_it_must_be_shared(
    policy: str, method: str, changes: dict[str, Any], says: str, federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation, method, task__norm="batch", local__batchnorm=policy, **changes)
    with pytest.raises(StudyError, match=rf"\[local\] batchnorm = '{policy}' keeps normalisation at .*{says}"):
        simulation.run(study, tmp_path, workers=0)
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_local_training_alone_may_keep_its_normalisation(federation: Path, tmp_path: Path) -> None:
    found = seen(federation, tmp_path, "local", "local", method__share_local_parts=False)
    assert [reply for replies in found.wire.up for reply in replies.values() if reply] == []
