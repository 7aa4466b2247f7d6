"""Which of some cases a model was trained on, or chosen by, as far as its own federation tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from consilium.data.cache import table_hash
from consilium.data.same_files import same_files
from consilium.data.site_folder import Federation, read_federation
from consilium.errors import DataError
from consilium.study import Study
from consilium.weights import SiteName
from consilium.wording import counted

ALONE = ("local", "separate", "solo")  # methods whose model of a site has seen this site's cases only


@dataclass(frozen=True)
class Seen:
    """Cases, as "site/case", that a model has seen, and sites of which this is no longer known."""

    cases: tuple[str, ...] = ()
    changed: tuple[SiteName, ...] = ()  # their tables are others than when the training began

    def warning(self, scored: int) -> str:
        parts = []
        if self.cases:
            some = ", ".join(self.cases[:3]) + (", …" if len(self.cases) > 3 else "")
            parts.append(
                f"the model was trained on, or chosen by, {len(self.cases)} of {counted(scored, 'case')} ({some}): "
                "their scores are too good."
            )
        if self.changed:
            sites = ", ".join(self.changed)
            parts.append(f"cases or splits of {sites} have changed since the training: the model may know more cases.")
        return " ".join(parts)


def seen_cases(
    study: Study,
    of: SiteName,
    tables: Mapping[SiteName, str],
    asked: Federation,
    splits: Collection[str],
    scored: Collection[str],
) -> Seen:
    """What a model has seen of the scored cases; nothing is known where its own federation is not at hand.

    Args:
        of: the site whose model it is; "" of a common model.
        tables: of the sites that trained: the digests of their tables then; "" where it is not known.
        scored: "site/case" of the cases in question.
    """
    own = study.data.federation
    if not own or not Path(own).is_dir():  # a package names none
        return Seen()
    try:
        before = read_federation(Path(own))
    except DataError:
        return Seen()
    trained = [of] if of in tables and study.method_name in ALONE else list(tables)
    sites = {name: before.sites[name] for name in trained if name in before.sites}
    known = same_files(asked.sites.values(), splits, sites.values(), ("train", "valid"))
    changed = (name for name in trained if name not in sites or tables[name] not in ("", table_hash(sites[name].cases)))
    return Seen(tuple(name for name in known if name in scored), tuple(changed))
