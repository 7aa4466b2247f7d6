"""Says what is wrong with a federation, in words: its tables, every image and mask, and what differs between sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consilium.data.examining import examine
from consilium.data.findings import RULES
from consilium.data.gathering import Progress, look_at_all
from consilium.data.leaks import LEAKS
from consilium.data.seen import SEVERITIES, DataFinding, SeenCase, SeenFederation
from consilium.data.site_folder import SPLITS, Fault, Federation, Rejected, survey


@dataclass(frozen=True)
class CheckResult:
    """Everything that is wrong, what is legal but worth knowing, and the cases per site and split."""

    faults: tuple[Fault, ...]  # training would refuse these
    findings: tuple[DataFinding, ...]  # the gravest first
    counts: Mapping[str, Mapping[str, int]]  # {"site": {"train": 4, "valid": 2, "test": 2, "empty": 0}}
    unlabelled: Mapping[str, int]  # of these, cases without a mask, where there are some
    seen: SeenFederation | None = field(compare=False, repr=False)  # None: the tables say too little to read on

    @property
    def errors(self) -> tuple[DataFinding, ...]:
        """Findings that make scores false: leaks between training and test."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def notes(self) -> tuple[str, ...]:
        """The other findings, in words."""
        return tuple(str(finding) for finding in self.findings if finding.severity != "error")

    def tally(self) -> dict[str, Any]:
        """Counts only: no name of a case, a patient or a file. This may leave a hospital."""
        table: dict[str, dict[str, dict[str, int]]] = {site: {} for site in self.counts}
        found = [(fault.site, "error", "fault") for fault in self.faults]
        found += [(finding.site, finding.severity, finding.kind) for finding in self.findings]
        for (site, severity, kind), number in sorted(Counter(found).items()):
            table.setdefault(site or "between sites", {}).setdefault(severity, {})[kind] = number
        return {"cases": {site: dict(splits) for site, splits in self.counts.items()}, "findings": table}


def check(
    folder: Path, batch: int | None = None, workers: int | None = None, progress: Progress | None = None
) -> CheckResult:
    """Every fault of the tables, of every image and of every mask, none hidden behind the first, and all findings.

    Args:
        folder: a federation's.
        batch: the study's batch size, to name sites that are too small for it.
        workers: processes to read with; None takes one per core where there is much to read.
        progress: called with the cases done and the cases in all.
    """
    tables = survey(folder)
    if tables.federation is None:
        return CheckResult(tables.faults, (), {}, {}, None)
    return check_cases(tables.federation, tables.faults, tables.rejected, batch, workers, progress)


def check_cases(
    federation: Federation,
    faults: Sequence[Fault] = (),
    rejected: Sequence[Rejected] = (),
    batch: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CheckResult:
    """`check` of tables that are read already; also of one hospital's own site."""
    all_faults = list(faults)
    looks = look_at_all(federation, workers, progress)
    for look in looks:
        all_faults += look.faults
    for row in rejected:
        all_faults += examine(federation, row.site, row.name, row.image, row.label).faults
    sound = [SeenCase(look.site, look.case, look.facts) for look in looks if look.facts is not None]
    seen = SeenFederation(federation, sound, batch)
    findings = [finding for rule in (*RULES, *LEAKS) for finding in rule(seen)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return CheckResult(tuple(all_faults), tuple(findings), counts(federation), unlabelled(federation), seen)


def counts(federation: Federation) -> dict[str, dict[str, int]]:
    """The number of cases per site and split; `empty` are those whose split is not drawn yet."""
    table = {}
    for site in federation.sites.values():
        number = Counter(case.split or "empty" for case in site.cases)
        table[site.name] = {split: number[split] for split in (*SPLITS, "empty")}
    return table


def unlabelled(federation: Federation) -> dict[str, int]:
    """The number of cases without a mask, of the sites that have such."""
    number = {name: sum(case.label is None for case in site.cases) for name, site in federation.sites.items()}
    return {name: n for name, n in number.items() if n}
