"""APPLE's relationships: one site's p over rounds, p_ii of all sites, and the decay of the penalty on p."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from consilium.analysis.figures import MANY, side_labels
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import StudyError
from consilium.reports.figures import relation_map
from consilium.reports.relationships import Relationships, has_relationships, read_relationships
from consilium.reports.style import FAINT, INK, WIDTH, sheet
from consilium.study_reading import load_study
from consilium.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def site_curves(found: Relationships, site: str) -> Figure:
    """p_ij over rounds: a line per site j, the site's own bold; the ticks on the left mark their start, p0."""
    tint = _tints(found.sites)
    with sheet(height=3.8, width=0.65 * WIDTH) as figure:
        axes = figure.subplots()
        for j, other in enumerate(found.sites):
            line = [found.p0[other], *found.p[site][:, j]]
            width = 2.2 if other == site else 1.1
            axes.plot([0, *found.rounds[site]], line, color=tint[other], linewidth=width)
        axes.axhline(0, color=FAINT, linewidth=0.6)
        axes.set(title=f"What {site} takes from each site", xlabel="round", ylabel="$p_{ij}$")
        axes.grid(axis="y")
        axes.locator_params(axis="x", integer=True)
        side_labels(axes, {other: float(found.p[site][-1, j]) for j, other in enumerate(found.sites)}, tint)
        return figure


def own_share_curves(found: Relationships) -> Figure:
    """p_ii over rounds, a line per site."""
    tint = _tints(found.sites)
    with sheet(height=3.8, width=0.65 * WIDTH) as figure:
        axes = figure.subplots()
        for site in found.p:
            axes.plot([0, *found.rounds[site]], [found.p0[site], *found.own(site)], color=tint[site], linewidth=1.4)
        axes.set(title="What every site takes from its own core", xlabel="round", ylabel="$p_{ii}$")
        axes.grid(axis="y")
        axes.locator_params(axis="x", integer=True)
        side_labels(axes, {site: float(found.own(site)[-1]) for site in found.p}, tint)
        return figure


def scheduler_curve(values: Sequence[float], kind: str) -> Figure:
    """λ(r), the factor of the penalty on the distance of p from p0."""
    with sheet(height=2.6, width=0.45 * WIDTH) as figure:
        axes = figure.subplots()
        axes.plot(range(1, len(values) + 1), values, color=INK, linewidth=1.6, marker="o", markersize=2.5)
        axes.set(title=f"Scheduler, {kind}", xlabel="round", ylabel="λ", ylim=(-0.03, 1.05))
        axes.grid(axis="y")
        axes.locator_params(axis="x", integer=True)
        return figure


def _tints(sites: Sequence[str]) -> Mapping[str, str]:
    return {site: MANY[i % len(MANY)] for i, site in enumerate(sites)}


def analyse_relationships(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for view in [view for view in runs.views if has_relationships(view)] or runs.views[:1]:
        found = read_relationships(view)
        site = options.site or next(iter(found.p))
        if site not in found.p:
            raise StudyError(f"there is no site '{site}' with relationships; there are {', '.join(found.p)}.")
        study = load_study(view.folder / "study.toml")
        method: Any = study.method
        kept = [method.penalty_factor(round) for _, round in timeline(method, study.plan.rounds)]
        words = [f"{one} {found.own(one)[-1]:.2f} from itself, most else from {found.friend(one)}" for one in found.p]
        yield Finding(
            "relationships",
            "Which hospitals help which",
            "After the last round: " + "; ".join(words) + ". A row of the map is a hospital, a number how much its "
            "personal model takes from the core of the hospital above; p never leaves a hospital, only a simulation "
            "shows all of them",
            found.to_json(),
            {
                "relationships": relation_map(found.matrix(), found.sites),
                f"relationships-{site}": site_curves(found, site),
                "self-relationships": own_share_curves(found),
                "scheduler": scheduler_curve(kept, method.scheduler),
            },
            run=view.folder,
        )
