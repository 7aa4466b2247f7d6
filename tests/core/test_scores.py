"""Scores: numbers small enough to check by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilium.errors import RunError
from consilium.scores.means import summarise, with_label_mean
from consilium.scores.rows import COLUMNS, ScoreRow, bounds_of, read_rows, write_rows
from consilium.scores.statistics import interval, paired
from consilium.scores.summary import joint_best, missed_phases, run_summary
from consilium.scores.views import by_case, matrix, selection


def row(site: str, case: str, value: float, **other: object) -> ScoreRow:
    fields = {"round": 1, "phase": "train", "model": "global", "of": "", "when": "merged", "outside": False}
    fields |= {"split": "test", "label": "disc", "metric": "dice", "site": site, "case": case, "value": value}
    return ScoreRow(**(fields | other))  # type: ignore[arg-type]


def file_with(path: Path, body: str) -> Path:
    path.write_bytes((",".join(COLUMNS) + "\n" + body).encode())
    return path


TWO_SITES = [row("a", "1", 0.5), row("a", "2", 0.7), row("b", "1", 0.9)]


def test_site_mean_weighs_sites_and_pooled_weighs_cases() -> None:
    entry = summarise(TWO_SITES, "test")["global"]["dice"]["disc"]
    assert entry["sites"] == pytest.approx({"a": 0.6, "b": 0.9})
    assert entry["site_mean"] == pytest.approx(0.75)  # (0.6 + 0.9) / 2
    assert entry["pooled"] == pytest.approx(0.7)  # (0.5 + 0.7 + 0.9) / 3
    assert entry["cases"] == {"a": 2, "b": 1}
    assert entry.keys() == {"sites", "site_mean", "pooled", "cases"}


def test_outside_sites_stand_apart() -> None:
    entry = summarise([*TWO_SITES, row("guest", "1", 0.1, outside=True)], "test")["global"]["dice"]["disc"]
    assert entry["outside"] == {"guest": 0.1}
    assert entry["site_mean"] == pytest.approx(0.75)
    assert entry["pooled"] == pytest.approx(0.7)
    assert entry["cases"] == {"a": 2, "b": 1, "guest": 1}


def test_other_splits_do_not_count() -> None:
    assert summarise(TWO_SITES, "valid") == {}
    assert summarise([], "test") == {}


def test_only_outside_cases_give_no_mean() -> None:
    entry = summarise([row("guest", "1", 0.1, outside=True)], "test")["global"]["dice"]["disc"]
    assert entry == {"sites": {}, "outside": {"guest": 0.1}, "cases": {"guest": 1}}


def test_a_personal_model_counts_at_its_own_site() -> None:
    rows = [row(s, "1", v, model="personal", of=o) for o, s, v in [("a", "a", 0.8), ("a", "b", 0.2), ("b", "b", 0.6)]]
    assert summarise(rows, "test")["personal"]["dice"]["disc"]["sites"] == {"a": 0.8, "b": 0.6}
    assert matrix(rows, "personal", "dice", "disc", "test") == {"a": {"a": 0.8, "b": 0.2}, "b": {"b": 0.6}}
    assert by_case(rows, "personal", "dice", "disc", "test") == {"a": {"1": 0.8}, "b": {"1": 0.6}}
    assert by_case(rows, "personal", "dice", "disc", "test", of="a") == {"a": {"1": 0.8}, "b": {"1": 0.2}}


def test_a_case_scored_twice_counts_once_with_its_last_value() -> None:
    rows = [row("a", "1", 0.1), row("a", "1", 0.5, when="trained")]
    assert summarise(rows, "test")["global"]["dice"]["disc"]["sites"] == {"a": 0.5}


def test_the_mean_over_labels_leaves_out_an_empty_truth() -> None:
    rows = [
        row("a", "1", 0.9),
        row("a", "1", 0.7, label="cup"),
        row("a", "2", 0.6),
        row("a", "2", 1.0, label="cup", metric="empty"),
    ]
    added = with_label_mean(rows)[len(rows) :]
    assert [(r.case, r.label, r.metric) for r in added] == [("1", "mean", "dice"), ("2", "mean", "dice")]
    assert [r.value for r in added] == pytest.approx([0.8, 0.6])
    labels = summarise(with_label_mean(rows), "test")["global"]["dice"]
    assert labels["cup"]["empty"] == {"a": 1}
    assert labels["cup"]["cases"] == {"a": 1}
    assert "empty" not in labels["disc"]
    assert labels["mean"]["site_mean"] == pytest.approx(0.7)


def test_the_mean_over_labels_is_added_once() -> None:
    rows = with_label_mean([row("a", "1", 0.9), row("a", "1", 0.7, label="cup")])
    assert with_label_mean(rows) == rows


def test_a_value_that_is_not_finite_is_counted_not_averaged() -> None:
    rows = [row("a", "1", math.inf, metric="hd"), row("a", "2", 4.0, metric="hd"), row("b", "1", math.nan, metric="hd")]
    entry = summarise(rows, "test")["global"]["hd"]["disc"]
    assert entry == {
        "sites": {"a": 4.0},
        "site_mean": 4.0,
        "pooled": 4.0,
        "cases": {"a": 1},
        "undefined": {"a": 1, "b": 1},
    }


def test_means_do_not_depend_on_the_order_of_rows() -> None:
    rows = [row(site, str(i), math.sin(i)) for i in range(100) for site in "ab"]
    assert json.dumps(summarise(rows, "test")) == json.dumps(summarise(rows[::-1], "test"))


@pytest.mark.parametrize("zeros", [True, False])
def test_selection_frequencies(zeros: bool) -> None:
    took = {("a", "1"): "global", ("a", "2"): "personal/a", ("a", "3"): "personal/a", ("b", "1"): "global"}
    rows = [
        row(site, case, float(choice == name), model="super", metric=f"chosen:{name}", label="")
        for (site, case), choice in took.items()
        for name in ("global", "personal/a")
        if zeros or choice == name
    ]
    found = selection(rows, "test")
    assert found["a"] == pytest.approx({"global": 1 / 3, "personal/a": 2 / 3})
    assert found["b"]["global"] == 1.0
    assert selection(rows, "valid") == {}


def test_an_interval_of_equal_values_has_no_width() -> None:
    assert interval({"a": [0.3, 0.3], "b": [0.5]}) == pytest.approx((0.4, 0.4), abs=1e-12)


def test_an_interval_is_known_for_two_values_and_repeats() -> None:
    # a resampled pair has mean 0, 0.5 or 1 with probability 1/4, 1/2, 1/4
    assert interval({"a": [0.0, 1.0]}) == (0.0, 1.0)
    values = {"a": [0.1, 0.4, 0.8, 0.9], "b": [0.2, 0.3]}
    assert interval(values) == interval(dict(reversed(values.items())))
    assert interval(values, draws=50, seed=1) != interval(values, draws=50, seed=2)
    with pytest.raises(ValueError, match="at least one"):
        interval({"a": []})


def test_an_interval_is_as_wide_as_theory_says() -> None:
    values = [i / 400 for i in range(400)]  # standard error of the mean = sqrt(1/12) / 20
    low, high = interval({"a": values})
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(1 / 12) / 20, rel=0.08)


def test_slices_of_a_volume_are_drawn_together() -> None:
    """Ten slices that agree are one patient: the interval is that of two values, not of twenty."""
    slices = {f"v{volume}#{i:03d}": float(volume) for volume in (0, 1) for i in range(10)}
    assert interval({"a": slices}) == interval({"a": [0.0, 1.0]}) == (0.0, 1.0)
    low, high = interval({"a": list(slices.values())})
    assert high - low < 0.5
    found = paired({"a": slices}, {"a": dict.fromkeys(slices, 0.0)})
    assert found is not None
    assert (found.difference, found.low, found.high, found.cases) == (0.5, 0.0, 1.0, 20)
    assert found.p == 1.0  # two volumes, one of them without a gap


def test_a_site_with_one_case_takes_the_spread_of_the_others() -> None:
    low, high = interval({"a": [0.0, 1.0], "b": [0.5]})
    assert (low, high) == pytest.approx((0.25 - math.sqrt(2) / 4, 0.75 + math.sqrt(2) / 4))
    assert interval({"a": [0.2], "b": [0.4]}) == pytest.approx((0.3 - 0.1 * math.sqrt(2), 0.3 + 0.1 * math.sqrt(2)))


def test_an_interval_stays_within_the_range_of_its_score() -> None:
    """The borrowed spread would leave it: an accuracy below 0."""
    cases = {"a": [0.0, 1.0], "b": [0.0], "c": [0.0]}
    assert interval(cases)[0] < 0
    assert interval(cases, within=bounds_of("accuracy")) == (0.0, interval(cases)[1])
    assert bounds_of("hd95") == (0.0, math.inf)
    assert bounds_of("nothing known") == (-math.inf, math.inf)


def test_paired_differences_use_the_common_cases() -> None:
    a = {"a": {"1": 0.6, "2": 0.8}, "b": {"1": 0.9, "only in a": 0.0}, "c": {"1": 0.0}}
    b = {"a": {"1": 0.5, "2": 0.5}, "b": {"1": 0.8, "only in b": 1.0}}
    found = paired(a, b)
    assert found is not None
    assert found.difference == pytest.approx(0.15)  # ((0.1 + 0.3) / 2 + 0.1) / 2
    # site a resampled as 0.1, 0.1 or 0.3, 0.3; b has one case and takes a's spread, (0.2 ± 0.1) times √2
    assert found.low == pytest.approx((0.1 + 0.1 - 0.1 * math.sqrt(2)) / 2)
    assert found.high == pytest.approx((0.3 + 0.1 + 0.1 * math.sqrt(2)) / 2)
    assert found.single == ("b",)
    assert found.p == pytest.approx(0.25)  # three gaps of one sign: 2 / 2**3
    assert found.cases == 3


def test_paired_without_difference_or_without_cases() -> None:
    same = paired({"a": {"1": 0.5}}, {"a": {"1": 0.5}})
    assert same is not None
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    assert paired({"a": {"1": 0.5}}, {"b": {"1": 0.5}}) is None


def test_who_missed_a_phase_after_training_is_named() -> None:
    def told(what: str, phase: str, site: str) -> dict[str, str]:
        return {"event": what, "phase": phase, "site": site}

    start = {"event": "start", "aside": ["teacher", "routing", "calibrate"]}
    events = [
        start,
        told("lost", "teacher", "ada"),  # of many rounds; it answered others
        told("train", "teacher", "ada"),
        told("lost", "train", "cid"),  # rounds of training are counted elsewhere
        told("lost", "routing", "bea"),
        told("away", "calibrate", "bea"),
        told("refused", "calibrate", "cid"),
    ]
    assert missed_phases(events) == "bea took no part in calibrate and routing. cid took no part in calibrate."
    assert missed_phases([start, told("train", "routing", "ada")]) == ""


def test_the_summary_of_a_run() -> None:
    best = [row("a", "1", 0.9), row("a", "1", 0.7, label="cup"), row("a", "1", 0.6, split="valid")]
    best.append(row("a", "1", 0.4, split="valid", label="cup"))
    last = [row("a", "1", 0.8)]
    summary = run_summary(
        "fedavg", 3, 40, "global", "dice", best, last, 36, 40, 71.2, 10, 20, 812, best_rounds={"global": 36}
    )
    assert summary["headline"] == {
        "model": "global",
        "metric": "dice",
        "label": "mean",
        "sites": {"a": pytest.approx(0.8)},
        "site_mean": pytest.approx(0.8),
        "pooled": pytest.approx(0.8),
    }
    assert summary["best"]["valid"]["site_mean"] == pytest.approx(0.5)
    assert summary["best"]["scores"]["global"]["dice"]["disc"]["sites"] == {"a": 0.9}
    assert summary["best"]["round"] == 36
    assert summary["best"]["rounds"] == {"global": 36}
    assert summary["last"] == {"round": 40, "scores": summarise(with_label_mean(last), "test")}
    assert {key: summary[key] for key in ("method", "seed", "rounds", "seconds", "bytes_up", "bytes_down")} == {
        "method": "fedavg",
        "seed": 3,
        "rounds": 40,
        "seconds": 71.2,
        "bytes_up": 10,
        "bytes_down": 20,
    }


def test_the_best_on_test_stands_under_its_own_name() -> None:
    """Site means .5, .75 and .6 in rounds 2, 4 and 6 (the one best on validation): bmcta is round 4's."""

    def right(round: int, site: str, value: float, **other: object) -> ScoreRow:
        fields: dict[str, object] = {"metric": "accuracy", "label": "class", "model": "personal", "of": site}
        return row(site, "1", value, **(fields | {"round": round} | other))

    rows = [right(2, "a", 1.0), right(2, "b", 0.0), right(4, "a", 1.0), right(4, "b", 0.5)]
    rows += [right(6, site, 0.6, phase="best") for site in "ab"]
    rows += [right(1, "a", 1.0, split="valid"), right(1, "b", 1.0, model="global"), right(1, "a", 1.0, of="b")]
    summary = run_summary("apple", 0, 6, "personal", "accuracy", rows[4:6], rows[4:6], 6, 6, 0, 0, 0, 0, all_rows=rows)
    assert summary["bmcta"]["round"] == 4
    assert summary["bmcta"]["site_mean"] == 0.75
    assert summary["bmcta"]["sites"] == {"a": 1.0, "b": 0.5}
    assert summary["headline"]["site_mean"] == pytest.approx(0.6)
    dice = run_summary("apple", 0, 6, "personal", "dice", [], [], 6, 6, 0, 0, 0, 0, all_rows=rows)
    assert "bmcta" not in dice


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("a", "1", math.nan)],
        [row("a", "1", 1.0, metric="empty")],
        [row("guest", "1", 0.4, outside=True)],
        [row("a", "1", math.nan), row("a", "1", 0.5, label="cup")],
    ],
)
def test_a_summary_never_holds_nan(rows: list[ScoreRow]) -> None:
    summary = run_summary("fedavg", 0, 1, "global", "dice", rows, rows, 1, 1, 0.0, 0, 0, 0.0)
    json.dumps(summary, allow_nan=False)
    assert "site_mean" not in summary["headline"]


