"""Findings about what the sites hold and what the models draw there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from consilium.analysis import figures, gallery, overlays
from consilium.analysis.finding import Finding, Options, Say, in_words
from consilium.analysis.opening import Runs


def of_gallery(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """Once for every federation among the runs."""
    once = {(run.federation.folder, tuple(run.sites)): run for run in reversed(runs.opened)}
    for run in reversed(once.values()):
        say(f"example images of {len(run.sites)} sites")
        counts = gallery.counts(run)
        yield Finding(
            "gallery",
            "What the sites hold",
            "Cases per site: " + ", ".join(f"{site} {gallery.total(row).cases}" for site, row in counts.items()),
            gallery.to_json(counts, run.guests),
            {
                "gallery": figures.gallery(gallery.examples(run), counts),
                "counts": figures.count_bars(counts, run.guests),
            },
            gallery.to_markdown(counts, run.guests),
            run.path,
        )


def of_overlays(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs side by side on the first test case of every site."""
    first = runs.opened[0]
    sites = [options.site] if options.site else first.sites
    found = overlays.shown_cases(runs.opened, sites)
    labels, values = first.study.task.labels, overlays.scores(found, first.study.task.labels)
    words = in_words(values, _mean)
    drawn = {"overlays": overlays.slices(found, labels)}
    if all(one.volume for one in found):
        drawn["projections"] = overlays.projections(found, labels)
    yield Finding(
        "overlays",
        "What the models draw",
        f"The first test case of every site; mean Dice of its labels. {words}",
        {"labels": list(labels), "cases": {one.site: one.case for one in found}, "dice": values},
        drawn,
    )


def _mean(values: Mapping[str, float]) -> str:
    return f"{sum(values.values()) / len(values):.3f}" if values else "–"
