"""Label by label at every site: the layout of UFPS's tables S2 and S3, with the summary's own numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.reports.comparing import compare
from consilium.reports.labels import CLEAN, site_tables
from consilium.reports.page import write_page
from consilium.reports.reading import RunView
from consilium.reports.tables import markdown_table


def test_a_table_per_site_and_one_of_means(four: list[RunView]) -> None:
    tables = site_tables(compare(four))
    assert list(tables) == ["basel", "hk", "site mean"]
    hk = tables["hk"]
    assert hk.columns == ("disc", "cup", "mean")
    assert [name for name, _ in hk.lines] == ["Pooled", "Local", "FedAvg", "FedSM: its global model", "FedSM"]
    assert four[2].summary is not None
    told = four[2].summary["best"]["scores"]["global"]["dice"]
    fedavg = dict(hk.lines)["FedAvg"]
    assert [cell.value for cell in fedavg if cell] == [told[label]["sites"]["hk"] for label in ("disc", "cup", "mean")]
    means = dict(tables["site mean"].lines)["FedAvg"]
    assert means[0] is not None and means[0].value == pytest.approx(told["disc"]["site_mean"])


def test_the_best_federated_method_of_every_column_is_bold(four: list[RunView]) -> None:
    hk = site_tables(compare(four))["hk"]
    by = dict(hk.lines)
    for k, leaders in enumerate(hk.leaders):
        values = {name: by[name][k] for name in ("FedAvg", "FedSM")}
        best = max(values, key=lambda name: values[name].value if values[name] else 0.0)  # type: ignore[union-attr]
        assert leaders == {best}
    text = markdown_table(hk.grid())
    assert text.startswith("| method | disc | cup | mean |")
    assert "**" in text


def cleaned(run: RunView) -> RunView:
    """The run as if its masks had been cleaned up too, each score a little better."""
    assert run.summary is not None
    summary = json.loads(json.dumps(run.summary))
    for scores in summary["best"]["scores"].values():
        if "dice" in scores:
            scores["clean_dice"] = {
                label: {**entry, "sites": {site: value + 0.01 for site, value in entry["sites"].items()}}
                for label, entry in scores["dice"].items()
            }
    return replace(run, summary=summary)


def test_the_mean_after_clean_up_stands_beside(four: list[RunView]) -> None:
    hk = site_tables(compare([cleaned(run) for run in four]))["hk"]
    assert hk.columns[-1] == CLEAN
    _, found = hk.lines[2]
    assert found[-1] and found[-2] and found[-1].value == pytest.approx(found[-2].value + 0.01)


@pytest.mark.usefixtures("undrawn")
def test_the_page_has_them(four: list[RunView], tmp_path: Path) -> None:
    write_page(four, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h3>Site by site</h3>" in page
    assert "Test Dice, hk, at the round best on validation" in page


def test_compare_prints_them_when_asked(four: list[RunView]) -> None:
    runs = [str(run.folder) for run in four]
    plain = CliRunner().invoke(app, ["compare", *runs])
    asked = CliRunner().invoke(app, ["compare", *runs, "--labels"])
    assert "Test Dice, hk" not in plain.output
    assert "Test Dice, hk" in asked.output and "Test Dice, mean over sites" in asked.output
    told = json.loads(CliRunner().invoke(app, ["compare", *runs, "--labels", "--json"]).output)
    assert set(told["labels"]["hk"]["FedSM"]) == {"disc", "cup", "mean"}
    assert "labels" not in json.loads(CliRunner().invoke(app, ["compare", *runs, "--json"]).output)
