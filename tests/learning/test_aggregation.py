"""Rules that a few false models cannot move far: by hand, on two or three numbers per site."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.contract import run_in_process
from consilium.errors import StudyError
from consilium.learning.aggregation import RULES, Aggregation, nearest
from consilium.methods import METHODS
from consilium.methods.menu_net import MENUNet
from consilium.methods.scaffold import Scaffold
from consilium.methods.shares import with_aggregation
from consilium.methods.ufps import UFPS
from consilium.methods.ufps_modules import TeacherUncertainty
from consilium.site import Round
from consilium.weights import Weights, mean
from tests.toy import toy_study

ALIKE = dict.fromkeys("abcde", 1.0)


def model(*values: float) -> Weights:
    return Weights({"w": torch.tensor(values), "count": torch.tensor(7)})


START = model(0.0, 0.0)
HONEST = {"a": model(1.0, 0.0), "b": model(1.0, 1.0), "c": model(0.0, 1.0), "d": model(2.0, 2.0)}
LIED = {**HONEST, "e": model(100.0, -100.0)}


def found(rule: str, liars: int = 1, length: float = 0.0, start: Weights | None = START) -> list[float]:
    made = Aggregation(rule, liars, length).of(LIED, ALIKE, start)
    assert made["count"].item() == 7
    values: list[float] = made["w"].tolist()
    return values


def test_the_mean_is_anyones() -> None:
    assert found("mean") == pytest.approx([104 / 5, -96 / 5])


def test_the_median_of_every_value() -> None:
    """0 1 1 2 100 and −100 0 1 1 2; of four, the mean of the middle two."""
    assert found("median") == [1.0, 1.0]
    assert Aggregation("median").of(HONEST, ALIKE, START)["w"].tolist() == [1.0, 1.0]
    assert Aggregation("median").of(dict(list(LIED.items())[1:]), ALIKE)["w"].tolist() == pytest.approx([1.5, 1.0])


def test_the_trimmed_mean_of_every_value() -> None:
    """Without the largest and the smallest: (1 + 1 + 2) / 3 and (0 + 1 + 1) / 3; two liars leave the median."""
    assert found("trimmed-mean") == pytest.approx([4 / 3, 2 / 3])
    assert found("trimmed-mean", liars=2) == pytest.approx([1.0, 1.0])
    assert found("trimmed-mean", liars=9) == pytest.approx([1.0, 1.0])  # no more than there can be


def test_krum_takes_the_site_with_the_nearest_neighbours() -> None:
    """Squared distances: a-b 1, a-c 2, a-d 5, b-c 1, b-d 2, c-d 5. Of five with one liar the two nearest count: b has
    1 + 1, a and c have 1 + 2, d has 2 + 5."""
    assert nearest(LIED, 1, 1) == ["b"]
    assert found("krum") == [1.0, 1.0]
    assert nearest(LIED, 1, 4) == ["a", "b", "c", "d"]
    assert found("multi-krum") == pytest.approx([1.0, 1.0])


def test_norm_bounding_shortens_what_is_long() -> None:
    """Lengths 1, √2, 1, √8, 141.4: to 1 each of the last two is shortened; by hand with length = 1."""
    root = 0.5**0.5
    assert found("norm-bounding", length=1.0) == pytest.approx(
        [(1 + root + 0 + root + root) / 5, (0 + root + 1 + root - root) / 5]
    )
    assert found("norm-bounding") == pytest.approx([(1 + 1 + 0 + 1 + 1) / 5, (0 + 1 + 1 + 1 - 1) / 5])  # median √2


def test_centred_clipping_goes_on_from_where_it_came() -> None:
    """Three steps of norm bounding, each around the last: nearer to the honest mean than one."""
    one, three = torch.tensor(found("norm-bounding", length=1.0)), torch.tensor(found("centred-clipping", length=1.0))
    honest = mean(HONEST, ALIKE)["w"]
    assert (three - honest).norm() < (one - honest).norm()
    around = Aggregation("norm-bounding", length=1.0)
    step = around.of(LIED, ALIKE, around.of(LIED, ALIKE, around.of(LIED, ALIKE, START)))
    assert three.tolist() == pytest.approx(step["w"].tolist())


@pytest.mark.parametrize("rule", RULES)
def test_without_liars_all_are_near_the_mean(rule: str) -> None:
    """Five sites about (1, 1), and two sites, of whom nobody can say which one lies: then it is the mean."""
    how = Aggregation(rule, trusted="a" if rule == "fltrust" else "")
    near = {name: model(1.0 + 0.01 * i, 1.0 - 0.01 * i) for i, name in enumerate("abcde")}
    for start in (START, None):
        assert how.of(near, ALIKE, start)["w"].tolist() == pytest.approx([1.02, 0.98], abs=0.03)
    two = {name: near[name] for name in "ab"}
    if rule != "fltrust":  # which is told whom to trust
        assert how.of(two, {"a": 3, "b": 1})["w"].tolist() == pytest.approx([1.0025, 0.9975])


def test_fltrust_weighs_by_the_cosine_with_a_trusted_site_at_its_length() -> None:
    """From (1, 1): a trusted (2, 0), b at a right angle, c half as long at 45°, d ten times as long, e turned round."""
    start, half = model(1.0, 1.0), 0.5**0.5
    moves = {"a": (2.0, 0.0), "b": (0.0, 2.0), "c": (half, half), "d": (20.0, 0.0), "e": (-2.0, 0.0)}
    models = {name: model(1 + x, 1 + y) for name, (x, y) in moves.items()}
    rule = Aggregation("fltrust", trusted="a")
    total = 1 + half + 1  # weights of a, c and d; c at length 2 is (√2, √2)
    want = [1 + (2 + half * 2 * half + 2) / total, 1 + half * 2 * half / total]
    merged = rule.of(models, ALIKE, start)
    assert merged["w"].tolist() == pytest.approx(want)
    assert merged["count"].item() == 7
    away = {name: models[name] for name in "bcde"}
    assert rule.of(away, ALIKE, start).digest == start.digest  # nobody to hold them against
    assert rule.of({**models, "a": start}, ALIKE, start).digest == start.digest


def test_a_study_names_the_rule(federation: Path, tmp_path: Path) -> None:
    plain, named = toy_study(federation), toy_study(federation, study__aggregation="mean")
    assert plain.hash == named.hash
    study = toy_study(federation, study__aggregation={"rule": "trimmed-mean", "liars": 1}, study__rounds=1)
    run = run_in_process(study, tmp_path)
    assert run.summary  # it trains, scores and is read again with its rule
    assert "trimmed-mean" in (run.folder / "study.toml").read_text()


def test_a_trusted_site_must_train(federation: Path, tmp_path: Path) -> None:
    how = {"rule": "fltrust", "trusted": "adda"}
    with pytest.raises(StudyError, match=r"trusted = 'adda': no such site trains; did you mean 'ada'"):
        run_in_process(toy_study(federation, study__aggregation=how), tmp_path)
    study = toy_study(federation, study__aggregation={**how, "trusted": "ada"}, study__rounds=1)
    assert run_in_process(study, tmp_path).summary


def test_scaffold_merges_models_and_control_variates_by_the_rule() -> None:
    """The median of 1 2 900 is 2, and of the variates' changes 0.1 0.2 −90 it is 0.1; three of four sites answer."""
    method = with_aggregation("scaffold", Scaffold(), Aggregation("median"))
    numbers = {"a": (1.0, 0.1), "b": (2.0, 0.2), "liar": (900.0, -90.0)}
    replies = {name: Scaffold.Uplink(model(y), model(change), 0.0, 1) for name, (y, change) in numbers.items()}
    merged = method.merge(Scaffold.Server(model(0.0), model(4.0), 4), replies, Round(0, "train", 0, 1))
    assert merged.global_["w"].tolist() == [2.0]
    assert merged.c["w"].tolist() == pytest.approx([4.0 + 0.1 * 3 / 4])


