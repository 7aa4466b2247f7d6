"""Describes a method in words, for a user who must know what leaves the hospital."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from consilium import tree
from consilium.errors import StudyError
from consilium.extensions import code_hash, is_code, located
from consilium.federation.forecasting import roster_of, size_text
from consilium.fields import nearest, plain, to_toml
from consilium.method import Maybe, Method
from consilium.methods import ALIASES, METHODS
from consilium.networks.unet import UNet
from consilium.site import Round, SiteCard
from consilium.study import Study
from consilium.study_reading import find_method
from consilium.tasks import Facts, TaskFields, build_task
from consilium.timeline import timeline
from consilium.weights import Weights


def find(name: str) -> str:
    """The name of a method in the registry; StudyError if neither the package nor the user's code has it."""
    name = ALIASES.get(name, name)
    if find_method(name) is None:
        own = name.endswith(".py")
        remedy = f"a method of your own is named with its class, as {name}:Mine." if own else nearest(name, METHODS)
        raise StudyError(f"there is no method '{name}'; {remedy}")
    return name


def _kind(name: str) -> type[Method]:
    kind = find_method(name)
    assert kind is not None  # `find` has checked it
    return kind


def describe_all(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Every method as JSON."""
    return [_facts(name, _kind(name)) for name in names or METHODS]


def _facts(name: str, kind: type[Method]) -> dict[str, Any]:
    return {
        "name": name,
        "about": _sentence(kind),
        "paper": kind.paper,
        "fields": _fields(kind),
        "leaves_site": _message(kind.Uplink),
        "stays": _message(kind.Memory),
        "headline": kind.headline,
        "deployable": kind.deployable,
        "passes": kind.prediction,
        "optimizer_state": kind.optimizer_state or "as the study says",
        "private": not _not_private(kind),
        "differences": list(kind.differences),
    }


def _not_private(kind: type[Method]) -> str:
    """Why DP-SGD cannot protect the patients of a method with its default fields; empty if it can."""
    made: Any = kind
    if any(_default(field) is dataclasses.MISSING for field in dataclasses.fields(kind)):
        return "" if kind.private else "its fields decide"
    return str(made().not_private())


def _fields(kind: type) -> dict[str, Any]:
    """Fields and their defaults; those of a module are a nested dictionary."""
    found = {f.name: _default(f) for f in dataclasses.fields(kind)}
    return {name: plain(value) if dataclasses.is_dataclass(value) else value for name, value in found.items()}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _field_sections(kind: type, section: str = "method") -> list[str]:
    """The fields of [method], then those of each table below it, with the comments beside them."""
    notes, lines, below = _comments(kind), [], []
    for found in dataclasses.fields(kind):
        value = _default(found)
        if dataclasses.is_dataclass(value):
            below += _field_sections(type(value), f"{section}.{found.name}")
        else:
            lines.append(f"  {found.name} = {to_toml(value)}".ljust(40) + notes.get(found.name, ""))
    return [*_section(f"Fields of [{section}]", lines), *below]


def _sentence(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n")[0]


def _message(kind: type) -> dict[str, str]:
    """The fields of a message: type in words, and the comment in the source."""
    hints = get_type_hints(kind)
    notes = _comments(kind)
    return {f.name.rstrip("_"): _said(hints[f.name], notes.get(f.name, "")) for f in dataclasses.fields(kind)}


def _said(hint: Any, note: str) -> str:
    return f"{_in_words(hint)}: {note}" if note else _in_words(hint)


_WORDS: dict[Any, str] = {
    Weights: "weights", Tensor: "a tensor", float: "a number", int: "a whole number", str: "text",
    bool: "true or false", type(None): "nothing",
}  # fmt: skip


def _in_words(hint: Any) -> str:
    """A message's type for someone who does not read Python."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(part) for part in parts)
    if origin is tuple:
        return f"a list, each {_in_words(parts[0])}"
    if origin is Mapping:
        return f"by name, each {_in_words(parts[1])}"
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", hint.__name__).lower()


def _comments(kind: type) -> dict[str, str]:
    """The comment on the line of each field, in the class or in a parent class."""
    return {name: said for parent in reversed(kind.__mro__[:-1]) for name, said in _own_comments(parent).items()}


@cache  # Python parses the whole file to find a class in it
def _own_comments(kind: type) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for line in textwrap.dedent(inspect.getsource(kind)).splitlines():
        code, _, comment = line.partition("  # ")
        name, colon, _ = code.removeprefix("    ").partition(":")
        if colon and comment and name.isidentifier():  # deeper lines, of nested classes, start with a space
            found[name] = comment.strip()
    return found


def describe(name: str | None = None) -> str:
    """A list of all methods, or a page about one."""
    if name is None:
        width = max(map(len, METHODS))
        lines = [f"{n.ljust(width)}  {_sentence(kind)}" for n, kind in METHODS.items()]
        also = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
        return "\n".join(
            [
                *lines,
                "",
                f"Also known as: {also}.",
                "`consilium methods NAME` describes one: its fields, what leaves the hospital and what stays.",
            ]
        )
    name = find(name)
    kind = _kind(name)
    facts = _facts(name, kind)
    return "\n".join([
        f"{name}: {facts['about']}",
        f"Paper: {facts['paper']}",
        f"Its headline model: {facts['headline']}" + ("" if kind.deployable else " (simulation only)"),
        f"Its optimiser's state: {_optimizer_state(kind)}",
        f"Forward passes per case when it predicts: {facts['passes']}",
        f"Patients protected by DP-SGD, if the study asks for it: {_in_short(_not_private(kind))}",
        *_field_sections(kind),
        *_section("Leaves the hospital every round", _listed(facts["leaves_site"])),
        f"  With the default U-Net, six sites and a small selector: {_size(kind)} per round.",
        *_section("Stays at the hospital", _listed(facts["stays"])),
        *_section("Differences from the paper", [f"  - {text}" for text in facts["differences"]]),
        *_hash_line(name),
        "",
        "A model can memorise images: what leaves is named above, not what could be inferred from it.",
    ])  # fmt: skip


def _in_short(why: str) -> str:
    return f"no, because {why}" if why else "yes"


def _hash_line(name: str) -> list[str]:
    """For a user's own code: the line that a hospital writes to allow it."""
    full = located({"method": {"name": name}}, None)[0]["method"]["name"]
    return [f'A hospital allows it with [limits] code = ["{name} {code_hash(full)}"].'] if is_code(name) else []


def _optimizer_state(kind: type[Method]) -> str:
    if kind.optimizer_state:
        return f"always {kind.optimizer_state}; [local] optimizer_state cannot change it"
    return "as [local] optimizer_state says"


def leaving(study: Study) -> dict[str, Any]:
    """The bytes that every site of a study sends, by phase and field."""
    roster = roster_of(study)
    method, card = study.method, next(iter(roster.values()))
    notes = _message(method.Uplink)
    phases = []
    for phase, round in timeline(method, study.plan.rounds):
        if round.step == 0:
            sizes = field_sizes(method.blank(study.task, roster, card, round))
            fields = {name: {"bytes": size, "what": notes[name]} for name, size in sizes.items()}
            phases.append({"phase": phase.name, "rounds": phase.rounds, "bytes": sum(sizes.values()), "fields": fields})
    return {"study": study.name, "method": study.method_name, "hospitals": len(roster), "phases": phases}


def leaving_text(study: Study) -> str:
    facts = leaving(study)
    whom = f"each of {facts['hospitals']} hospitals" if facts["hospitals"] > 1 else "the hospital"
    lines = [f"{facts['study']} ({facts['method']}): what leaves {whom}"]
    for phase in facts["phases"]:
        times = f"{phase['rounds']} rounds, each" if phase["rounds"] > 1 else "1 round"
        lines += _section(
            f"{phase['phase']} ({times} {size_text(phase['bytes'])})",
            [
                f"  {name}".ljust(24) + f"{size_text(field['bytes'])}".rjust(10) + f"  {field['what']}"
                for name, field in phase["fields"].items()
            ],
        )
    return "\n".join(lines)


def field_sizes(uplink: Any) -> dict[str, int]:
    """The bytes of each field as a separate packet; fields that are None in a phase are not sent."""
    sizes = {}
    for field in dataclasses.fields(uplink):
        rest = {other.name: None for other in dataclasses.fields(uplink) if other.name != field.name}
        if getattr(uplink, field.name) is not None:
            bare = tree.flatten(dataclasses.replace(uplink, **rest, **{field.name: None})).nbytes()
            sizes[field.name.rstrip("_")] = (
                tree.flatten(dataclasses.replace(uplink, **rest)).nbytes() - bare + len("null")
            )
    return sizes


def _size(kind: type[Method]) -> str:
    """The bytes of an uplink in the first phase, for the default networks."""
    facts = Facts("segmentation", ("disc", "cup"), 2, 3, {"disc": ("cup",)})
    task = build_task(TaskFields(), UNet(), facts, 0)
    roster = {name: SiteCard(name, i, 1, facts.labels) for i, name in enumerate("abcdef")}
    method = kind()
    first = next(phase for phase in method.phases(3) if phase.counts)
    blank = method.blank(
        task, roster, roster["a"], Round(1, first.name, 1, first.rounds)
    )  # in the first round a site may wait
    once = {name: None for name, part in vars(blank).items() if isinstance(part, Maybe)}
    blank = dataclasses.replace(blank, **once)
    total = sum(t.numel() * t.element_size() for part in tree.split(blank).weights.values() for t in part.values())
    return f"{total / 1e6:.1f} MB"


def _listed(fields: dict[str, str]) -> list[str]:
    return [f"  {key}".ljust(24) + text for key, text in fields.items()]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(lines or ["  nothing"])]
