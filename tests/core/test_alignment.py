"""Where a tensor lies in memory must not change a bit: weights from a file are those from memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from consilium import packet_files
from consilium.learning.fit import Job, fit
from consilium.site_opening import open_worker
from consilium.tree import message
from consilium.weights import Weights, mean
from tests.toy import SIZES, toy_study

SHIFTS = range(4, 64, 4)  # bytes


def shifted(tensor: Tensor, by: int) -> Tensor:
    """The same numbers, starting `by` bytes after a 64-byte boundary."""
    room = torch.empty(tensor.numel() + 32, dtype=torch.float32)
    skip = ((by - room.data_ptr()) % 64) // 4
    place = room[skip : skip + tensor.numel()]
    place.copy_(tensor.reshape(-1))
    assert place.data_ptr() % 64 == by
    return place.view(tensor.shape)


def model(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return Weights(
        {f"layer{i}": torch.randn(shape, generator=generator) for i, shape in enumerate([(257, 33), (1031,)])}
    )


def moved(weights: Weights, by: int) -> Weights:
    return Weights.over({name: shifted(tensor, by) for name, tensor in weights.items()})


@pytest.mark.parametrize("by", SHIFTS)
def test_sums_do_not_depend_on_alignment(by: int) -> None:
    x, y, z = model(0), model(1), model(2)
    assert moved(x, by).dot(moved(y, 64 - by)) == x.dot(y)
    assert moved(x, by).norm() == x.norm()
    shares = {"a": 0.3, "b": 0.6, "c": 0.1}
    whole = mean({"a": x, "b": y, "c": z}, shares)
    assert mean({"a": moved(x, by), "b": moved(y, 64 - by), "c": moved(z, by)}, shares).digest == whole.digest


@message
class Held:
    weights: Weights


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_training_from_a_file_is_training_from_memory(federation: Path, tmp_path: Path, optimizer: str) -> None:
    study = toy_study(federation, local__optimizer=optimizer)
    sites = study.federation()
    from consilium.site import Round, SiteCard

    roster = {name: SiteCard(name, i, n, ("blob",)) for i, (name, (n, _, _)) in enumerate(SIZES.items())}
    site = open_worker(study, sites, "ada", roster, tmp_path).site
    start = study.task.initial()
    packet_files.save(Held(start), tmp_path / "start.safetensors")
    round = Round(0, "train", 0, 3)
    results = {
        fit(site, {"model": Job(weights)}, round)["model"].weights.digest
        for weights in (
            start,
            packet_files.load(tmp_path / "start.safetensors", Held).weights,
            moved(start, 4),
            moved(start, 36),
        )
    }
    assert len(results) == 1
