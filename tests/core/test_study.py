"""A study: every mistake gets a sentence, every default is written down, and what is written is read back equal."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from consilium.errors import StudyError
from consilium.methods import METHODS
from consilium.methods.fedsm import FedSM
from consilium.networks import NETWORKS
from consilium.simulation import run
from consilium.study import Study, with_plan
from consilium.study_reading import load_study, make_study
from consilium.validation import members_of
from tests.toy import toy_study


@dataclass(frozen=True)
class OneLayer:
    """A network of somebody else's, for `task.network = "package.module:Class"`."""

    kernel: int = 3

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        return nn.Conv2d(channels, outputs, self.kernel, padding=self.kernel // 2)


class NoDataclass:
    pass


def study(federation: Path, tables: dict[str, dict[str, Any]]) -> Study:
    base: dict[str, dict[str, Any]] = {"data": {"federation": str(federation)}, "method": {"name": "fedavg"}}
    return make_study({**base, **{name: {**base.get(name, {}), **table} for name, table in tables.items()}})


# ---------------------------------------------------------------------------------------------- mistakes

MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    # unknown names, with the nearest valid one
    ({"sudy": {}}, ["no section [sudy]", "'study'"]),
    ({"study": {"round": 3}}, ["no key 'round'", "'rounds'"]),
    ({"data": {"federations": "x"}}, ["no key 'federations'", "'federation'"]),
    ({"preprocess": {"sise": [1, 1]}}, ["no key 'sise'", "'size'"]),
    ({"task": {"widhts": [4, 8]}}, ["[task] has no key 'widhts'", "'widths'"]),
    ({"task": {"hidden": 5}}, ["no key 'hidden'"]),  # of the cnn, not of a unet2d
    ({"local": {"batchsize": 3}}, ["no key 'batchsize'", "'batch_size'"]),
    ({"method": {"name": "fedsm", "pul": 0.7}}, ["fedsm", "no key 'pul'", "'pull'"]),
    ({"method": {"pull": 0.7}}, ["fedavg", "no key 'pull'"]),  # FedAvg has no such field
    ({"method": {"name": "fedsn"}}, ["no such method", "'fedsm'"]),
    ({"method": {"name": 3}}, ["name is required", "fedavg"]),
    ({"task": {"network": "unet3"}}, ["no such network", "'unet3d'"]),
    ({"release": {"swa_form": 0.5}}, ["no key 'swa_form'", "'swa_from'"]),
    # types
    ({"study": {"rounds": "many"}}, ["[study] rounds = 'many'", "a whole number"]),
    ({"study": {"rounds": 2.5}}, ["a whole number"]),
    ({"study": {"rounds": True}}, ["a whole number"]),
    ({"study": {"sites": "ada"}}, ["[study] sites = 'ada'", "a list"]),
    ({"study": {"sites": [1]}}, ["[study] sites", "text"]),
    ({"study": {"away": ["ada"]}}, ["[study] away", "a table"]),
    ({"study": {"away": {"ada": 3}}}, ["[study] away.ada = 3", "a list"]),
    ({"local": {"lr": "small"}}, ["[local] lr = 'small'", "a number"]),
    ({"data": {"pooled": 1}}, ["[data] pooled = 1", "true or false"]),
    ({"method": {"name": "fedsm", "confidence": [1]}}, ["confidence", "a number or text"]),
    ({"task": {"network": "cnn", "widths": [1, 2, 3]}}, ["it must have 2 values"]),
    # ranges and choices
    ({"study": {"rounds": 0}}, ["rounds = 0", "at least 1"]),
    ({"study": {"seed": -1}}, ["seed = -1", "at least 0"]),
    ({"study": {"score_every": 0}}, ["score_every = 0", "at least 1"]),
    ({"study": {"min_sites": 0}}, ["min_sites = 0", "at least 1"]),
    ({"study": {"sites_per_round": -1}}, ["sites_per_round = -1"]),
    ({"study": {"deadline": 0}}, ["deadline = 0", "positive"]),
    ({"study": {"keep_rounds": "some"}}, ["last-two, all"]),
    ({"study": {"name": "../x"}}, ["letters, digits"]),
    ({"study": {"sites": ["ada", "bea"], "leave_out": ["ada"]}}, ["'ada' is in both"]),
    ({"local": {"optimizer": "lion"}}, ["adam, adamw, sgd"]),
    ({"local": {"schedule": "linear"}}, ["constant, decay, warmup-cosine"]),
    ({"local": {"precision": "int8"}}, ["float32, bfloat16, float16"]),
    ({"local": {"batchnorm": "global"}}, ["average, local-statistics, local"]),
    ({"local": {"epochs": 0}}, ["epochs = 0"]),
    ({"local": {"batch_size": 0}}, ["batch_size = 0"]),
    ({"local": {"threads": 0}}, ["threads = 0"]),
    ({"local": {"lr": 0}}, ["lr = 0", "positive"]),
    ({"local": {"lr": float("nan")}}, ["lr = nan", "positive"]),
    ({"local": {"momentum": 1.0}}, ["momentum = 1.0", "[0, 1)"]),
    ({"local": {"decay": 0}}, ["decay = 0", "(0, 1]"]),
    ({"local": {"weight_decay": -1}}, ["weight_decay", "from 0 up"]),
    ({"local": {"clip": -1}}, ["clip", "from 0 up"]),
    ({"task": {"loss": "ce"}}, ["dice, dice+ce"]),
    ({"task": {"selector": "vgg16"}}, ["vgg-small, vgg11"]),
    ({"task": {"overlap": 1.0}}, ["overlap = 1.0", "[0, 1)"]),
    ({"task": {"patch": [0, 8]}}, ["patch", "positive"]),
    ({"task": {"augment": ["flipp"]}}, ["no 'flipp'", "flip, flip-plane"]),
    ({"task": {"widths": [4]}}, ["widths = [4]", "at least two"]),
    ({"task": {"norm": "layer"}}, ["instance, batch, group"]),
    ({"preprocess": {"size": [8, 8, 8]}}, ["size = [8, 8, 8]", "2-D images"]),
    ({"preprocess": {"window": [3, 1]}}, ["window", "a higher number"]),
    ({"release": {"swa_from": 1.0}}, ["swa_from = 1.0", "[0, 1)"]),
    ({"release": {"swa_from": 0.5, "swa_cycle": 0}}, ["swa_cycle = 0", "at least 1"]),
    ({"release": {"swa_from": 0.5}, "method": {"name": "fedsm"}}, ["swa_from", "super", "set it to 0"]),
    ({"method": {"name": "fedprox", "mu": -1}}, ["mu = -1", "0 is FedAvg"]),
    ({"method": {"name": "fedsm", "pull": 0}}, ["pull = 0", "(0, 1]"]),
    ({"method": {"name": "fedsm", "pull": 1.1}}, ["pull = 1.1", "(0, 1]"]),
    ({"method": {"name": "fedsm", "confidence": 1.5}}, ["confidence = 1.5", "[0, 1]"]),
    ({"method": {"name": "fedsm", "confidence": "high"}}, ["'high'", "'tuned'"]),
    ({"local": {"optimizer_state": "lost"}}, ["[local] optimizer_state = 'lost'", "kept, fresh"]),
    ({"method": {"name": "fedsm", "optimizer_state": "lost"}}, ["[local] optimizer_state = 'lost'", "kept, fresh"]),
    (
        {"method": {"name": "fedsm", "optimizer_state": "kept"}, "local": {"optimizer_state": "fresh"}},
        ["[method] optimizer_state = 'kept'", "[local] optimizer_state = 'fresh'", "keep the one in [local]"],
    ),
    (
        {"method": {"name": "apple"}, "local": {"optimizer_state": "kept"}},
        ["optimizer_state = 'kept'", "'apple' fixes it to 'fresh'", "leave the key out"],
    ),
    ({"method": {"name": "fedsm", "best": "some"}}, ["each, joint"]),
    ({"method": {"name": "fedsm", "selector_lr": 0}}, ["selector_lr", "positive"]),
    ({"method": {"name": "scaffold", "lr": -1}}, ["lr = -1"]),
    # classes of one's own
    ({"method": {"name": "nowhere.at_all:Method"}}, ["cannot import nowhere.at_all:Method"]),
    ({"method": {"name": "consilium.methods.fedsm:FedSN"}}, ["cannot import"]),
    (
        {"method": {"name": "tests.core.test_study:NoDataclass"}},
        ["is not a method", "derived from consilium.method.Method"],
    ),
    ({"task": {"network": "tests.core.test_study:NoDataclass"}}, ["is not a network", "with build()"]),
]


