"""The origin of a run: its sites, their cases and the code. A run continues only with the same."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from consilium.data.profile import DataProfile, read_profile
from consilium.errors import RunError
from consilium.files import read_json, write_json
from consilium.legacy import FORMAT, reject_other_format
from consilium.machine import origin
from consilium.weights import SiteName


class Origin:
    """`origin.json` of a run folder."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / "origin.json"

    def write(self, facts: Mapping[str, Any]) -> None:
        write_json({"format": FORMAT, **origin(), **facts}, self.path)

    def check_format(self) -> None:
        if not self.path.exists():
            return
        reject_other_format(self.run, read_json(self.path))

    def check(self, facts: Mapping[str, Any], new: Collection[SiteName] = ()) -> None:
        """Reject other sites, cases or plug-in files than at the start of the run; `new` sites may differ."""
        before = read_json(self.path) if new else {}
        kept = {
            key: {**facts[key], **{name: before[key][name] for name in new if name in before[key]}}
            for key in ("members", "sites")
            if new
        }
        if changed := differences(self.run, {**facts, **kept}):
            raise RunError(
                f"what {self.run} began with has changed: {'; '.join(changed)}. Restore it, or start the study again "
                "with `consilium run STUDY.toml --again`."
            )

    def trained_on(self) -> DataProfile | None:
        """The ranges of the training images; None for a run of 0.1, which did not record them."""
        return read_profile(read_json(self.path).get("distribution")) if self.path.exists() else None

    def told(self) -> dict[SiteName, Mapping[str, Any]]:
        """What the sites that took part told of themselves."""
        sites, out = read_json(self.path)["sites"] if self.path.exists() else {}, self.left_out()
        return {name: facts for name, facts in sites.items() if name not in out}

    def left_out(self) -> dict[SiteName, str]:
        """The sites that could not take part at the start of the run, with the reasons."""
        return dict(read_json(self.path).get("left_out", {})) if self.path.exists() else {}


def differences(run: Path, now: Mapping[str, Any]) -> list[str]:
    """Differences from the start of the run, in words: `sites` with their facts, `members`, `plugins` by file.

    Only facts that both have are compared. A run of 0.1 did not record its plug-in files.
    """
    path = run / "origin.json"
    if not path.exists():
        return []
    before, now = read_json(path), json.loads(json.dumps(now))
    new = now.get("plugins", {})
    old = before.get("plugins", new)
    code = sorted(file for file in old.keys() | new.keys() if old.get(file) != new.get(file))
    out = before.get("left_out", {})  # they were there too, but did not take part
    sites = {name: now["sites"][name] for name in now["sites"] if name not in out}
    found = _site_changes(before.get("sites", {}), sites, bool(code))
    if not found and "members" in now:
        found = _site_changes(before.get("members", {}), now["members"], bool(code))
    return found + [f"the plug-in file {file} {'has changed' if file in new else 'is gone'}" for file in code]


def same_site(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> bool:
    """Whether a site reports the same facts as before; a newer version may report more."""
    if old is None or new is None:
        return old is new
    return not _site_changes({"": old}, {"": json.loads(json.dumps(new))})


def _site_changes(old: Mapping[str, Any], new: Mapping[str, Any], code: bool = False) -> list[str]:
    """Sites whose facts are not those of before; with other `code`, its preprocessing steps may be the reason."""
    found = [f"site '{name}' is new" for name in sorted(new.keys() - old.keys())]
    found += [f"site '{name}' is gone" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        before, now = ({"unlabelled": 0, **facts[name]} for facts in (old, new))
        both = (before.keys() & now.keys()) - {"version", "study"}  # a newer version may continue, and may report more
        keys = {key for key in both if before[key] != now[key]}
        if keys:
            found.append(f"site '{name}' has other {_kind_of_change(keys, before, now, code)}")
    return found


def _kind_of_change(keys: set[str], old: Mapping[str, Any], new: Mapping[str, Any], code: bool) -> str:
    if "cases" in keys:
        return f"cases ({new['cases']}, it had {old['cases']})"
    if "table" in keys:
        return "cases, patients or splits in its table"
    if "labels" in keys:
        return f"labels ({', '.join(new['labels'])}, it had {', '.join(old['labels'])})"
    if "arrays" in keys:
        return "images, masks or preprocessing" if code else "images or masks"
    return "cases, labels or preprocessing"
