"""The curvature of the loss at a model: eigenvalues, trace and spectrum of its Hessian (table 4, figure 10 of UFPS).

Products of the Hessian with a vector are exact, by a second backward pass. The largest eigenvalues come from ARPACK.
Trace and spectrum come from Lanczos runs that start at random signs (Ghorbani et al., An investigation into neural net
optimization via Hessian eigenvalue density, ICML 2019).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from consilium.analysis.figures import model_tints, site_panels
from consilium.analysis.finding import Finding, Options, Say, as_json, asked_sites, in_words
from consilium.analysis.opening import OpenRun, Runs
from consilium.analysis.probing import Probe, mean_loss, models_at, network_of
from consilium.dry_run import time_text
from consilium.errors import RunError
from consilium.randomness import numpy_generator
from consilium.weights import SiteName

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Vector = NDArray[np.float64]
Times = Callable[[Vector], Vector]

LARGEST = 5  # eigenvalues: UFPS gives the first and the first over the fifth
PROBES = 3  # random starts
STEPS = 30  # of Lanczos, from each start
GRID = 400  # points of a drawn spectrum


@dataclass(frozen=True)
class Curvature:
    """Eigenvalues, trace and spectrum of one Hessian."""

    largest: tuple[float, ...]  # eigenvalues, from the top
    trace: float
    trace_error: float  # standard error over the probes
    nodes: tuple[tuple[float, float], ...]  # eigenvalue, share of the spectrum: Lanczos quadrature
    size: int  # parameters

    @property
    def ratio(self) -> float:
        """λ_max / λ_5."""
        return self.largest[0] / self.largest[-1]

    def density(self) -> tuple[Vector, Vector]:
        """The smoothed spectrum, eigenvalues and density; each node has the width of a hundredth of the range."""
        values, shares = np.array(self.nodes).T
        low, high = float(values.min()), float(values.max())
        width = 0.01 * max(high - low, 1e-12)
        grid = np.linspace(low - 5 * width, high + 5 * width, GRID)
        bells = np.exp(-((grid[:, None] - values) ** 2) / (2 * width**2)) / (width * math.sqrt(2 * math.pi))
        return grid, bells @ shares

    def to_json(self) -> dict[str, Any]:
        return {
            "largest": list(self.largest),
            "ratio": self.ratio,
            "trace": self.trace,
            "trace_error": self.trace_error,
            "parameters": self.size,
            "nodes": [list(node) for node in self.nodes],
        }


def products(network: nn.Module, probes: Sequence[Probe]) -> tuple[Times, int]:
    """v → H v for the mean loss over the probes, and the number of parameters.

    Probes run one by one, so that memory holds one graph at a time.
    """
    parameters = list(network.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    total = sum(len(probe.batch.cases) for probe in probes)

    def times(vector: Vector) -> Vector:
        first = parameters[0]
        flat = torch.from_numpy(np.ascontiguousarray(vector)).to(first.device, first.dtype)
        parts = [part.view(parameter.shape) for part, parameter in zip(torch.split(flat, sizes), parameters)]
        result = np.zeros(len(vector))
        for probe in probes:
            loss = mean_loss(network, [probe])
            slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            pairs = [(slope * part).sum() for slope, part in zip(slopes, parts) if slope is not None]
            found = torch.autograd.grad(torch.stack(pairs).sum(), parameters, allow_unused=True, materialize_grads=True)
            result += (
                torch.cat([one.reshape(-1) for one in found]).double().cpu().numpy() * len(probe.batch.cases) / total
            )
        return result

    return times, sum(sizes)


def curvature(times: Times, size: int, seed: int = 0, probes: int = PROBES, steps: int = STEPS) -> Curvature:
    """The Hessian's largest eigenvalues, trace and spectrum from its products with vectors."""
    nodes: list[tuple[float, float]] = []
    traces = []
    for index in range(probes):
        signs = numpy_generator(seed, "probe", index).choice([-1.0, 1.0], size)
        alphas, betas = lanczos(times, signs, min(steps, size))
        values, vectors = np.linalg.eigh(np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1))
        nodes += [(float(value), float(first) ** 2 / probes) for value, first in zip(values, vectors[0])]
        traces.append(size * float(alphas[0]))  # sᵀ H s for random signs s: Hutchinson's estimate
    error = statistics.stdev(traces) / math.sqrt(probes) if probes > 1 else 0.0
    return Curvature(largest(times, size, seed), statistics.fmean(traces), error, tuple(nodes), size)


