"""What the documentation shows is true: its commands can be given, its studies read, its tables are complete."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from consilium.data.preprocess import Preprocess
from consilium.learning.aggregation import Aggregation
from consilium.local_training import Local
from consilium.methods.averaged import Release
from consilium.networks import NETWORKS
from consilium.plan import Plan, Source
from consilium.privacy.dp import Privacy
from consilium.privacy.firewall import Firewall
from consilium.study_reading import load_study, make_study
from consilium.tasks import TaskFields
from tests.docs.pages import PAGES, ROOT, SHELL, Block, all_blocks, commands, sections, table, the_commands

SECTIONS = {"study": Plan, "data": Source, "preprocess": Preprocess, "local": Local, "privacy": Privacy}
STUDIES = sorted((ROOT / "studies").glob("retina_*.toml"))
shown = [(block, words) for block in all_blocks(*SHELL) for words in commands(block)]


@pytest.mark.parametrize(("block", "words"), shown, ids=lambda value: str(value) if isinstance(value, Block) else "")
def test_every_shown_command_can_be_given(block: Block, words: list[str]) -> None:
    known = the_commands()
    if words[0].startswith("-"):
        assert words in (["--help"], ["--version"])
        return
    name, *rest = words
    assert name in known, f"{block}: there is no command {name}"
    command = known[name]
    inner: dict[str, Any] = getattr(command, "commands", {})
    if inner and rest != ["--help"]:
        assert rest, f"{block}: {name} needs a command"
        assert rest[0] in inner, f"{block}: there is no command {name} {rest[0]}"
        command, (name, *rest) = inner[rest[0]], rest
    if rest != ["--help"]:
        command.make_context(name, list(rest))  # says what is wrong with the words


def test_the_pages_show_commands() -> None:
    assert len(shown) > 15
    assert {words[0] for _, words in shown} >= {"run", "resume", "compare", "report", "predict", "check", "phantom"}


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_every_study_shown_can_be_read(block: Block, federation: Path) -> None:
    tables = tomllib.loads(block.text)
    known = {*SECTIONS, "task", "method", "release", "facts"}
    if not tables.keys() <= known:
        return  # a federation.toml, a site.toml, a suite
    if block.page.name == "extending.md":
        return  # tests/extending runs these, with the files beside them
    if {"data", "method"} <= tables.keys():
        make_study({**tables, "data": {**tables["data"], "federation": str(federation)}})
        return
    for section, kind in SECTIONS.items():
        fields = {f.name for f in dataclasses.fields(kind)}
        assert tables.get(section, {}).keys() <= fields, f"{block}: [{section}]"


def _toml(value: Any) -> str:
    if isinstance(value, Firewall):
        value = value.mode  # which will do
    if isinstance(value, Aggregation):
        value = value.rule
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _defaults(kind: Any) -> dict[str, str]:
    found = {}
    for field in dataclasses.fields(kind):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        found[field.name] = "required" if value is dataclasses.MISSING else f"`{_toml(value)}`"
    return found


STUDY_TABLES = {
    "`[study]`": Plan,
    "`[data]`": Source,
    "`[preprocess]`": Preprocess,
    "`[task]`": TaskFields,
    "`[local]`": Local,
    "`[release]`": Release,
    "`[study.firewall]`": Firewall,
    "`[study.aggregation]`": Aggregation,
    "`[privacy]`": Privacy,
    **{f"`{name}`": kind for name, kind in NETWORKS.items()},
}


@pytest.mark.parametrize("title", list(STUDY_TABLES))
def test_the_page_on_studies_has_every_key_and_default(title: str) -> None:
    (text,) = [text for head, text in sections(ROOT / "docs/studies.md").items() if title in head]
    rows = {key: cells[0] for key, cells in table(text, "key").items()}
    assert rows == _defaults(STUDY_TABLES[title])


def test_the_page_on_commands_has_every_command_and_option() -> None:
    page = sections(ROOT / "docs/commands.md")
    overview = (ROOT / "docs/commands.md").read_text().partition("All commands follow")[0]
    for name, command in the_commands().items():
        assert name in page, f"docs/commands.md has no section on {name}"
        assert f"(#{name})" in overview, f"the table at the top of docs/commands.md lacks {name}"
        options = {p.opts[0] for p in command.params if p.opts[0].startswith("--")}
        assert set(table(page[name], "option")) == options, name
        assert f"consilium {name}" in page[name], f"docs/commands.md shows no example of {name}"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.name)
def test_ready_studies_are_the_papers_setting(path: Path, federation: Path) -> None:
    assert path.read_text().splitlines()[0] == f"# consilium run studies/{path.name}"
    assert tomllib.loads(path.read_text())["data"] == {"federation": "data/retina"}
    study = load_study(path, [f'data.federation="{federation}"'])
    assert study.method_name == path.stem.removeprefix("retina_")
    assert study.name == path.stem.replace("_", "-")
    assert (study.plan.rounds, study.preprocess.size, study.local.batch_size) == (150, (256, 256), 8)
    assert (study.local.epochs, study.task_fields.loss) == (1, "dice")
    assert vars(study.network)["widths"] == (16, 32, 64, 128, 256)
    assert vars(study.network)["residual_units"] == 2
    assert study.local.optimizer == ("sgd" if study.method_name == "scaffold" else "adam")
    if study.method_name == "fedsm":
        assert study.task_fields.selector == "vgg11"


def test_the_ready_studies_are_all_there() -> None:
    names = {path.stem.removeprefix("retina_") for path in STUDIES}
    assert names >= {"fedsm", "fedavg", "fedprox", "scaffold", "local", "pooled"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_help_names_every_option_in_words() -> None:
    for name, command in the_commands().items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"consilium {name}: {parameter.name} is not explained"


@pytest.mark.parametrize("name", list(the_commands()))
def test_examples_in_help_can_be_given(name: str) -> None:
    for example in re.findall(r"Example: consilium (.*)", the_commands()[name].help or ""):
        words = example.split()
        assert words[0] in the_commands()
        assert the_commands()[words[0]].make_context(words[0], words[1:]).info_name == words[0]  # or a usage error


def test_the_glossary_has_every_term_once() -> None:
    glossary = sections(ROOT / "docs/concepts.md")["Glossary"]
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", glossary, flags=re.MULTILINE)
    assert len(terms) == len(set(terms))
    public = {"site", "server", "round", "phase", "study", "run", "method", "memory", "downlink", "uplink", "release"}
    public |= {"score", "share", "case", "super model", "personal model", "selector", "teacher", "policy", "roll call"}
    assert public | {"quorum", "firewall"} <= set(terms)


FILE = re.compile(r"`([a-z_]+\.(?:toml|jsonl?|csv|safetensors))`")
EXAMPLES = {"mine.toml", "steps.toml", "small.toml", "consortium.toml"}  # files of a page's own example


def test_the_glossary_has_every_file_that_a_user_meets() -> None:
    """Files that two pages or more name, without the ready studies."""
    pages = {page.name: set(FILE.findall(page.read_text(encoding="utf-8"))) for page in (ROOT / "docs").glob("*.md")}
    shared = {file for file in set().union(*pages.values()) if sum(file in names for names in pages.values()) > 1}
    studies = {path.name for path in (ROOT / "studies").iterdir()}
    glossary = sections(ROOT / "docs/concepts.md")["Glossary"]
    assert {file for file in shared - studies - EXAMPLES if f"| **`{file}`** |" not in glossary} == set()
