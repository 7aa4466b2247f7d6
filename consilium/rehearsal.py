"""A real hospital's rules in a simulation: `consilium run --policy hospital.toml`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from consilium.errors import StudyError
from consilium.files import make_folder, write_bytes
from consilium.hospital import RULES, read_hospital
from consilium.study import Study
from consilium.weights import SiteName
from consilium.worker import place_in

Rules = Mapping[SiteName, bytes]  # the hospital.toml of every site that has one


def read_rules(paths: Sequence[Path], study: Study) -> Rules:
    """The rules of some sites of a study; mistakes in a file are told now."""
    found: dict[SiteName, bytes] = {}
    sites = study.federation().sites
    for path in paths:
        site = read_hospital(path).site
        if site not in sites:
            raise StudyError(f"{path} is of site '{site}'; the federation has {', '.join(sites)}.")
        if site in found:
            raise StudyError(f"--policy: two files are of site '{site}'.")
        found[site] = path.read_bytes()
    return found


def runs_under(rules: Rules, runs: Path) -> Path:
    """Runs under rules have a folder of their own: the same study without them is another run."""
    if not rules:
        return runs
    digest = hashlib.sha256(b"".join(site.encode() + rules[site] for site in sorted(rules))).hexdigest()[:8]
    return runs / f"policy-{digest}"


def put_rules(rules: Rules, run: Path) -> None:
    """Lay the rules into the sites' folders, where a resumed run finds them too."""
    for site, text in rules.items():
        place = place_in(run, site)
        make_folder(place)
        write_bytes(text, place / RULES)