def largest(times: Times, size: int, seed: int = 0) -> tuple[float, ...]:
    """The largest eigenvalues, from the top, by ARPACK."""
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    operator = LinearOperator((size, size), matvec=times, dtype=np.float64)
    start = numpy_generator(seed, "start").normal(size=size)
    try:
        found = eigsh(
            operator, min(LARGEST, size - 1), which="LA", v0=start, tol=1e-4, maxiter=50, return_eigenvectors=False
        )
    except ArpackError as error:
        raise RunError(f"the largest eigenvalues were not found ({error}); try more --cases.") from error
    return tuple(sorted((float(value) for value in found), reverse=True))


def lanczos(times: Times, start: Vector, steps: int) -> tuple[Vector, Vector]:
    """The tridiagonal matrix of H in the Krylov space of `start`: its diagonal and the next one."""
    basis = np.zeros((steps, len(start)))
    basis[0] = start / np.linalg.norm(start)
    alphas, betas = np.zeros(steps), np.zeros(steps - 1)
    for k in range(steps):
        rest = times(basis[k])
        alphas[k] = basis[k] @ rest
        for _ in range(2):  # orthogonalise against all before, twice: otherwise known eigenvalues appear again
            rest = rest - basis[: k + 1].T @ (basis[: k + 1] @ rest)
        length = float(np.linalg.norm(rest))
        if k + 1 == steps or length < 1e-10 * max(1.0, abs(alphas[0])):  # the Krylov space is exhausted
            return alphas[: k + 1], betas[:k]
        betas[k], basis[k + 1] = length, rest / length
    return alphas, betas


def seconds_of_lanczos(times: Times, size: int) -> float:
    """How long the Lanczos runs take, by one product; the products of ARPACK come on top."""
    times(np.ones(size))  # the first is slower than all others
    began = time.monotonic()
    times(np.ones(size))
    return (time.monotonic() - began) * PROBES * min(STEPS, size)


def site_curvatures(
    runs: Sequence[OpenRun], sites: Sequence[SiteName], cases: int, seed: int, say: Callable[[str], None]
) -> dict[SiteName, dict[str, Curvature]]:
    """Site → model → curvature of the training loss on the site's training cases."""
    found: dict[SiteName, dict[str, Curvature]] = {}
    for site in sites:
        for model in models_at(runs, site):
            times, size = products(network_of(model.site.task, model.weights), model.probes(cases))
            say(f"Hessian of {model.name}: {site}, about {time_text(seconds_of_lanczos(times, size))} or more")
            found.setdefault(site, {})[model.name] = curvature(times, size, seed)
    return found


def to_markdown(found: Mapping[SiteName, Mapping[str, Curvature]]) -> str:
    """As table 4: the lower, the flatter."""
    head = ["site", "model", "λ_max", f"λ_max / λ_{LARGEST}", "trace"]
    rows = [
        [site, name, f"{one.largest[0]:.4g}", f"{one.ratio:.3f}", f"{one.trace:.4g} ± {one.trace_error:.2g}"]
        for site, by in found.items()
        for name, one in by.items()
    ]
    rule = ["---", "---", *["---:"] * 3]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def spectra(found: Mapping[str, Mapping[str, Curvature]]) -> Figure:
    """A panel per site: the density of eigenvalues, log scale, a colour per model, its λ_max dashed."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for by in found.values() for name in by))
    tint = model_tints(names)
    with site_panels(found, 2.6) as (figure, panels):
        for axes, (site, by) in zip(panels, found.items(), strict=True):
            for name, one in by.items():
                grid, density = one.density()
                axes.plot(grid, density, color=tint[name], linewidth=1.2, label=name)
                axes.axvline(one.largest[0], color=tint[name], linewidth=0.8, linestyle=(0, (2, 2)))
            axes.set(yscale="log", title=site, xlabel="eigenvalue", ylim=(1e-6, None))
        panels[0].set_ylabel("density")
        handles = [Line2D([], [], color=tint[name], label=name) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        return figure


def analyse_hessian(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs and sites together."""
    found = site_curvatures(runs.opened, asked_sites(runs, options), options.cases, options.seed, say)
    words = in_words(found, lambda one: f"{one.largest[0]:.3g}")
    yield Finding(
        "hessian",
        "How curved the loss is",
        f"Largest eigenvalue of the Hessian of the training loss, about {options.cases} cases each. {words}",
        {"sites": as_json(found)},
        {"hessian": spectra(found)},
        to_markdown(found),
    )
