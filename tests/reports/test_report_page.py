"""The page: one file, nothing fetched, nothing unescaped, the numbers on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from consilium.errors import RunError
from consilium.reports.page import Overlay, write_page
from consilium.reports.reading import RunView, read_run
from consilium.reports.tables import SITE_MEAN, compare

SMALL = {"hk": (3, 0.8, 0.75), "basel": (4, 0.7, 0.72)}
SECTIONS = [
    "Site by site", "How far from pooled training", "Learning curves", "Methods at each site",
    "Local models elsewhere", "What the selector chose", "Examples", "Label by label", "Cost", "The study",
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
    return Overlay(image, {"disc": mask}, {"disc": mask}, "hk", "hk-1", "super", {"disc": 1.0})


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


def test_the_page_fetches_nothing_and_runs_nothing(page: str) -> None:
    assert "http" not in page
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert Page(page).links == []
    assert all((image["src"] or "").startswith("data:image/") for image in Page(page).images)


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
    assert "<script" not in text
    assert "<i>" not in text
    assert "&lt;script&gt;" in text


def test_sections_without_data_are_left_out(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    write_page([read_run(run_folder("fedavg", sites=SMALL))], tmp_path / "p.html")
    headings = Page((tmp_path / "p.html").read_text(encoding="utf-8")).headings
    assert headings == ["Site by site", "Learning curves", "Label by label", "Cost", "The study", "How to read this"]


def test_an_unfinished_run_still_has_a_page(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    write_page([read_run(run_folder("fedavg", sites=SMALL, finished=False))], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "No run is finished yet" in text
    assert Page(text).headings == ["Learning curves", "The study", "How to read this"]


def test_a_run_without_any_score_still_has_a_page(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = run_folder("fedavg", sites=SMALL, finished=False)
    (folder / "scores.csv").unlink()
    write_page([read_run(folder)], tmp_path / "p.html")
    assert "The study" in (tmp_path / "p.html").read_text(encoding="utf-8")


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


def test_bad_targets_are_refused(four: list[RunView], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is a folder"):
        write_page(four, tmp_path)
    with pytest.raises(RunError, match="no run"):
        write_page([], tmp_path / "p.html")
