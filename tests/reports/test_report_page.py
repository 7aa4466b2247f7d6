"""The page: one file, nothing fetched, nothing unescaped, the numbers on it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from consilium.errors import RunError
from consilium.reports.case_counts import case_grid
from consilium.reports.comparing import compare
from consilium.reports.drawings import Overlay
from consilium.reports.page import write_page
from consilium.reports.reading import RunView, read_run
from consilium.reports.rendering import shared_text, unplaced, with_contents
from consilium.reports.style import label_colour
from consilium.reports.tables import SITE_MEAN

SMALL = {"hk": (3, 0.8, 0.75), "basel": (4, 0.7, 0.72)}
SECTIONS = [
    "Site by site", "Distance from pooled training", "Learning curves", "Paired differences", "Methods at each site",
    "Local models at other sites", "What the selector chose", "Examples", "Label by label", "Cost", "The study",
    "How to read this",
]  # fmt: skip


class Page(HTMLParser):
    """Heads, images and the balance of tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attrs))
        self.links += [value or "" for key, value in attrs if key in ("src", "href") and tag != "img"]
        if tag not in ("img", "meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def overlay() -> Overlay:
    mask = np.zeros((16, 16), bool)
    mask[4:12, 4:12] = True
    image = np.random.default_rng(0).random((16, 16, 3))
    return Overlay(image, {"disc": mask}, {"disc": mask}, "hk", "hk-1", "super", {"disc": 1.0}, "worst")


@pytest.fixture(scope="module")
def page(four: list[RunView], tmp_path_factory: pytest.TempPathFactory) -> str:
    to = tmp_path_factory.mktemp("page") / "new" / "report.html"
    write_page(four, to, [overlay()])
    assert [path.name for path in to.parent.iterdir()] == ["report.html"]
    return to.read_text(encoding="utf-8")


def test_all_sections_are_there_in_order(page: str) -> None:
    parsed = Page(page)
    assert parsed.headings == SECTIONS
    assert parsed.open == []


def test_the_page_fetches_nothing_and_runs_its_own_script_alone(page: str) -> None:
    assert "http:" not in page and "https:" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert all(link.startswith(("#", "data:text/")) for link in Page(page).links)
    assert all((image["src"] or "").startswith("data:image/") for image in Page(page).images)
    script = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert script == [shared_text("page.js")]
    seal = b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{seal}'" in page


def test_the_contents_lead_to_every_section(page: str) -> None:
    places = [link.removeprefix("#") for link in Page(page).links if link.startswith("#")]
    assert places == re.findall(r'<h2 id="(.*?)">', page)
    assert len(places) == len(set(places)) == len(SECTIONS)


def test_headings_of_the_same_name_have_places_of_their_own() -> None:
    told = with_contents("<!-- contents --><h2>A b</h2><h2>a B</h2><h2>&lt;c&gt;</h2><h2>…</h2>")
    assert re.findall(r'id="(.*?)"', told) == ["a-b", "a-b-1", "c", "part"]
    assert '<li><a href="#c">&lt;c&gt;</a></li>' in told
    assert with_contents("<!-- contents --><h2>A</h2>") == '<h2 id="a">A</h2>'  # one part needs no list


def test_tables_can_be_saved_for_spreadsheets_and_papers(page: str, four: list[RunView]) -> None:
    files = dict(re.findall(r'<a download="([^"]+)" href="data:text/[a-z-]+;base64,([^"]+)"', page))
    assert {"scores.csv", "scores.tex", "differences.tex", "cost.csv", "labels-dice.csv"} <= files.keys()
    rows = list(csv.reader(io.StringIO(b64decode(files["scores.csv"]).decode())))
    assert rows == [[cell.text for cell in row] for row in compare(four).grid()]
    assert b64decode(files["scores.tex"]).decode().startswith("\\begin{tabular}{l")


@pytest.mark.usefixtures("undrawn")
def test_no_folder_of_this_machine_is_on_the_page(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    text = (folder / "study.toml").read_text()
    (folder / "study.toml").write_text(text.replace("data/retina", f"{tmp_path}/secret/eyes"))
    with (folder / "journal.jsonl").open("a") as file:
        why = f"cannot read {tmp_path}/secret/eyes/hk/a.png: no such file"
        file.write(json.dumps({"event": "refused", "round": 3, "phase": "train", "why": why, "site": "hk"}) + "\n")
    write_page([read_run(folder)], tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page and "secret" not in page
    assert "…/eyes" in page and "cannot read …/a.png: no such file" in page


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/ada/data/retina", "…/retina"),
        ("site 'hk' at '/srv/x/y.csv', line 3", "site 'hk' at '…/y.csv', line 3"),
        (r"C:\Users\ada\mine.py:Net", "…/mine.py:Net"),
        ("data/retina", "data/retina"),
        ("0.3 MB/s and 2/3 of 1/2", "0.3 MB/s and 2/3 of 1/2"),
    ],
)
def test_paths_lose_their_folders(text: str, left: str) -> None:
    assert unplaced(text) == left


@pytest.mark.usefixtures("undrawn")
def test_the_number_of_cases_stands_beside_every_site(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    origin = json.loads((folder / "origin.json").read_text())
    origin["sites"] = {
        name: {"n": n, "cases": n + 5, "scored": {"valid": 2, "test": 3}} for name, n in (("hk", 7), ("basel", 4))
    }
    (folder / "origin.json").write_text(json.dumps(origin))
    grid = [[cell.text for cell in row] for row in case_grid([read_run(folder)])]
    assert grid[1:] == [
        ["basel", "4", "2", "3", "9"],
        ["hk", "7", "2", "3", "12"],
        ["all sites", "11", "4", "6", "21"],
    ]
    write_page([read_run(folder)], tmp_path / "p.html")
    assert "Cases" in Page((tmp_path / "p.html").read_text(encoding="utf-8")).headings


def counted(folder: Path, slices: str, **sites: int) -> RunView:
    """A run whose sites have these training cases, or slices of them."""
    facts = {name: {"n": n, "cases": 8, "scored": {"valid": 2, "test": 3}} for name, n in sites.items()}
    run = read_run(folder)
    return replace(run, origin={"sites": facts}, study={**run.study, "preprocess": {"slices": slices}})


def test_slices_are_not_counted_as_volumes(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    sliced = counted(folder, "axial", hk=70, basel=40)
    assert [[cell.text for cell in row] for row in case_grid([sliced])] == [
        ["site", "training slices", "validation volumes", "test volumes", "volumes in all"],
        ["basel", "40", "2", "3", "8"],
        ["hk", "70", "2", "3", "8"],
        ["all sites", "110", "4", "6", "16"],
    ]
    both = case_grid([sliced, counted(folder, "", ulm=3)])
    assert [[cell.text for cell in row] for row in both] == [  # no sum of slices and cases
        ["site", "training", "validation", "test", "in all"],
        ["basel", "40 slices", "2", "3", "8"],
        ["hk", "70 slices", "2", "3", "8"],
        ["ulm", "3", "2", "3", "8"],
    ]


def test_examples_stand_by_site_with_a_colour_for_every_label(page: str) -> None:
    assert "<h3>hk</h3>" in page
    assert "Worst: hk-1, super model; Dice disc 1.000" in page
    assert f'style="color: {label_colour(0)}">━ disc</span>' in page


def test_every_image_has_words(page: str) -> None:
    assert len(Page(page).images) == 7
    assert all(len(image["alt"] or "") > 20 for image in Page(page).images)


def test_the_numbers_are_on_the_page(page: str, four: list[RunView]) -> None:
    table = compare(four)
    for line in table.lines:
        for cell in line.cells.values():
            assert cell.text() in page
    fedsm = table.lines[-1].cells[SITE_MEAN].value
    lead = re.search(r'class="lead">(.*?)</p>', page, re.S)
    assert lead is not None
    assert lead[1].startswith(f"Over two sites, FedSM reaches a test Dice of {fedsm:.3f} (95 % interval ")
    assert "above FedAvg" in lead[1]
    assert "versions.torch" in page
    assert "local.optimizer" in page


def test_the_page_is_the_same_every_time(four: list[RunView], page: str, tmp_path: Path) -> None:
    write_page(four, tmp_path / "again.html", [overlay()])
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_names_are_escaped(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>"
    runs = [
        read_run(run_folder(method, sites={evil.replace("/", "-"): (3, 0.8, 0.8)})) for method in ("fedavg", "fedsm")
    ]
    write_page(runs, tmp_path / "p.html", title=f"<i>{evil}")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert re.findall(r"<script>(.*?)</script>", text, re.S) == [shared_text("page.js")]
    assert text.count("<script") == 1
    assert "<i>" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.usefixtures("undrawn")
def test_sections_without_data_are_left_out(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    write_page([read_run(run_folder("fedavg", sites=SMALL))], tmp_path / "p.html")
    headings = Page((tmp_path / "p.html").read_text(encoding="utf-8")).headings
    assert headings == ["Site by site", "Learning curves", "Label by label", "Cost", "The study", "How to read this"]


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_run_still_has_a_page(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    write_page([read_run(run_folder("fedavg", sites=SMALL, finished=False))], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "No run is finished yet" in text
    assert Page(text).headings == ["Learning curves", "The study", "How to read this"]


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_any_score_still_has_a_page(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = run_folder("fedavg", sites=SMALL, finished=False)
    (folder / "scores.csv").unlink()
    write_page([read_run(folder)], tmp_path / "p.html")
    assert "The study" in (tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_seeds_missed_rounds_and_empty_truths_are_told(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    folders = [run_folder("fedavg", sites=SMALL, seed=seed) for seed in (0, 1)]
    with (folders[0] / "journal.jsonl").open("a") as file:
        file.write('{"event": "refused", "round": 3, "phase": "train", "why": "it is not finite", "site": "basel"}\n')
        file.write('{"event": "lost", "round": 4, "site": "hk"}\n')
    summary = json.loads((folders[0] / "summary.json").read_text())
    summary["best"]["scores"]["global"]["dice"]["cup"]["empty"] = {"hk": 2}
    summary["hidden"] = {"basel": ["cup"], "hk": ["cup", "disc"]}
    (folders[0] / "summary.json").write_text(json.dumps(summary))
    write_page([read_run(folder) for folder in folders], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "over 2 seeds" in text
    assert "<td>basel</td><td>refused</td><td>1</td>" in text
    assert "<td>hk</td><td>lost</td><td>1</td>" in text
    assert "Left out because the truth is empty: 2 of cup at hk." in text
    assert "though the site does not annotate it: cup at basel; cup, disc at hk." in text


@pytest.mark.usefixtures("undrawn")
def test_bad_targets_are_refused(four: list[RunView], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is a folder"):
        write_page(four, tmp_path)
    with pytest.raises(RunError, match="no run"):
        write_page([], tmp_path / "p.html")
