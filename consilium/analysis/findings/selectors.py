"""Findings about routing: what the selector sees, how sure it must be, what a site keeps of its own."""

from __future__ import annotations

from collections.abc import Iterable

from consilium.analysis import features, figures, sweeps
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.reports.tables import called


def of_features(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    # of runs without a selector the first is asked and says so
    for run in [run for run in runs.opened if run.selects] or runs.opened[:1]:
        say(f"selector features of {run.name}")
        found = features.selector_features(run)
        points = features.laid_out(found.values, options.layout, options.seed)
        facts = features.to_json(found, points, options.layout)
        apart = facts["separation"]
        yield Finding(
            "features",
            "What the selector sees",
            f"{len(found.seen)} cases of {len(run.sites)} sites by the features the selector decides by"
            + ("" if apart is None else f"; silhouette of the sites {apart:.2f}"),
            facts,
            {"features": figures.feature_map(points, found.seen, options.layout)},
            run=run.path,
        )


def of_gamma(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if run.thresholded] or runs.opened[:1]:
        sweep = sweeps.gamma_sweep(run, say)
        at = {split: dict(zip(sweep.grid, means)) for split in sweeps.SPLITS if (means := sweep.site_mean(split))}
        words = [
            f"{split} {means[0.0]:.3f} at γ = 0, {means[sweep.chosen]:.3f} at the run's {sweep.chosen:g}, "
            f"{means[1.0]:.3f} at 1"
            for split, means in at.items()
        ]
        oracle = [f"{site}'s own test cases would like γ = {o.gamma:g}" for site, o in sweep.oracle_gamma.items()]
        yield Finding(
            "gamma",
            "How sure the selector must be",
            "; ".join(["Site means: " + "; ".join(words), *oracle]),
            sweep.to_json(),
            {"gamma": figures.gamma(sweep, called(run.study.task.headline))},
            run=run.path,
        )


def of_lambda(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    sweep = sweeps.lambda_sweep(runs.views)
    words = [f"λ = {one.pull:g}: {one.test[sweep.headline]}" for one in sweep.pulls if sweep.headline in one.test]
    yield Finding(
        "lambda",
        "How much a site keeps of its own model",
        f"Test {called(sweep.metric)} of the {sweep.headline} model. {'; '.join(words)}",
        sweep.to_json(),
        {"lambda": figures.pulls(sweep, called(sweep.metric))},
        sweep.to_markdown(),
    )
