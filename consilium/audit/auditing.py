"""An audit of a run: every attack on every model, the verdicts, and the files they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from consilium import __version__
from consilium.analysis.opening import OpenRun, open_run
from consilium.audit.figures import shown_models, uncertainty_figure
from consilium.audit.inversion import inversion_figure, invert
from consilium.audit.lira import (
    SHADOWS,
    LiraSettings,
    ShadowGroup,
    check_shadows,
    estimate,
    group_of,
    lira_attack,
)
from consilium.audit.loss_threshold import threshold_attack
from consilium.audit.shadow import ShadowAttack, shadow_attack
from consilium.audit.signals import CaseKey, Populations, Signal, populations, selector_scores, signals
from consilium.audit.statistics import OPEN, OVER, UNDER, Power, bar_in_words
from consilium.audit.tables import markdown
from consilium.audit.targets import Target, targets_of
from consilium.errors import RunError
from consilium.files import write_json, writing_into
from consilium.randomness import derive
from consilium.reports.style import to_bytes
from consilium.weights import SiteName

Say = Callable[[str], None]
FOLDER, FILE = "audit", "audit.json"
QUICK_EPOCHS, QUICK_STEPS = 20, 400  # of a shadow, at least


@dataclass(frozen=True)
class AuditOptions:
    """How thorough an audit is."""

    quick: bool = False  # the loss threshold and the shadow attack, with short shadows
    shadows: int = SHADOWS  # of the likelihood-ratio attack
    epochs: int | None = None  # of shadows; None: 20 of a quick audit, else as many as the run's models had
    least_steps: int | None = None  # of a quick audit's shadows; None: 400
    keep: Path | None = None  # where the shadows of the likelihood-ratio attack are kept; None: in the run's `audit`

    def length(self, run: OpenRun) -> tuple[int, int]:
        """Epochs and least steps of the paper's shadow."""
        if not self.quick:
            return self._whole(run), 0
        return self.epochs or QUICK_EPOCHS, QUICK_STEPS if self.least_steps is None else self.least_steps

    def lira(self, run: OpenRun) -> LiraSettings:
        return LiraSettings(self.shadows, self._whole(run), (self.keep or run.path / FOLDER) / "lira")

    def _whole(self, run: OpenRun) -> int:
        return self.epochs or run.study.plan.rounds * run.study.local.epochs


@dataclass(frozen=True)
class AuditedModel:
    """What the attacks found on one model."""

    target: Target
    members: int
    others: int
    attacks: Mapping[str, Power | ShadowAttack]
    skipped: Mapping[str, str]  # by attack: why it was not made
    uncertainty: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of "members" and "non-members"

    @property
    def verdict(self) -> str:
        """The worst of the attacks'."""
        found = {power_of(attack).verdict for attack in self.attacks.values()}
        return next((verdict for verdict in (OVER, OPEN, UNDER) if verdict in found), OPEN)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.target.name,
            "stays_at_its_site": self.target.stays,
            "members": self.members,
            "non_members": self.others,
            "attacks": {name: attack.to_json() for name, attack in self.attacks.items()},
            "skipped": dict(self.skipped),
            "verdict": self.verdict,
            "uncertainty": {name: [round(v, 5) for v in values] for name, values in self.uncertainty.items()},
        }


@dataclass(frozen=True)
class Audit:
    """All that an audit of one run found."""

    run: OpenRun
    models: tuple[AuditedModel, ...]
    quick: bool

    def to_json(self) -> dict[str, Any]:
        study = self.run.study
        return {
            "audit": 1,
            "version": __version__,
            "run": self.run.path.name,
            "method": study.method_name,
            "augmented": bool(study.task_fields.augment),
            "private": study.privacy.on,
            "quick": self.quick,
            "bar": bar_in_words(),
            "models": [model.to_json() for model in self.models],
        }


def audit(path: Path, options: AuditOptions | None = None, say: Say = lambda _: None) -> Audit:
    """Attack every model of a finished run; the same run gives the same figures."""
    options = options or AuditOptions()
    check_shadows(options.shadows)
    run = open_run(path)
    torch.set_num_threads(run.study.local.threads)  # as in training: it changes the last bits
    targets = targets_of(run)
    if not targets:
        raise RunError(f"{path} holds no model that can be audited; audit a run whose sites train one.")
    seed = derive(run.study.plan.seed, "audit")
    people = {sites: populations(run, sites, derive(seed, *sites)) for sites in {target.sites for target in targets}}
    groups = {} if options.quick else _groups(targets, people)
    _forecast(run, list(groups.values()), options, say)
    found = []
    for target in targets:
        say(f"auditing {target.name}: {len(people[target.sites].members)} members")
        group = groups.get(group_of(target))
        found.append(_audited(run, people[target.sites], target, options, group))
    return Audit(run, tuple(found), options.quick)


