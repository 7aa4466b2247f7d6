"""Which runs a suite is made of, and the study of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilium.errors import StudyError
from consilium.suites import load_suite
from consilium.suites.planning import Planned, SuiteRow, candidates, check, reference, rows, study_of, trials, without
from tests.suites.bench import write_suite

HEAD = 'methods = ["fedavg", "scaffold", "fedsm"]\nseeds = [0, 1]'
REST = """
[grid]
"method.pull" = [0.5, 0.7]
[choose]
"local.lr" = [0.1, 0.01]
"method.selector_lr" = [0.001, 0.002]
[methods.scaffold]
"local.optimizer" = "sgd"
"local.momentum" = 0.0
[methods.scaffold.choose]
"local.lr" = [0.5]
"""


def test_a_key_a_method_does_not_have_is_skipped_for_it(tmp_path: Path, federation: Path) -> None:
    suite = load_suite(write_suite(tmp_path, federation, HEAD, REST))
    assert [row.name for row in rows(suite)] == ["FedAvg", "SCAFFOLD", "FedSM (pull 0.5)", "FedSM (pull 0.7)"]
    fedavg, scaffold, fedsm, _ = rows(suite)
    assert candidates(suite, fedavg) == [{"local.lr": 0.1}, {"local.lr": 0.01}]
    assert candidates(suite, scaffold) == [{"local.lr": 0.5}]  # its own list replaces the common one
    assert len(candidates(suite, fedsm)) == 4
    assert trials(suite, scaffold) == []  # one candidate needs no trial


def test_some_rows_choose_more(tmp_path: Path, federation: Path) -> None:
    """Every partner of FedSM has fields of its own."""
    rest = """
    [grid]
    "method.personal" = ["apfl", "softpull"]
    [choose]
    "local.lr" = [0.1]
    [[choose_where]]
    rows = {"method.personal" = "apfl"}
    "method.personal_fields" = [{mix = 0.25}, {mix = 0.75, adaptive = true}]
    [[choose_where]]
    rows = {"method.personal" = "softpull"}
    "method.pull" = [0.5, 0.7, 0.9]
    """
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedsm"]', rest))
    apfl, softpull = rows(suite)
    assert [c["method.personal_fields"] for c in candidates(suite, apfl)] == [
        {"mix": 0.25},
        {"mix": 0.75, "adaptive": True},
    ]
    assert [c["method.pull"] for c in candidates(suite, softpull)] == [0.5, 0.7, 0.9]
    planned = trials(suite, apfl)[1]
    assert planned.title == "FedSM (personal apfl), seed 0, trying lr 0.1, personal_fields mix 0.75 adaptive true"
    assert study_of(suite, planned).tables()["method"]["personal_fields"] == {"mix": 0.75, "adaptive": True}


EQUAL_STEPS = """
[choose]
"local.lr" = [0.1, 0.01]
together = [{"local.epochs" = 1, "study.rounds" = 4}, {"local.epochs" = 2, "study.rounds" = 2}]
"""
TUNED = """
[methods.fedavg-finetune.choose]
together = [
    {"local.epochs" = 1, "study.rounds" = 3, "method.finetune_epochs" = 1},
    {"local.epochs" = 2, "study.rounds" = 1, "method.finetune_epochs" = 2},
]
"""


def test_settings_may_be_chosen_together(tmp_path: Path, federation: Path) -> None:
    """Epochs are chosen at an equal number of steps: where a round trains longer, there are fewer."""
    head = 'methods = ["fedavg", "fedavg-finetune"]'
    suite = load_suite(write_suite(tmp_path, federation, head, EQUAL_STEPS + TUNED))
    for row, steps in zip(rows(suite), (4, 3), strict=True):
        tried = [study_of(suite, planned) for planned in trials(suite, row)]
        assert [(s.local.lr, s.local.epochs) for s in tried] == [(0.1, 1), (0.1, 2), (0.01, 1), (0.01, 2)]
        adapted = [s.tables()["method"].get("finetune_epochs", 0) for s in tried]
        assert [s.local.epochs * s.plan.rounds + more for s, more in zip(tried, adapted, strict=True)] == [4] * 4
        assert tried[0].plan.rounds == steps


def test_a_list_takes_the_place_of_what_names_the_same_setting(tmp_path: Path, federation: Path) -> None:
    rest = EQUAL_STEPS + '[methods.fedavg.choose]\n"local.epochs" = [3]\n'
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg"]', rest))
    assert candidates(suite, rows(suite)[0]) == [{"local.lr": lr, "local.epochs": 3} for lr in (0.1, 0.01)]


def test_sets_of_other_settings_are_chosen_besides(tmp_path: Path, federation: Path) -> None:
    """A method's own `together` leaves the common one in force, unless they name the same settings."""
    rest = (
        EQUAL_STEPS.replace('"local.lr" = [0.1, 0.01]', "")
        + """
    [methods.fedprox.choose]
    together = [{"method.mu" = 0.1, "local.lr" = 0.1}, {"method.mu" = 0.01, "local.lr" = 0.2}]
    """
    )
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]', rest))
    fedavg, fedprox = (candidates(suite, row) for row in rows(suite))
    assert [one["local.epochs"] for one in fedavg] == [1, 2]
    assert [(one["local.epochs"], one["study.rounds"], one["method.mu"]) for one in fedprox] == [
        (1, 4, 0.1), (1, 4, 0.01), (2, 2, 0.1), (2, 2, 0.01),
    ]  # fmt: skip