@pytest.mark.parametrize(("tables", "words"), MISTAKES, ids=[str(tables)[:60] for tables, _ in MISTAKES])
def test_a_mistake_gets_a_sentence(tables: dict[str, Any], words: list[str], federation: Path) -> None:
    with pytest.raises(StudyError) as error:
        study(federation, tables)
    for word in words:
        assert word in str(error.value)


WRONG_TASK: list[tuple[dict[str, Any], str]] = [
    ({"network": "unet3d"}, "this federation has 2-D images"),
    ({"network": "cnn"}, "classifies; take 'unet2d'"),
    ({"patch": [8, 8, 8]}, "this federation has 2-D images"),
]


@pytest.mark.parametrize(("task", "words"), WRONG_TASK)
def test_a_task_that_does_not_fit_the_federation(task: dict[str, Any], words: str, federation: Path) -> None:
    with pytest.raises(StudyError, match=words):
        study(federation, {"task": task}).task  # noqa: B018 - built when first asked for


@pytest.mark.parametrize("name", ["clip", "weight_decay"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(name: str, value: float, federation: Path) -> None:
    with pytest.raises(StudyError):
        study(federation, {"local": {name: value}})


@pytest.mark.parametrize("task", [{"dropout": 2.0}, {"residual_units": -1}])
def test_fields_of_the_network_are_checked(task: dict[str, Any], federation: Path) -> None:
    with pytest.raises(StudyError):
        study(federation, {"task": task}).task.network()


@pytest.mark.parametrize("section", ["study", "local"])
def test_a_section_is_a_table(section: str, federation: Path) -> None:
    with pytest.raises(StudyError, match=rf"write \[{section}\]"):
        make_study({section: 3, "data": {"federation": str(federation)}, "method": {"name": "fedavg"}})


def test_two_keys_are_required(federation: Path) -> None:
    with pytest.raises(StudyError, match=r"\[data\] federation is required"):
        make_study({"method": {"name": "fedavg"}})
    with pytest.raises(StudyError, match=r"\[method\] name is required; choose from local, pooled, fedavg"):
        make_study({"data": {"federation": str(federation)}})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"sites": ("ada", "dan")}, "no site 'dan'; the federation has ada, bea, cid"),
        ({"leave_out": ("dan",)}, "no site 'dan'"),
        ({"away": {"dan": (1,)}}, "no site 'dan'"),
        ({"leave_out": ("ada", "bea", "cid")}, "leaves no site to train"),
    ],
)
def test_an_unknown_site_is_named(plan: dict[str, Any], words: str, federation: Path) -> None:
    wrong = with_plan(toy_study(federation), **plan)
    with pytest.raises(StudyError, match=words):
        members_of(wrong, wrong.federation())


