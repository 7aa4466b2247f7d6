"""At the end of a method's range it is a simpler one, with a real network: the same losses at every site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium import simulation
from consilium.learning.gradients import Stepper
from consilium.toy_federation import PLAIN_SGD
from tests.learning.small import FIRST, batch, site
from tests.toy import toy_study

PLAIN = {f"local__{key}": value for key, value in PLAIN_SGD.items()}
LIMITS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("apfl", {"method__mix": 1.0}, "local", {}),
    ("fedamp", {"method__strength": 0.0, "method__sigma": 1e-12}, "local", {}),
    ("heurfedamp", {"method__strength": 0.0, "method__self_share": 1 - 1e-9}, "local", {}),
    ("fedasam", {"method__rho": 0.0}, "fedavg", {}),
    ("scaffold", {"study__rounds": 1}, "fedavg", {**PLAIN, "study__rounds": 1}),
]


def losses(study: Any, place: Path) -> list[tuple[int, str, float]]:
    found = []

    def look(event: Any) -> None:
        if event["event"] == "train":
            found.append((event["round"], event["site"], event["loss"]))

    simulation.run(study, place, workers=0, watch=look)
    return sorted(found)


@pytest.mark.parametrize(("name", "fields", "simpler", "plain"), LIMITS, ids=[limit[0] for limit in LIMITS])
def test_a_method_at_its_limit_is_the_simpler_one(
    name: str, fields: dict[str, Any], simpler: str, plain: dict[str, Any], federation: Path, tmp_path: Path
) -> None:
    ours = losses(toy_study(federation, name, **fields), tmp_path)
    theirs = losses(toy_study(federation, simpler, **plain), tmp_path)
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    assert [loss for *_, loss in ours] == pytest.approx([loss for *_, loss in theirs], rel=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_gradient_in_another_layout_makes_the_same_step(optimizer: str) -> None:
    """PyTorch's fused steps would take its numbers in another order."""
    slope = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        parameter = nn.Parameter(torch.zeros(2, 3, 5, 5))
        stepper = Stepper(site(batch([1.0], [0.0]), optimizer=optimizer), {"w": parameter}, FIRST)
        stepper.step({"w": slope.contiguous(memory_format=layout)})
        found.append(parameter.detach())
    assert torch.equal(*found)