def test_the_jointly_best_round_is_chosen_on_validation() -> None:
    """Round 2 is best on validation, round 3 on test; of equals the earlier."""
    marks = {1: (0.5, 0.9), 2: (0.7, 0.6), 3: (0.6, 0.95), 4: (0.7, 0.8)}
    rows = [
        row("hk", "1", value, round=round_, split=split)
        for round_, pair in marks.items()
        for split, value in zip(("valid", "test"), pair, strict=True)
    ]
    found = joint_best(rows, "global", "dice")
    assert found is not None
    assert (found["round"], found["valid"]["site_mean"], found["test"]["site_mean"]) == (2, 0.7, 0.6)
    assert joint_best([r for r in rows if r.split == "test"], "global", "dice") is None


def test_the_mean_of_a_single_label_is_the_headline() -> None:
    summary = run_summary("fedavg", 0, 1, "global", "dice", TWO_SITES, [], 1, 1, 0.0, 0, 0, 0.0)
    assert summary["headline"]["label"] == "mean"
    assert summary["headline"]["site_mean"] == pytest.approx(0.75)


NAMES = st.text(st.characters(codec="utf-8"), max_size=6)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            ScoreRow, *[st.integers(0, 999)], *[NAMES] * 5, st.booleans(), *[NAMES] * 4, st.floats(allow_nan=False)
        ),
        max_size=4,
    )
)
def test_rows_come_back_exactly(rows: list[ScoreRow], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = file_with(tmp_path_factory.mktemp("scores") / "scores.csv", write_rows(rows))
    assert read_rows(path) == rows


def test_the_text_of_a_row() -> None:
    assert write_rows([row("a", "1", 0.1)]) == "1,train,global,,merged,a,0,test,1,disc,dice,0.1\n"


def test_a_cut_last_line_is_dropped_wherever_it_is_cut(tmp_path: Path) -> None:
    first, second = write_rows([row("a", "1", 0.5)]), write_rows([row("é\n", 'a "b"', 0.123)])
    whole = (",".join(COLUMNS) + "\n" + first).encode()
    for cut in range(len(second.encode())):
        path = tmp_path / "scores.csv"
        path.write_bytes(whole + second.encode()[:cut])
        assert read_rows(path) == [row("a", "1", 0.5)]
    assert read_rows(file_with(tmp_path / "scores.csv", first + second)) == [
        row("a", "1", 0.5),
        row("é\n", 'a "b"', 0.123),
    ]


def test_an_empty_table(tmp_path: Path) -> None:
    assert read_rows(file_with(tmp_path / "scores.csv", "")) == []
    (tmp_path / "scores.csv").write_text("round,pha")
    assert read_rows(tmp_path / "scores.csv") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x,y\n1,2\n", "not a table of scores"),
        (",".join(COLUMNS) + "\nno,score\n" + write_rows(TWO_SITES), "record 2 is not a score"),
        (",".join(COLUMNS) + "\n1,t,global,,m,a,0,test,1,disc,dice,high\n", "record 2 is not a score"),
    ],
)
def test_a_damaged_table_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "scores.csv").write_text(text)
    with pytest.raises(RunError, match=says):
        read_rows(tmp_path / "scores.csv")


def test_a_missing_table_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read"):
        read_rows(tmp_path / "scores.csv")