def test_a_mean_that_no_rule_replaces_is_said() -> None:
    """Else a liar would have what is averaged beside the rule, and nobody would know."""
    with pytest.raises(StudyError, match=r"'ufps' also averages by trust.*uncertainty.*parts = 'none'"):
        with_aggregation("ufps", UFPS(), Aggregation("median"))
    with pytest.raises(StudyError, match=r"'menu-net' also averages encoders.*encoder_shares = 'annotating'"):
        with_aggregation("menu-net", MENUNet(encoder_shares="half"), Aggregation("median"))
    assert with_aggregation("menu-net", MENUNet(), Aggregation("median")).aggregation.rule == "median"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["per-fedavg", "pfedme"])
def test_unweighted_means_have_a_rule_too(name: str, federation: Path) -> None:
    """Sites' models 1 2 900: the median is 2, whatever is done with it afterwards; the mean would be 301."""
    study = toy_study(federation, name, study__aggregation="median")
    kind = type(study.method)
    blank = kind.Uplink(model(0.0), 0.0, 1)
    replies = {site: replace(blank, global_=model(y)) for site, y in (("a", 1.0), ("b", 2.0), ("liar", 900.0))}
    assert study.method.merge(kind.Server(model(0.0)), replies, Round(0, "train", 0, 1)).global_["w"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("how", "method", "words"),
    [
        ("vote", "fedavg", "aggregation = 'vote': it must be one of mean"),
        ({"rule": "krum", "liars": -1}, "fedavg", "aggregation.liars = -1"),
        ({"rule": "norm-bounding", "length": -1.0}, "fedavg", "aggregation.length = -1.0"),
        ("krum", "apple", "'apple' does not: leave it at 'mean'"),
        ("fltrust", "fedavg", "needs a site that is trusted"),
        ({"rule": "median", "trusted": "ada"}, "fedavg", "no other rule has one"),
    ],
)
def test_a_wrong_rule_is_refused(how: object, method: str, words: str, federation: Path) -> None:
    with pytest.raises(StudyError, match=words):
        toy_study(federation, method, study__aggregation=how)