# ---------------------------------------------------------------------------------------------- files


def write(path: Path, federation: Path | str, more: str = "") -> Path:
    path.write_text(f'[data]\nfederation = "{federation}"\n[method]\nname = "fedsm"\n{more}', encoding="utf-8")
    return path


def test_only_federation_and_method_are_required(federation: Path, tmp_path: Path) -> None:
    read = load_study(write(tmp_path / "s.toml", federation))
    assert (read.plan.rounds, read.plan.score_every, read.local.optimizer, read.local.lr) == (150, 5, "adam", 1e-3)
    assert read.method == FedSM(pull=0.7, confidence="tuned")
    assert read.task_fields.network == "unet2d"
    assert read.name == "fedsm"


def test_every_default_is_written_and_read_back_equal(federation: Path, tmp_path: Path) -> None:
    first = load_study(
        write(tmp_path / "s.toml", federation),
        ["study.away={ada = [2, 3]}", "data.annotated={bea = ['blob']}", "task.augment=['flip']", "local.lr=3"],
    )
    (tmp_path / "complete.toml").write_text(first.to_toml())
    tables = tomllib.loads(first.to_toml())
    assert tables["local"]["batchnorm"] == "average"
    assert tables["task"]["widths"] == [16, 32, 64, 128, 256]
    assert tables["study"]["deadline"] == 3600.0
    assert set(tables["method"]) == {"name", *(field.name for field in fields(FedSM))}
    assert (tables["method"]["name"], tables["method"]["pull"], tables["method"]["confidence"]) == (
        "fedsm",
        0.7,
        "tuned",
    )
    second = load_study(tmp_path / "complete.toml")
    assert second == first
    assert second.hash == first.hash
    assert second.to_toml() == first.to_toml()


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_is_read_back_equal(name: str, federation: Path, tmp_path: Path) -> None:
    first = toy_study(federation, name)
    (tmp_path / "study.toml").write_text(first.to_toml())
    assert load_study(tmp_path / "study.toml") == first