def test_what_a_method_does_not_have_takes_nothing_s_place(tmp_path: Path, federation: Path) -> None:
    rest = """
    [grid]
    "local.momentum" = [0.0]
    [choose]
    together = [{"local.lr" = 0.1, "method.mu" = 0.1}, {"local.lr" = 0.2, "method.mu" = 0.2}]
    [[choose_where]]
    rows = {"local.momentum" = 0.0}
    "method.mu" = [0.3]
    """
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]', rest))
    fedavg, fedprox = (candidates(suite, row) for row in rows(suite))
    assert fedavg == [{"local.lr": 0.1}, {"local.lr": 0.2}]
    assert fedprox == [{"method.mu": 0.3}]


def test_what_goes_together_is_not_fixed_in_part(tmp_path: Path, federation: Path) -> None:
    rest = EQUAL_STEPS + '[methods.fedavg]\n"study.rounds" = 3\n'
    with pytest.raises(StudyError, match=r"\[methods.fedavg\] fixes 'study.rounds', which is chosen `together`"):
        check(load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg"]', rest)))


def test_what_a_method_fixes_is_neither_chosen_nor_varied(tmp_path: Path, federation: Path) -> None:
    rest = REST + '[methods.fedsm]\n"method.pull" = 0.9\n"local.lr" = 0.3\n"method.selector_lr" = 0.1\n'
    suite = load_suite(write_suite(tmp_path, federation, HEAD, rest))
    fedsm = rows(suite)[-1]
    assert (fedsm, candidates(suite, fedsm)) == (SuiteRow("fedsm", {}), [{}])
    study = study_of(suite, Planned(fedsm, {}, 1))
    assert study.tables()["method"]["pull"] == 0.9
    assert (study.local.lr, study.plan.seed, study.name) == (0.3, 1, "toy-fedsm")


def test_rows_written_out_stand_in_every_column_and_choose_for_themselves(tmp_path: Path, federation: Path) -> None:
    rest = """
    [grid]
    "study.leave_out" = [["ada"], ["bea"]]
    [[row]]
    name = "free"
    method = "fedsm"
    "method.pull" = 1.0
    [[row]]
    name = "pulled"
    method = "fedsm"
    choose = {"method.pull" = [0.5, 0.7]}
    """
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg", "fedsm"]', rest))
    found = rows(suite)
    assert [row.name for row in found][2:] == [
        "free (leave_out ada)", "free (leave_out bea)", "pulled (leave_out ada)", "pulled (leave_out bea)",
    ]  # fmt: skip
    assert without(found[-1], "study.leave_out").name == "pulled"
    assert candidates(suite, found[2]) == [{}]
    assert candidates(suite, found[-1]) == [{"method.pull": 0.5}, {"method.pull": 0.7}]


def test_rows_may_be_written_out(tmp_path: Path, federation: Path) -> None:
    """A method without any has one row; what a row says goes before what is fixed for its method."""
    rest = """
    [methods.fedsm]
    "method.pull" = 0.9
    [[row]]
    name = "plain"
    method = "fedsm"
    [[row]]
    name = "slow and pulled"
    method = "fedsm"
    "method.pull" = 0.5
    "local.lr" = 0.001
    """
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg", "fedsm"]', rest))
    assert [row.name for row in rows(suite)] == ["FedAvg", "plain", "slow and pulled"]
    plain, slow = (study_of(suite, Planned(row, {}, 0)) for row in rows(suite)[1:])
    assert [study.tables()["method"]["pull"] for study in (plain, slow)] == [0.9, 0.5]
    assert (plain.local.lr, slow.local.lr) == (0.01, 0.001)
    assert Planned(rows(suite)[2], {}, 0).title == "slow and pulled, seed 0"


def test_the_study_of_a_run(tmp_path: Path, federation: Path) -> None:
    suite = load_suite(write_suite(tmp_path, federation, HEAD, REST))
    study = study_of(suite, Planned(rows(suite)[1], {"local.lr": 0.5}, 7))
    assert (study.method_name, study.plan.seed, study.plan.rounds) == ("scaffold", 7, 2)
    assert (study.local.optimizer, study.local.momentum, study.local.lr) == ("sgd", 0.0, 0.5)


def test_the_base_method_counts_for_the_method_it_names(tmp_path: Path, federation: Path) -> None:
    rest = '[base.method]\nname = "fedprox"\nmu = 0.5\n'
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]', rest))
    fedavg, fedprox = (study_of(suite, Planned(row, {}, 0)) for row in rows(suite))
    assert fedavg.method_name == "fedavg"
    assert fedprox.tables()["method"]["mu"] == 0.5


