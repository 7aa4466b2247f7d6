"""A real hospital's rules in a simulation: `consilium run --policy hospital.toml`."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from consilium.consent import Decision, Decisions, study_digest
from consilium.data.site_folder import Federation
from consilium.errors import StudyError
from consilium.fields import to_toml
from consilium.files import make_folder, write_bytes
from consilium.hospital import RULES, Hospital, read_hospital
from consilium.policy import Refused, read_key, simulated_secret
from consilium.run_files import UNDER_RULES
from consilium.site_opening import place_in
from consilium.study import Study
from consilium.timeline import timeline
from consilium.validation import admitted, check_annotation, expected_roster, members_of
from consilium.weights import SiteName
from consilium.wires.local_sites import policy_in


@dataclass(frozen=True)
class SiteRehearsal:
    """The rules of one site: its hospital.toml, and what its people decided on this study."""

    settings: bytes
    decision: Decision | None = None
    note: str = ""  # what a simulation does not need and a hospital does


Rules = Mapping[SiteName, SiteRehearsal]


def read_rules(paths: Sequence[Path], study: Study) -> Rules:
    """The rules of some sites of a study; mistakes in a file are told now."""
    found: dict[SiteName, SiteRehearsal] = {}
    sites = study.federation().sites
    for path in paths:
        hospital = read_hospital(path)
        site = hospital.site
        if site not in sites:
            raise StudyError(f"{path} is of site '{site}'; the federation has {', '.join(sites)}.")
        if site in found:
            raise StudyError(f"--policy: two files are of site '{site}'.")
        there = Path(hospital.data).is_dir()
        note = "" if there else f"{path}: data = {hospital.data!r} is no folder; the hospital could not start with it"
        found[site] = SiteRehearsal(_portable(path, hospital), _decision(hospital, study), note)
    return found


def _portable(path: Path, hospital: Hospital) -> bytes:
    """A hospital.toml for another folder: it names code, which lies beside it, by full paths."""
    if not hospital.limits.code:
        return path.read_bytes()
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    tables["limits"]["code"] = hospital.limits.code
    return "\n".join(f"{key} = {to_toml(value)}" for key, value in tables.items()).encode()


class Objections(NamedTuple):
    """What the rules of the sites would say to a study before it begins, and where they could end it."""

    notes: tuple[str, ...]
    refused: str  # why too few sites would be left to begin; empty: there are enough


def objections(rules: Rules, study: Study) -> Objections:
    federation = study.federation()
    members = members_of(study, federation)
    out: set[SiteName] = set()
    notes = tuple(_notes(rules, study, federation, members, out))
    left = [site for site in members if site not in out]
    if len(left) == len(members):
        return Objections(notes, "")
    if few := study.plan.too_few(len(left), len(members), study.pooled):
        return Objections(notes, f"{few}. Leave the others out with study.sites, or ask them to change their rules.")
    line = timeline(study.method, study.plan.rounds, study.plan.score_every)
    try:
        check_annotation(study, federation, left)
        admitted(study, line, expected_roster(study, federation, left))
    except StudyError as error:
        return Objections(notes, f"{error} Left out: {', '.join(sorted(out))}.")
    return Objections(notes, "")


def _notes(
    rules: Rules, study: Study, federation: Federation, members: Sequence[SiteName], out: set[SiteName]
) -> Iterator[str]:
    """In words; `out` gets the sites that would not take part."""
    with TemporaryDirectory() as folder:
        put_rules(rules, Path(folder), study)
        for site in sorted(rules.keys() & {*members, *study.plan.leave_out}):
            place = place_in(Path(folder), site)
            hospital = read_hospital(place / RULES)
            try:
                hospital.study(study.to_toml())
                policy_in(place, study, site).check(study, len(federation.sites[site].cases))
            except (PermissionError, Refused) as error:
                out.add(site)
                yield f"{site} would be left out: {error}"
                continue
            trains = site in members and not study.pooled  # guests, and sites of pooled training, are only scored
            for what, takes in (("rounds", study.exchanges * trains), ("scorings", study.scorings)):
                most = min(filter(None, (getattr(hospital.limits, key) for key in (what, f"study_{what}"))), default=0)
                if most and takes > most:
                    asks = f"the study asks for up to {takes} {what}, hospital.toml allows {most}"
                    yield f"{site} could stop answering: {asks}"


def _decision(hospital: Hospital, study: Study) -> Decision | None:
    """What people of a hospital have decided on a study; nothing is written at a hospital that has no key yet."""
    memory = Path(hospital.memory)
    if not hospital.limits.approval or not (memory / "key").exists():
        return None
    return Decisions(memory, read_key(memory / "key")).of(study_digest(study))


def runs_under(rules: Rules, runs: Path) -> Path:
    """Runs under rules have a folder of their own: the same study without them is another run."""
    if not rules:
        return runs
    digest = hashlib.sha256()
    for site in sorted(rules):
        decision = rules[site].decision
        digest.update(site.encode() + rules[site].settings + (decision.verdict.encode() if decision else b""))
    return runs / f"{UNDER_RULES}{digest.hexdigest()[:8]}"


def put_rules(rules: Rules, run: Path, study: Study) -> None:
    """Lay the rules into the sites' folders, where a resumed run finds them too; a rehearsal has its own key."""
    for site, found in rules.items():
        place = place_in(run, site)
        make_folder(place)
        write_bytes(found.settings, place / RULES)
        if found.decision is not None:
            Decisions(place, simulated_secret(study, site)).decide(study, found.decision)
