"""Figures: drawn without global state, with what the data say."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import numpy as np
import pytest

from consilium.reports import curves, figures, style
from consilium.reports.figures import Cost, Dot
from consilium.reports.reading import Curve

CURVES = {
    "FedAvg": Curve((5, 10, 15), (0.5, 0.7, 0.6), {"hk": (0.5, 0.8, 0.7), "basel": (0.5, 0.6, math.nan)}),
    "FedSM": Curve((5, 10), (0.6, 0.8), {"hk": (0.6, 0.8)}),
}
TINTS = style.colours(["FedAvg", "FedSM"])


def texts(figure: figures.Figure) -> list[str]:  # type: ignore[name-defined]
    from matplotlib.text import Text

    return [found.get_text() for found in figure.findobj(Text)]


def test_best_so_far() -> None:
    assert curves.best_so_far([0.5, 0.7, 0.6]).tolist() == [0.5, 0.7, 0.7]
    assert curves.best_so_far([3.0, math.nan, 4.0], lower=True).tolist() == [3.0, 3.0, 3.0]


def test_learning_curves_name_methods_and_sites() -> None:
    figure = curves.learning_curves(CURVES, TINTS, 0.9, {"hk": 0.9}, "Dice")
    assert {"FedAvg", "FedSM", "Pooled, best", "hk", "basel", "round", "validation Dice"} <= set(texts(figure))


def test_a_curve_on_another_is_dashed_so_that_both_are_seen() -> None:
    """FedSM's own global model is FedAvg's where both keep their optimisers' state."""
    twins = {"FedAvg": CURVES["FedSM"], "FedSM: its global model": CURVES["FedSM"]}
    figure = curves.learning_curves(twins, dict.fromkeys(twins, "#000000"))
    lines = [line.get_linestyle() for line in figure.subfigs[0].axes[0].get_lines() if line.get_linewidth() == 1.6]
    assert lines == ["-", "--"]


def test_long_names_beside_curves_leave_room_for_the_sites() -> None:
    long = "FedAvg (rounds 400, score_every 1, away {'rimone': [2, 3, 9]})"
    figure = curves.learning_curves({long: CURVES["FedSM"]}, {long: "#000000"})  # a warning of the layout is an error
    assert textwrap.fill(long, 24) in texts(figure)


def test_a_matrix_shows_its_numbers_and_a_dash() -> None:
    figure = figures.heat({"hk": {"hk": 0.9, "basel": 0.25}, "basel": {"basel": 0.8}}, ["hk", "basel"], [("hk", "hk")])
    assert {"0.900", "0.250", "0.800", "–"} <= set(texts(figure))


def test_equal_numbers_can_be_shaded() -> None:
    for row, shown in (({"x": 0.5}, "0.500"), ({}, "–")):
        figure = figures.heat({"a": row}, ["x"])
        assert shown in texts(figure)
        assert ElementTree.fromstring(style.to_bytes(figure)).tag.endswith("svg")


def test_selection_bars_fill_the_width() -> None:
    figure = figures.selection_bars({"hk": {"global": 0.25, "personal/hk": 0.5, "personal/basel": 0.25}})
    bars = figure.axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(1.0)
    assert {"50 %", "basel 25 %", "25 %"} <= set(texts(figure))


def test_the_gap_chart_writes_values_beside_dots() -> None:
    dots = [Dot("FedSM", 0.891, 0.88, 0.9, TINTS["FedSM"]), Dot("FedAvg", 0.871, None, None, TINTS["FedAvg"], True)]
    assert {"0.891", "0.871", "FedSM", "FedAvg"} <= set(texts(figures.gap(dots, "Dice", 0.89)))


def test_cost_bars_have_units() -> None:
    figure = figures.cost_bars([Cost("FedSM", 1234.5, 0.0, 1.25, 812)], TINTS)
    found = set(texts(figure))
    assert {"sent by sites, MB", "time, min", "peak memory, MB", "1,234", "0", "812"} <= found


def test_dice_by_hand() -> None:
    truth, prediction = np.array([[1, 1, 0]], bool), np.array([[0, 1, 0]], bool)
    assert figures.dice(truth, prediction) == pytest.approx(2 / 3)
    assert figures.dice(truth & False, prediction & False) == 1.0


def test_labels_keep_their_colour_and_neighbours_differ() -> None:
    colours = [style.label_colour(i) for i in range(12)]
    assert len(set(colours[:9])) == 9
    assert all(a != b for a, b in itertools.pairwise(colours))


def test_the_same_figure_gives_the_same_bytes() -> None:
    first, second = (style.to_bytes(curves.learning_curves(CURVES, TINTS)) for _ in range(2))
    assert first == second
    ElementTree.fromstring(first)


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    style.to_bytes(figures.gap([Dot("a", 0.5, None, None, "#000000")], "Dice"))
    assert dict(matplotlib.rcParams) == before


def test_reports_load_neither_torch_nor_matplotlib_until_needed() -> None:
    code = (
        "import sys, consilium.scores.summary, consilium.reports.page, consilium.reports.tables; "
        "print({'torch', 'matplotlib', 'scipy.stats', 'jinja2'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_long_names_leave_room_for_a_matrix() -> None:
    """Matplotlib gives a figure up, with a warning, where names take all of it."""
    name = "FedSM (rounds 2, augment ['flip0', 'flip1', 'flip2', 'rotate', 'brightness'], lr 0.001)"
    figure = figures.heat({name: {"hk": 0.5, "basel": 0.6}, "FedAvg": {"hk": 0.4, "basel": 0.5}}, ["hk", "basel"])
    (axes,) = figure.axes
    assert axes.get_position().width > 0.4
    assert "\n" in axes.get_yticklabels()[0].get_text()
