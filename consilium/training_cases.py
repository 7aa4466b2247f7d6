"""Which of some cases a model was trained on, or chosen by, as far as its run and its own federation tell."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.data.cache import image_contents, table_hash
from consilium.data.site_folder import Case, Federation, SiteFolder, read_federation
from consilium.errors import DataError
from consilium.inputs import as_told
from consilium.policy import KEY_ALIAS
from consilium.run_files.origin import Origin
from consilium.study import Study
from consilium.weights import SiteName
from consilium.wording import are, counted, listed


@dataclass(frozen=True)
class Seen:
    """Cases, as "site/case", that a model has seen, and sites of which this can no longer be told."""

    cases: tuple[str, ...] = ()
    changed: tuple[SiteName, ...] = ()  # their tables are others than in the training

    def warning(self, scored: int) -> str:
        parts = []
        if self.cases:
            some = ", ".join(self.cases[:3]) + (", …" if len(self.cases) > 3 else "")
            parts.append(
                f"the model was trained on, or chosen by, {len(self.cases)} of {counted(scored, 'case')} ({some}): "
                "their scores are too good."
            )
        if self.changed:
            tables = "table" if len(self.changed) == 1 else "tables"
            parts.append(
                f"The {tables} of {listed(self.changed)} {are(len(self.changed))} not as in the training, so it cannot "
                "be told which cases the model has seen there."
            )
        return " ".join(parts)


def seen_cases(
    study: Study, run: Path, of: SiteName, asked: Federation, splits: Collection[str], scored: Collection[str]
) -> Seen:
    """What a model has seen of the scored cases; nothing is known where its own federation is not at hand.

    Cases are told by what their image files hold, whatever their names.

    Args:
        run: the run folder; a package says nothing of its cases.
        of: the site whose model it is; "" of a common model.
        scored: "site/case" of the cases in question.
    """
    told, own = Origin(run).told(), study.data.federation
    if not told or not own or not Path(own).is_dir():
        return Seen()
    try:
        before = read_federation(Path(own)).sites
    except DataError:
        return Seen()
    trained = [of] if of and study.method.alone else [name for name in told if name not in study.plan.leave_out]
    facts = {
        name: {"table": table_hash(s.cases), "cases": len(s.cases), "key": KEY_ALIAS} for name, s in before.items()
    }
    now = as_told({"sites": facts}, study, run)["sites"]
    same = [name for name in trained if name in now and _same_table(told[name], now[name])]
    known = {content for name in same for content in image_contents(before[name], _used(study, before[name])).values()}
    seen = (
        f"{site.name}/{case}"
        for site in asked.sites.values()
        for case, content in image_contents(site, [case for case in site.cases if case.split in splits]).items()
        if content in known
    )
    return Seen(tuple(name for name in seen if name in scored), tuple(name for name in trained if name not in same))


def _used(study: Study, site: SiteFolder) -> Iterator[Case]:
    """The cases that train or choose; most methods leave out those without a mask."""
    for case in site.cases:
        if case.split in ("train", "valid") and (case.label is not None or study.method.unlabelled):
            yield case


def _same_table(told: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a site's table is as it was told. A hospital's hash of it has a secret key: only its size is known."""
    hidden = (told.get("key") or now["key"]) != now["key"]
    fact = "cases" if hidden else "table"
    return bool((told.get(fact) or now[fact]) == now[fact])
