"""Curvature from products with vectors: that of a full Hessian, and of matrices known by heart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from consilium.analysis.hessian import (
    Curvature,
    Vector,
    curvature,
    lanczos,
    largest,
    products,
    seconds_of_lanczos,
    to_markdown,
)
from consilium.analysis.probing import Probe
from consilium.batch import Batch
from consilium.task import Task
from tests.learning.small import Line, batch


@dataclass(frozen=True, eq=False)
class Curved(Line):
    """Three layers with a bend, and one that the loss does not use."""

    inputs: int = 3

    def network(self, kind: str = "model", labels: object = None) -> nn.Module:
        first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        first.register_module("unused", nn.Identity())
        return first.double()


@pytest.fixture(scope="module")
def curved() -> tuple[Curved, nn.Module, list[Batch]]:
    torch.manual_seed(0)
    task = Curved()
    sizes = (5, 2)  # batches of different sizes: the mean is over cases
    batches = [Batch(torch.randn(n, 3).double(), torch.randn(n).double(), tuple(map(str, range(n)))) for n in sizes]
    return task, task.network().eval(), batches


def full_hessian(task: Curved, network: nn.Module, batches: list[Batch]) -> np.ndarray:
    shapes = {name: p.shape for name, p in network.named_parameters()}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
        whole = [len(b.cases) * task.loss(functional_call(network, weights, (b.images,)), b) for b in batches]
        return torch.stack(whole).sum() / sum(len(b.cases) for b in batches)

    at = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    return torch.autograd.functional.hessian(loss, at).numpy()  # type: ignore[no-untyped-call]


def probes(task: Task, batches: Sequence[Batch]) -> list[Probe]:
    return [Probe(batch, partial(task.loss, batch=batch)) for batch in batches]


def test_products_and_eigenvalues_are_those_of_the_full_hessian(curved: tuple[Curved, nn.Module, list[Batch]]) -> None:
    matrix = full_hessian(*curved)
    task, network, batches = curved
    times, size = products(network, probes(task, batches))
    assert size == len(matrix) == 21
    for column in np.eye(size)[::5]:
        assert times(column) == pytest.approx(matrix @ column, abs=1e-12)
    values = np.linalg.eigvalsh(matrix)
    found = curvature(times, size, probes=40, steps=21)
    assert found.largest == pytest.approx(values[::-1][:5], rel=1e-4, abs=1e-8)
    assert found.ratio == pytest.approx(values[-1] / values[-5], rel=1e-3)
    assert abs(found.trace - values.sum()) < 4 * found.trace_error
    # the spectrum's own moments: the nodes reach from the least to the largest, and weigh one in all
    nodes, shares = np.array(found.nodes).T
    assert shares.sum() == pytest.approx(1)
    assert (nodes.min(), nodes.max()) == (pytest.approx(values[0], abs=1e-6), pytest.approx(values[-1], rel=1e-6))
    assert size * (nodes * shares).sum() == pytest.approx(found.trace)


def test_a_line_by_hand() -> None:
    """f = mean (w x − t)² / 2: the Hessian is the mean of x², here (1 + 4 + 9) / 3."""
    task = Line()
    batches = [batch([1.0, 2.0], [0.0, 1.0]), batch([3.0], [2.0])]
    times, size = products(task.network(), probes(task, batches))
    assert size == 1
    assert times(np.array([2.0])) == pytest.approx([28 / 3])


def test_lanczos_stops_where_nothing_is_left() -> None:
    """A start in the space of two eigenvectors never leaves it."""
    matrix = np.diag([3.0, 1.0, 7.0, 7.0])
    alphas, betas = lanczos(lambda v: matrix @ v, np.array([1.0, 1.0, 0.0, 0.0]), 4)
    assert (len(alphas), len(betas)) == (2, 1)
    tridiagonal = np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1)
    assert np.linalg.eigvalsh(tridiagonal) == pytest.approx([1, 3])


def test_the_largest_are_the_highest_not_the_farthest_from_zero() -> None:
    matrix = np.diag([-50.0, *range(1, 12)])
    assert largest(lambda v: matrix @ v, 12) == pytest.approx((11, 10, 9, 8, 7), rel=1e-3)


def test_a_spectrum_is_a_density() -> None:
    found = Curvature((2.0, 1.0), 3.0, 0.0, ((2.0, 0.25), (0.0, 0.75)), 4)
    grid, density = found.density()
    assert float(np.trapezoid(density, grid)) == pytest.approx(1, abs=1e-3)
    assert float(np.trapezoid(density[grid > 1], grid[grid > 1])) == pytest.approx(0.25, abs=1e-3)


def test_the_time_told_is_that_of_warm_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product takes 9 s and each later one 2 s; three Lanczos runs make min(30, parameters) each."""
    clock, lengths = [0.0], [9.0, 2.0]

    def times(vector: Vector) -> Vector:
        clock[0] += lengths.pop(0)
        return vector

    monkeypatch.setattr("consilium.analysis.hessian.time.monotonic", lambda: clock[0])
    assert seconds_of_lanczos(times, 7) == 2 * 3 * 7
    lengths += [9.0, 2.0]
    assert seconds_of_lanczos(times, 1000) == 2 * 3 * 30


def test_the_table_is_the_papers() -> None:
    found = {"ada": {"FedAvg": Curvature((11.512, 8.0, 7.0, 6.0, 5.417), 170.1, 2.0, (), 10)}}
    assert to_markdown(found).splitlines()[-1] == "| ada | FedAvg | 11.51 | 2.125 | 170.1 ± 2 |"
