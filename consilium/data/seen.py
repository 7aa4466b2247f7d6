"""What the rules of `consilium check` look at, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from consilium.data.case_facts import CaseFacts
from consilium.data.site_folder import Case, Federation, SiteFolder

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class DataFinding:
    """One thing worth knowing; `site`, `case` and `file` are empty where it is not theirs."""

    severity: str  # one of SEVERITIES
    kind: str  # a short name, the same for all findings of this kind
    site: str
    case: str
    file: str  # relative to the federation's folder
    what: str
    effect: str  # on training or scores
    remedy: str

    def __str__(self) -> str:
        place = f"{self.file}{f', case {self.case!r}' if self.case else ''}: " if self.file else ""
        return f"{place}{self.what}. {self.effect} {self.remedy}".strip()


@dataclass(frozen=True)
class SeenCase:
    """A sound case of a site, with its facts."""

    site: str
    case: Case
    facts: CaseFacts

    @property
    def name(self) -> str:
        return f"{self.site}/{self.case.name}"


@dataclass(frozen=True)
class SeenFederation:
    """What the rules look at; `batch` is the study's, where one is given."""

    federation: Federation
    cases: Sequence[SeenCase]
    batch: int | None = None

    def of(self, site: str) -> list[SeenCase]:
        return [seen for seen in self.cases if seen.site == site]

    def about(
        self, severity: str, kind: str, seen: SeenCase, what: str, effect: str, remedy: str, mask: bool = False
    ) -> DataFinding:
        """A finding about one case's image, or its mask."""
        path = seen.case.label if mask and isinstance(seen.case.label, Path) else seen.case.image
        inside = path.relative_to(self.federation.folder) if path.is_relative_to(self.federation.folder) else path
        return DataFinding(severity, kind, seen.site, seen.case.name, inside.as_posix(), what, effect, remedy)


Rule = Callable[[SeenFederation], Iterator[DataFinding]]


def of_site(severity: str, kind: str, site: SiteFolder, what: str, effect: str, remedy: str) -> DataFinding:
    """A finding about a site as a whole."""
    return DataFinding(severity, kind, site.name, "", "", what, effect, remedy)


def some_cases(cases: Sequence[SeenCase]) -> str:
    return some_names([one.name for one in cases])


def some_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
