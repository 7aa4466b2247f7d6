"""The page shows what `consilium analyse` left in the run folders."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from consilium.errors import RunError
from consilium.reports.page import write_page
from consilium.reports.reading import read_run

pytestmark = pytest.mark.usefixtures("undrawn")  # the figures here are made up

SMALL = {"hk": (3, 0.8, 0.75), "basel": (4, 0.7, 0.72)}
SVG = '<svg height="72pt" width="144pt" xmlns="http://www.w3.org/2000/svg"><rect/></svg>'


def left(run: Path, kind: str, title: str, caption: str, figure: str = SVG, table: str = "") -> Path:
    """Files as analyse writes them."""
    folder = run / "analysis"
    folder.mkdir(exist_ok=True)
    (folder / f"{kind}.svg").write_text(figure)
    (folder / f"{kind}.png").write_bytes(b"png of it")
    if table:
        (folder / f"{kind}.md").write_text(table)
    file = folder / f"{kind}.json"
    file.write_text(json.dumps({"analysis": kind, "title": title, "caption": caption, "figures": [f"{kind}.svg"]}))
    return file


def test_figures_captions_and_tables_are_on_the_page(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    fedsm, fedavg = run_folder("fedsm", sites=SMALL), run_folder("fedavg", sites=SMALL)
    left(fedsm, "gamma", "How sure", "test 0.8 at γ = 0")
    for run in (fedsm, fedavg):  # the same federation, so once on the page
        photo = SVG.replace("<rect/>", "<image/>")
        left(run, "gallery", "What the sites hold", "hk 12", photo, "| site | train |\n|---|---:|\n| hk | 12 (90) |\n")
    write_page([read_run(fedavg), read_run(fedsm)], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    section = text.split("A closer look</h2>")[1].split("</section>")[0]
    assert section.index("<h3>What the sites hold</h3>") < section.index("<h3>How sure: FedSM</h3>")
    assert section.count("What the sites hold") == 1
    assert '<th scope="row">hk</th><td>12 (90)</td>' in section
    assert '<p class="note">test 0.8 at γ = 0</p>' in section
    drawing = base64.b64encode(SVG.encode()).decode()
    assert f'src="data:image/svg+xml;base64,{drawing}" alt="test 0.8 at γ = 0" width="192"' in section
    assert f"data:image/png;base64,{base64.b64encode(b'png of it').decode()}" in section


@pytest.mark.parametrize("damage", ["not json", '{"title": "x"}', '{"analysis": "gamma", "figures": 3}'])
def test_a_damaged_analysis_is_a_sentence(run_folder: Callable[..., Path], tmp_path: Path, damage: str) -> None:
    run = run_folder("fedsm", sites=SMALL)
    left(run, "gamma", "t", "c").write_text(damage)
    with pytest.raises(RunError, match=r"gamma.json is not a file of `consilium analyse` .*; make it again"):
        write_page([read_run(run)], tmp_path / "p.html")


def test_rounds_of_every_model_and_the_jointly_best(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    run = run_folder("fedsm", sites=SMALL)
    summary = json.loads((run / "summary.json").read_text())
    summary["best"]["rounds"] = {"global:pooled": 8, "personal/hk": 4, "super:routed": 12}
    summary["joint"] = {"round": 20, "valid": {"site_mean": 0.5}, "test": {"site_mean": 0.6125}}
    (run / "summary.json").write_text(json.dumps(summary))
    write_page([read_run(run)], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "global model 8, hk 4, selector 12</td>" in text
    assert "<td>20</td><td>0.6125</td>" in text
