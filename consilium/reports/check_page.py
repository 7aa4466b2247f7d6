"""One self-contained page about a federation's data: what was found, every site's cases, the sites side by side.

It shows patients' images, so it stays where the data are; `consilium check --counts` writes what may leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.data.check import CheckResult
from consilium.data.seen import DataFinding, SeenCase, SeenFederation
from consilium.errors import DataError
from consilium.reports import check_figures
from consilium.reports.embedding import EmbeddedImage, embedded
from consilium.reports.rendering import write_html
from consilium.reports.style import label_colour
from consilium.wording import counted, listed

FEW = 3  # findings of a group that are shown without a click
_AXES = {2: ("rows", "columns"), 3: ("slices", "rows", "columns")}


def write_check_page(found: CheckResult, to: Path) -> None:
    """Write the page; the file appears whole or not at all."""
    write_html("check.html", _content(found), to, DataError)


def _content(found: CheckResult) -> dict[str, Any]:
    seen = found.seen
    sites = {} if seen is None else {name: seen.of(name) for name in seen.federation.sites}
    sites = {name: cases for name, cases in sites.items() if cases}
    number = {
        severity: sum(f.severity == severity for f in found.findings) for severity in ("error", "warning", "note")
    }
    return {
        "title": "The data before training",
        "lead": _lead(found, number),
        "counts": found.counts,
        "faults": found.faults,
        "groups": _groups(found.findings),
        "few": FEW,
        "sheets": [] if seen is None else [_sheet(seen, name, cases) for name, cases in sites.items()],
        "swatches": [] if seen is None else _swatches(seen),
        "intensities": _intensities(sites) if sites else None,
        "geometry": _geometry(seen, sites) if seen is not None and sites else None,
        "labels": _labels(seen, sites) if seen is not None and sites else None,
    }


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one kind that have the same effect and the same remedy."""

    severity: str
    kind: str
    effect: str
    remedy: str
    findings: tuple[DataFinding, ...]


def _groups(findings: Sequence[DataFinding]) -> list[FindingGroup]:
    """In the order of the findings; a hundred of a kind must not hide the pictures below them."""
    alike: dict[tuple[str, str, str, str], list[DataFinding]] = {}
    for one in findings:
        alike.setdefault((one.severity, one.kind, one.effect, one.remedy), []).append(one)
    return [FindingGroup(*about, tuple(members)) for about, members in alike.items()]


def _lead(found: CheckResult, number: Mapping[str, int]) -> str:
    cases = sum(sum(splits.values()) for splits in found.counts.values())
    refused = f"{counted(len(found.faults), 'fault')} that training would refuse"
    faults = refused if found.faults else "no fault"
    kinds = [counted(number[severity], severity) for severity in ("error", "warning", "note") if number[severity]]
    sites = counted(len(found.counts), "site")
    return f"{sites} with {counted(cases, 'case')}: {listed([faults, *kinds])}."


def _sheet(seen: SeenFederation, site: str, cases: Sequence[SeenCase]) -> tuple[str, int, int, EmbeddedImage | None]:
    chosen = [check_figures.shown(seen.federation, case) for case in check_figures.spread(cases)]
    pictures = [one for one in chosen if one is not None]
    labels = len(seen.federation.labels) if seen.federation.task == "segmentation" else 0
    if not pictures:
        return site, len(cases), len(cases), None
    figure = check_figures.contact_sheet(pictures, labels)
    return (
        site,
        len(cases),
        len(pictures),
        embedded(figure, f"{len(pictures)} cases of site {site} with the outlines of labels", "png", dpi=110),
    )


def _swatches(seen: SeenFederation) -> list[tuple[str, str]]:
    if seen.federation.task != "segmentation":
        return []
    return [(label_colour(i), label) for i, label in enumerate(seen.federation.labels)]


def _intensities(sites: Mapping[str, Sequence[SeenCase]]) -> EmbeddedImage:
    figure = check_figures.intensities({site: [c.facts.quantiles for c in cases] for site, cases in sites.items()})
    return embedded(figure, "Histograms of stored values, one panel per site")


def _geometry(seen: SeenFederation, sites: Mapping[str, Sequence[SeenCase]]) -> EmbeddedImage:
    names = _AXES[seen.federation.dimensions]
    panels: dict[str, dict[str, list[float]]] = {}
    for axis, name in enumerate(names):
        panels[f"size: {name}"] = {site: [c.facts.shape[axis] for c in cases] for site, cases in sites.items()}
    if any(case.facts.sized for cases in sites.values() for case in cases):
        for axis, name in enumerate(names):
            sized = {s: [c.facts.spacing[axis] for c in cases if c.facts.sized] for s, cases in sites.items()}
            panels[f"spacing of {name}, mm"] = sized
    return embedded(check_figures.strips(panels), "Size and spacing of every case, site by site")


def _labels(seen: SeenFederation, sites: Mapping[str, Sequence[SeenCase]]) -> EmbeddedImage | None:
    federation = seen.federation
    panels: dict[str, dict[str, list[float]]] = {}
    for value, label in enumerate(federation.labels[:12], start=1):
        if federation.task == "segmentation":
            panels[f"{label}, % of the image"] = {
                site: [100 * c.facts.labels[value].voxels / c.facts.size for c in cases if value in c.facts.labels]
                for site, cases in sites.items()
            }
        else:
            panels[f"{label}, % of the cases"] = {
                site: [100 * sum(c.case.label == label for c in cases) / len(cases)] for site, cases in sites.items()
            }
    return embedded(check_figures.strips(panels), "Share of every label, site by site") if panels else None