def _groups(
    targets: Sequence[Target], people: Mapping[tuple[SiteName, ...], Populations]
) -> dict[tuple[object, ...], ShadowGroup]:
    found: dict[tuple[object, ...], ShadowGroup] = {}
    for target in targets:
        if target.answer is not None and people[target.sites].members and people[target.sites].others:
            found.setdefault(group_of(target), ShadowGroup(target, people[target.sites]))
    return found


def _forecast(run: OpenRun, groups: Sequence[ShadowGroup], options: AuditOptions, say: Say) -> None:
    """Say how long the likelihood-ratio attack will take, before it begins."""
    count, seconds = estimate(run, groups, options.lira(run))
    if count:
        about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        say(
            f"the likelihood-ratio attack trains {count} shadows: about {about} on this machine. Each is kept when "
            "it is done; the same command goes on where it was stopped. --quick leaves the attack out."
        )


def _audited(
    run: OpenRun, people: Populations, target: Target, options: AuditOptions, group: ShadowGroup | None
) -> AuditedModel:
    seed, counts = derive(people.seed, target.name), (len(people.members), len(people.others))
    if not people.members or not people.others:
        reason = "there are no test cases to compare training cases with; give the site some."
        return AuditedModel(target, *counts, {}, {"loss threshold": reason})
    keys = [*people.members, *people.others, *people.outsiders]
    if target.closeness is not None:
        near = selector_scores(run, people, keys, target.closeness)
        return AuditedModel(target, *counts, {"loss threshold": threshold_attack(people, near, seed)}, {})
    seen = signals(run, people, keys, target)
    losses = {key: signal.loss for key, signal in seen.items()}
    closeness = {key: -loss for key, loss in losses.items()}
    attacks: dict[str, Power | ShadowAttack] = {"loss threshold": threshold_attack(people, closeness, seed)}
    skipped = {}
    shadow = shadow_attack(run, people, target, seen, *options.length(run))
    if isinstance(shadow, str):
        skipped["shadow"] = shadow
    else:
        attacks["shadow"] = shadow
    if group is not None:
        attacks["likelihood ratio"] = lira_attack(run, group, target, losses, options.lira(run))
    return AuditedModel(target, *counts, attacks, skipped, _uncertainty(people, seen))


def _uncertainty(people: Populations, seen: Mapping[CaseKey, Signal]) -> dict[str, list[float]]:
    groups = {"members": people.members, "non-members": people.others}
    return {name: [seen[key].uncertainty for key in keys] for name, keys in groups.items()}


def power_of(attack: Power | ShadowAttack) -> Power:
    return attack.power if isinstance(attack, ShadowAttack) else attack


def write_audit(found: Audit, to: Path | None = None) -> list[Path]:
    """The files of an audit: figures as JSON, a table in Markdown, figure S5; into `audit/` of the run, or `to`."""
    folder, facts = found.run.path / FOLDER if to is None else to, found.to_json()
    files = [folder / FILE, folder / "audit.md"]
    with writing_into(folder):
        write_json(facts, files[0])
        files[1].write_text(markdown(facts), encoding="utf-8")
    return [*files, *write_uncertainty([facts], folder)]


def write_uncertainty(audits: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Figure S5 of one or more audits, one row each; nothing where no model tells how unsure it is."""
    if not all(shown_models(facts) for facts in audits):
        return []
    figure = uncertainty_figure(audits)
    files = {folder / "uncertainty.svg": to_bytes(figure, "svg"), folder / "uncertainty.png": to_bytes(figure, "png")}
    with writing_into(folder):
        for path, data in files.items():
            path.write_bytes(data)
    return list(files)


def write_inversion(path: Path, to: Path | None = None) -> list[Path]:
    """A picture of what one update of 1 and of 8 images shows, and its figures; training images are on it."""
    run = open_run(path)
    torch.set_num_threads(run.study.local.threads)
    tries = invert(run)
    folder, figure = run.path / FOLDER if to is None else to, inversion_figure(tries)
    with writing_into(folder):
        (folder / "inversion.png").write_bytes(to_bytes(figure, "png"))
        write_json([one.to_json() for one in tries], folder / "inversion.json")
    return [folder / "inversion.png", folder / "inversion.json"]