def test_settings_reach_the_tables_of_a_module(tmp_path: Path, organs: Path) -> None:
    """Quoted, dotted, or as version 0.1 called them; a method without the table is left alone."""
    rest = """
[base.method]
name = "ufps"
[base.method.sharpness]
eta = 0.5
[methods.ufps]
method.sharpness.rho = 0.2
[methods.fedavg-pl]
"method.teacher_rounds" = 7
[grid]
"method.sharpness.strategy" = ["usam", "none"]
"""
    suite = load_suite(write_suite(tmp_path, organs, 'methods = ["fedavg-pl", "ufps"]', rest))
    studies = [study_of(suite, Planned(row, {}, 0)) for row in rows(suite)]
    assert [row.name for row in rows(suite)] == [
        "FedAvg*", "UFPS (sharpness.strategy usam)", "UFPS (sharpness.strategy none)",
    ]  # fmt: skip
    methods: list[Any] = [study.method for study in studies]
    assert methods[0].teachers.rounds == 7
    assert [(m.sharpness.strategy, m.sharpness.rho, m.sharpness.eta) for m in methods[1:]] == [
        ("usam", 0.2, 0.5), ("none", 0.2, 0.5),
    ]  # fmt: skip
    wrong = write_suite(tmp_path, organs, 'methods = ["ufps"]', '[grid]\n"method.sharpness.roh" = [0.1]')
    with pytest.raises(StudyError, match=r"\[method.sharpness\] has no key 'roh'; did you mean 'rho'"):
        load_suite(wrong)


def test_suites_with_the_same_base_share_runs(tmp_path: Path, federation: Path) -> None:
    one = load_suite(write_suite(tmp_path / "a", federation, 'methods = ["fedsm"]', '[grid]\n"method.pull" = [0.7]'))
    two = load_suite(write_suite(tmp_path / "b", federation, HEAD.replace("seeds", 'reference = "fedavg"\nseeds')))
    studies = [study_of(one, Planned(rows(one)[0], {}, 0)), study_of(two, Planned(rows(two)[2], {}, 0))]
    assert studies[0].hash == studies[1].hash


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("", "FedAvg"),
        ('reference = "scaffold"', "SCAFFOLD"),
        ('reference = "fedsm"', "FedSM (pull 0.5)"),
        ('reference = {method = "fedsm", "method.pull" = 0.7}', "FedSM (pull 0.7)"),
    ],
)
def test_the_reference_row(tmp_path: Path, federation: Path, said: str, name: str) -> None:
    assert reference(load_suite(write_suite(tmp_path, federation, f"{HEAD}\n{said}", REST))).name == name


@pytest.mark.parametrize(
    ("head", "rest", "sentence"),
    [
        ('reference = "local"', "", "there is no such row; the rows are FedAvg, SCAFFOLD"),
        ("reference = 3", "", r"\[suite\] reference: write a method, or"),
        ('labels = ["blub"]', "", r"\[suite\] labels: the federation has no label 'blub'; did you mean 'blob'\?"),
        ("", '[choose]\n"task.widhts" = [[4, 8]]', r"\[task\] has no key 'widhts'; did you mean 'widths'\?"),
        ("", '[choose]\n"local.lr" = [0.1, -1.0]', r"\[local\] lr = -1.0: it must be positive"),
        ("", '[grid]\n"method.pull" = [2.0]', r"\[method\] pull = 2.0: λ must be in \(0, 1\]"),
    ],
)
def test_every_study_is_checked_before_any_is_run(
    tmp_path: Path, federation: Path, head: str, rest: str, sentence: str
) -> None:
    suite = load_suite(write_suite(tmp_path, federation, f"{HEAD}\n{head}", rest))
    with pytest.raises(StudyError, match=sentence):
        check(suite)


@pytest.mark.parametrize(
    ("heading", "settings", "said"),
    [
        ("last_rounds = 3", '"study.test_rounds" = 2', "last 3 rounds; write 3"),
        ("last_rounds = 3", '"study.test_rounds" = 6\n"study.score_every" = 3', "last 7 rounds; write 7"),
        ("last_rounds = 3", '"study.test_rounds" = 7\n"study.score_every" = 3', ""),
        ("oscillation = true", '"study.test_rounds" = 9', "oscillation needs test scores of all rounds"),
        ("oscillation = true", '"study.test_rounds" = 0', ""),
    ],
)
def test_tables_of_late_rounds_need_their_test_scores(
    heading: str, settings: str, said: str, tmp_path: Path, federation: Path
) -> None:
    every = settings if "score_every" in settings else f'{settings}\n"study.score_every" = 1'
    path = write_suite(tmp_path, federation, f'methods = ["fedavg"]\n{heading}', f"[methods.fedavg]\n{every}")
    if not said:
        check(load_suite(path))
        return
    with pytest.raises(StudyError, match=said):
        check(load_suite(path))
