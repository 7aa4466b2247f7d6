"""A study in plain words for the person who decides whether a hospital takes part: what it does, sends and costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from consilium.budget import budgets
from consilium.caps import needs_of, too_large
from consilium.consent import WaitingStudy, study_digest
from consilium.describe import describe_all, leaving
from consilium.errors import StudyError
from consilium.federation.forecasting import size_text
from consilium.fields import to_toml
from consilium.hospital import Hospital, too_little_privacy
from consilium.study import Study
from consilium.timeline import timeline
from consilium.wording import counted


def read_waiting(found: WaitingStudy, hospital: Hospital) -> Study:
    """A study that waits for review; StudyError if this hospital's rules or package forbid reading it."""
    try:
        study = hospital.study(found.text)
    except PermissionError as error:
        raise StudyError(f"study {found.digest[:12]} cannot run here: {error}.") from error
    if study_digest(study) != found.digest:
        raise StudyError(
            f"the file of study {found.digest[:12]} is not what was submitted: remove it, and have the study "
            "submitted again."
        )
    return study


def in_words(study: Study, hospital: Hospital) -> Iterator[str]:
    """Lines to read before deciding. Nothing that a study names can add a line or hide one."""
    return (printable(line) for line in _in_words(study, hospital))


def printable(text: str) -> str:
    """With characters that a terminal would obey written out."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _in_words(study: Study, hospital: Hospital) -> Iterator[str]:
    method = describe_all([study.method_name])[0]
    yield f"study {study.name}, {study_digest(study)}"
    yield ""
    yield from _work(study, str(method["about"]))
    yield from _sends(study)
    kept = ", ".join(method["stays"]) or "nothing"
    yield f"Stays here: images, masks, names of cases; of the method: {kept}."
    yield ""
    yield f"Privacy: {_privacy(study)}"
    yield f"Code: {_code(study)}"
    yield ""
    yield from _costs(study)
    yield from _left_of_budgets(study, hospital)
    wrong = [why for _, why in too_large(hospital.limits, study)]
    wrong += [why] if (why := too_little_privacy(hospital.limits, study)) else []
    if tuple(study.facts.labels) != hospital.labels:
        wrong.append(f"it is about {', '.join(study.facts.labels)}, and hospital.toml names other labels.")
    for why in wrong:
        yield f"hospital.toml rejects it whatever you decide: {why}"


def _work(study: Study, about: str) -> Iterator[str]:
    size = needs_of(study).network
    phases: dict[str, int] = {}
    for phase, _ in timeline(study.method, study.plan.rounds):
        phases[phase.name] = phases.get(phase.name, 0) + 1
    rounds = ", ".join(f"{count} of '{name}'" for name, count in phases.items())
    task = f"{study.facts.task} of {', '.join(study.facts.labels)}"
    yield f"Does: {task}, by the method {study.method_name}. {about}"
    trains = f"{counted(study.exchanges, 'round')} ({rounds})"
    yield f"      It trains here in {trains}, {_passes(study)} over your cases each."
    yield f"      It scores models on your validation and test cases {study.scorings} times."
    yield f"      Its network has {size.parameters:,} parameters in {size.layers} layers ({size_text(size.bytes)})."
    if study.plan.sites:
        yield f"      Sites: {', '.join(study.plan.sites)}."


def _passes(study: Study) -> str:
    return "one pass" if study.local.epochs == 1 else f"{study.local.epochs} passes"


def _sends(study: Study) -> Iterator[str]:
    yield ""
    yield "Sends to the server, and through it in part to other sites:"
    total = 0
    for phase in leaving(study)["phases"]:
        total += phase["rounds"] * phase["bytes"]
        when = f"each of {phase['rounds']} rounds" if phase["rounds"] > 1 else "1 round"
        yield f"  in {when} of '{phase['phase']}' {size_text(phase['bytes'])}:"
        for name, field in phase["fields"].items():
            yield f"    {name}: {field['what']} ({size_text(field['bytes'])})"
    yield "  once: numbers of your cases and their labels" + (
        "" if study.privacy.on else "; ranges of sizes, spacings and values of your training images"
    )
    yield f"  {study.scorings} times: scores of every validation and test case, under names that only you can read"
    yield f"  in all {size_text(total)} of updates"


def _privacy(study: Study) -> str:
    privacy = study.privacy
    if not privacy.on:
        return "no noise. A model can memorise images, so updates may say something of single patients."
    if privacy.by_update:
        return (
            f"every update is clipped and noised: ε {privacy.told(study.exchanges):.3g} at δ {privacy.delta:g} for all."
        )
    target = f"ε at most {privacy.epsilon:g}" if privacy.epsilon else f"noise {privacy.noise:g}"
    return f"every patient is protected while training (DP-SGD): {target} at δ {privacy.delta:g}."


def _code(study: Study) -> str:
    if not study.plugins:
        return "only that of the installed package."
    return f"{', '.join(study.plugins)}; your hospital.toml allows it by its hash."


def _costs(study: Study) -> Iterator[str]:
    needs = needs_of(study)
    yield (
        f"Takes: at least {size_text(needs.memory)} of memory, {size_text(needs.disk)} of disk; at most "
        f"{study.plan.deadline:g} s per round on {counted(study.local.threads, 'thread')}, "
        f"{study.exchanges * study.plan.deadline / 3600:.3g} h in all."
    )


def _left_of_budgets(study: Study, hospital: Hospital) -> Iterator[str]:
    """What the study would take of the hospital's budgets that count messages."""
    takes = {"rounds": study.exchanges, "scorings": study.scorings}
    for use in budgets(Path(hospital.memory), hospital.limits):
        if not use.study and use.allowed and use.what in takes:
            yield f"Takes: {takes[use.what]} {use.what} of your budget, of which is used: {use.text}."


def short(study: Study) -> str:
    """One line of a list."""
    ups = sum(phase["rounds"] * phase["bytes"] for phase in leaving(study)["phases"])
    private = "with noise" if study.privacy.on else "no noise"
    code = ", own code" if study.plugins else ""
    rounds = counted(study.exchanges, "round")
    return printable(
        f"{study.name}: {study.method_name}, {rounds}, {size_text(ups)} leave, {private}{code}, "
        f"labels {to_toml(list(study.facts.labels))}"
    )