@pytest.mark.parametrize("change", ["study.seed=1", "local.lr=0.2", "method.pull=0.6", "task.norm=batch"])
def test_the_hash_tells_studies_apart(change: str, federation: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "s.toml", federation)
    assert load_study(path).hash == load_study(path).hash
    assert load_study(path, [change]).hash != load_study(path).hash


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["local.lr=0.01"], lambda s: s.local.lr == 0.01),
        (["local.lr=1"], lambda s: s.local.lr == 1.0 and isinstance(s.local.lr, float)),
        (["local.optimizer=sgd"], lambda s: s.local.optimizer == "sgd"),
        (['local.optimizer="sgd"'], lambda s: s.local.optimizer == "sgd"),
        (["study.sites=['ada', 'bea']"], lambda s: s.plan.sites == ("ada", "bea")),
        (["study.away.ada=[1, 2]"], lambda s: s.plan.away == {"ada": (1, 2)}),
        (["study.away={ada = [1]}"], lambda s: s.plan.away == {"ada": (1,)}),
        (["data.pooled=true"], lambda s: s.pooled),
        (["method.name=fedavg"], lambda s: s.method_name == "fedavg"),
        (["study.rounds=3", "study.rounds=4"], lambda s: s.plan.rounds == 4),
        ([" study.seed = 5"], lambda s: s.plan.seed == 5),
        (["study.name=a=b"], None),
    ],
)
def test_set_takes_toml_else_text(changes: list[str], expected: Any, federation: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "s.toml", federation)
    if expected is None:
        with pytest.raises(StudyError, match="name = 'a=b'"):
            load_study(path, changes)
    else:
        assert expected(load_study(path, changes))


@pytest.mark.parametrize("change", ["local.lr", "lr=0.1", "=1", ".lr=1", "local.=1", "study.rounds.x=1"])
def test_a_set_that_makes_no_sense(change: str, federation: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"--set"):
        load_study(write(tmp_path / "s.toml", federation, "[study]\nrounds = 3\n"), [change])


@pytest.mark.parametrize(("text", "words"), [("[data\n", "not valid TOML"), (b"\xff\xfe", "cannot read the study")])
def test_a_file_that_cannot_be_read(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StudyError, match=words):
        load_study(path)
    with pytest.raises(StudyError, match="cannot read the study"):
        load_study(tmp_path / "none.toml")


def test_a_relative_federation_lies_beside_the_study(federation: Path, tmp_path: Path) -> None:
    path = write(federation.parent / "beside.toml", federation.name)
    assert load_study(path).data.federation == str(federation)
    with pytest.raises(StudyError, match=r"no such folder here or beside .*consilium phantom retina --to nowhere"):
        load_study(write(tmp_path / "s.toml", "nowhere"))


def test_with_facts_a_study_needs_no_data_until_it_trains(tmp_path: Path) -> None:
    """As at the administrator of a federation, which has none."""
    facts = {"task": "segmentation", "labels": ["disc"], "dimensions": 2, "channels": 3}
    study = make_study({"facts": facts, "method": {"name": "fedavg"}})
    assert study.task.network() is not None
    with pytest.raises(StudyError, match="federation names no folder of sites"):
        run(study, tmp_path, workers=0)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_federation_is_looked_for_here_first(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(federation.parent)
    assert load_study(write(tmp_path / "s.toml", federation.name)).data.federation == str(federation)


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(("alias", "name"), [("separate", "local"), ("centralized", "pooled")])
def test_aliases(alias: str, name: str, federation: Path) -> None:
    assert study(federation, {"method": {"name": alias}}) == study(federation, {"method": {"name": name}})


def test_a_method_of_ones_own_by_its_class(federation: Path) -> None:
    own = study(federation, {"method": {"name": "consilium.methods.fedsm:FedSM", "pull": 0.5}})
    assert own.method == FedSM(pull=0.5)
    assert own.name == "consilium.methods.fedsm-FedSM"


def test_a_network_of_ones_own_by_its_class(federation: Path, tmp_path: Path) -> None:
    own = toy_study(federation)
    tables = own.tables()
    tables["task"] = {"network": "tests.core.test_study:OneLayer", "kernel": 5}
    tables["study"]["rounds"] = 1
    result = run(make_study(tables), tmp_path, workers=0)
    assert result.summary["headline"]["metric"] == "dice"
    assert "kernel = 5" in (result.folder / "study.toml").read_text()


def test_the_named_networks_are_all_there() -> None:
    papers = {"unet2d", "unet3d", "plain-unet", "cnn", "vgg11", "vgg-small"}
    assert set(NETWORKS) == papers | {"dynunet", "segresnet", "swin-unetr", "densenet", "resnet"}
