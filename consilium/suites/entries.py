"""The lines of a suite's tables: the runs they stand for, their scores by seed and case, and their differences."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from consilium.reports.comparing import part_name
from consilium.reports.reading import Headline, RunView
from consilium.scores.means import ByCase, ScoreEntry, with_label_mean
from consilium.scores.statistics import paired
from consilium.scores.views import by_case
from consilium.suites.choosing import SettingsChoice


@dataclass(frozen=True)
class RowRuns:
    """A row's choice and its finished runs by seed."""

    choice: SettingsChoice
    runs: Mapping[int, RunView]
    lacking: tuple[int, ...] = ()  # seeds whose run is finished, and does not have the score of the table

    @property
    def name(self) -> str:
        return self.choice.row.name


@dataclass(frozen=True)
class TableEntry:
    """A line of the table: one row of the suite or, where sites are left out in turn, a row for each turn."""

    name: str
    standings: tuple[RowRuns, ...]
    unseen: bool  # scored at the sites left out
    model: str = ""  # a part of the method's model with its own line; empty: the headline model

    @property
    def parts(self) -> list[TableEntry]:
        """Lines for the parts of a super model that tables show."""
        return [replace(self, name=part_name(self.name, model), model=model) for model in self.runs[0].parts]

    def about(self, run: RunView) -> Headline:
        return replace(headline_of(run), model=self.model) if self.model else headline_of(run)

    @property
    def runs(self) -> list[RunView]:
        return [run for standing in self.standings for run in standing.runs.values()]

    @property
    def seeds(self) -> list[int]:
        """The seeds with all turns finished: means over different sites are not comparable."""
        first, *rest = (standing.runs for standing in self.standings)
        return [seed for seed in first if all(seed in runs for runs in rest)]

    def entry(self, seed: int, label: str) -> ScoreEntry:
        if not self.unseen:
            run = self.standings[0].runs[seed]
            return run.entry(self.about(run).model, self.about(run).metric, label)
        found = self.cases([seed], label)
        sites = {site: statistics.fmean(cases.values()) for site, cases in found.items()}
        if not sites:
            return ScoreEntry()
        every = [value for cases in found.values() for value in cases.values()]
        return ScoreEntry(outside=sites, site_mean=statistics.fmean(sites.values()), pooled=statistics.fmean(every))

    def late_of_seeds(self, label: str, rounds: int) -> tuple[float, ...]:
        """`late` of each seed that has enough rounds."""
        found = (self.late(seed, label, rounds) for seed in self.seeds)
        return tuple(value for value in found if value is not None)

    def late(self, seed: int, label: str, rounds: int) -> float | None:
        """The site mean over the last `rounds` rounds that were scored; None if there are fewer."""
        run = self.standings[0].runs[seed]
        about, counted = self.about(run), [row for row in run.rows if row.phase not in ("best", "last")]
        numbers = sorted({row.round for row in counted})[-rounds:]
        means = []
        for number in numbers:
            rows = with_label_mean([row for row in counted if row.round == number])
            found = by_case(rows, about.model, about.metric, label, "test", outside=self.unseen)
            if found:
                means.append(statistics.fmean(statistics.fmean(cases.values()) for cases in found.values()))
        return statistics.fmean(means) if len(means) == rounds else None

    def cases(self, seeds: Sequence[int], label: str) -> ByCase:
        """Site → case → mean over seeds; a case of another federation is another patient, whatever its name."""
        values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in (standing.runs[seed] for standing in self.standings for seed in seeds):
            data, about = str(run.study.get("data", {}).get("federation", "")), self.about(run)
            rows = by_case(run.best_rows, about.model, about.metric, label, "test", outside=self.unseen)
            for site, cases in rows.items():
                for case, value in cases.items():
                    values[site][f"{data}/{case}"].append(value)
        return {site: {case: statistics.fmean(v) for case, v in cases.items()} for site, cases in values.items()}


@dataclass(frozen=True)
class Difference:
    """The difference of a row's site mean to the reference's, on the cases and seeds that both have."""

    value: float
    sd: float | None  # of the seeds' differences, if there are several
    low: float  # 95 % bootstrap interval over cases, each case averaged over the seeds it was seen in
    high: float
    p: float  # Wilcoxon signed-rank over the cases
    cases: int
    by_seed: Mapping[int, float]
    single: tuple[str, ...] = ()  # sites with one test case

    def text(self) -> str:
        return f"{self.value:+.4f}" + ("" if self.sd is None else f" ± {self.sd:.4f}")


def difference(row: TableEntry, base: TableEntry, label: str) -> Difference | None:
    """The difference of two lines, on the cases and seeds that both have; None if there are none."""
    both = [
        seed for seed in row.seeds
        if seed in base.seeds and all("site_mean" in one.entry(seed, label) for one in (row, base))
    ]  # fmt: skip
    found = paired(row.cases(both, label), base.cases(both, label))
    if found is None:
        return None
    by_seed = {seed: row.entry(seed, label)["site_mean"] - base.entry(seed, label)["site_mean"] for seed in both}
    sd = statistics.stdev(by_seed.values()) if len(by_seed) > 1 else None
    return Difference(found.difference, sd, found.low, found.high, found.p, found.cases, by_seed, found.single)


def single_notes(sites: Sequence[str]) -> list[str]:
    """A sentence on sites with one test case, if there are any: how wide an interval is, is the other sites' there."""
    spread = "Its own spread is unknown; the interval takes that of the other sites' cases."
    return [f"One test case only: {', '.join(sites)}. {spread}"] * bool(sites)


def headline_of(run: RunView) -> Headline:
    assert run.headline is not None  # finished runs have one
    return run.headline