@pytest.mark.parametrize("name", ["fedavg", "ufps", "fedsm-extra", "fedsm-ensemble", "fedcrld"])
def test_updates_are_measured_from_the_servers_model(name: str) -> None:
    """From (5, 5), b comes to (6, 5) and c to (5, 6): while the trusted a is away, the model stays as it was. With a at
    (5, 7) b, at a right angle to it, does not count and c comes to the same place."""
    fields = {"uncertainty": TeacherUncertainty(parts="none")} if name == "ufps" else {}
    method: Any = with_aggregation(name, METHODS[name](**fields), Aggregation("fltrust", trusted="a"))
    start, n = model(5.0, 5.0), dict.fromkeys("abc", 1)
    known: dict[str, Any] = {
        "global_": start, "n": n, "personal": dict.fromkeys("abc", start), "selector": None, "routes": False,
        "selector_state": None, "holders": (), "teachers": {}, "asked": {}, "encoder": (), "labels": {},
    }  # fmt: skip

    def made(kind: Any, values: dict[str, Any]) -> Any:
        return kind(**{field.name: values[field.name] for field in fields_of(kind) if field.name in values})

    def merged(**models: tuple[float, float]) -> list[float]:
        sent = {"teacher": None, "selector": None, "selector_state": None, "holds": False, "loss": 0.0, "steps": 1}
        replies = {
            site: made(method.Uplink, {**sent, "global_": model(*values), "personal": model(*values)})
            for site, values in models.items()
        }
        server = made(method.Server, {**known, "holders": dict.fromkeys("abc", ()) if name == "ufps" else ()})
        values: list[float] = method.merge(server, replies, Round(3, "models", 0, 9)).global_["w"].tolist()
        return values

    assert merged(b=(6.0, 5.0), c=(5.0, 6.0)) == [5.0, 5.0]
    assert merged(a=(5.0, 7.0), b=(6.0, 5.0), c=(5.0, 6.0)) == [5.0, 7.0]
