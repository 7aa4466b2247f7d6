"""The page in a real browser: Debian's Chromium, headless."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from consilium.errors import DataError
from consilium.reports.embedding import EmbeddedImage
from consilium.reports.rendering import write_html
from consilium.reports.tables import TextCell
from consilium.watching import server
from tests.watching.journals import START, ended, scored, trained, write_run
from tests.watching.test_server import Pictured, serving

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --virtual-time-budget=8000"""
EMPTY = {"title": "t", "lead": "l", "warning": "", "grids": [], "strip": None, "class_grids": [], "worst": []}  # a page


def rendered(url: str, profile: Path, *flags: str) -> str:
    """The page's elements after its script has run."""
    browser = shutil.which("chromium")
    assert browser, "these tests need Debian's chromium: apt-get install chromium"
    command = [browser, *FLAGS.split(), *flags, f"--user-data-dir={profile}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stdout


def test_the_page_shows_rounds_curves_sites_and_rejections(tmp_path: Path) -> None:
    with serving(Pictured(write_run(tmp_path / "retina-run"))) as server:
        page = rendered(server.url, tmp_path / "profile")
    assert "<title>2/10 retina-run</title>" in page
    assert "2 of 10" in page
    assert page.count("<polyline") == 6  # two sites and their mean: scores and losses
    assert "Dice of the global model on validation cases." in page
    assert "rejected: its update is not finite" in page
    assert "ada, by the global model" in page
    assert 'src="examples/0' in page
    assert "━ disc</span>" in page
    assert '<span id="lost" role="status"></span>' in page  # every question was answered


POINTED = """
<script>
setTimeout(() => {
  const point = (where) => document.querySelector(where).dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
  const curves = (box) => [...document.querySelectorAll(`#${box} polyline[data-site]:not(.aside)`)];
  const alone = (box) => curves(box).map((curve) => curve.dataset.site);
  point("#curve button[data-site='site-39']");
  const named = alone("curve"), same = alone("losses");
  document.querySelector("#curve").dispatchEvent(new MouseEvent("mouseleave"));
  const all = alone("curve").length;
  point("#losses path[data-site='site-07']");
  document.querySelector("#curve button[data-site='site-12']").click();
  const pinned = alone("curve");
  const later = () => { document.body.dataset.seen = [named, same, all, pinned, alone("losses")].join("; "); };
  setTimeout(later, 2500); // drawn again
}, 1000);
</script>
"""


def test_the_names_of_many_curves_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-one names fit beside a figure; more are below it, and show their curve alone."""
    names = [f"site-{number:02d}" for number in range(40)]
    events = [{**START, "sites": dict.fromkeys(names, 8)}]
    for round in (1, 2):
        events += [*(trained(name, round, 1 / round) for name in names), ended(round, 3.0)]
        events.append(scored(round, **{name: 0.3 * round + 0.005 * i for i, name in enumerate(names)}))
    page = server._page().replace(b"</body>", POINTED.encode() + b"</body>")
    monkeypatch.setattr(server, "_page", lambda: page)
    with serving(Pictured(write_run(tmp_path / "run", events))) as served:
        shown = rendered(served.url, tmp_path / "profile").partition("<script>")[0]
    assert re.findall(r'<button[^>]*data-site="([^"]*)"', shown) == 2 * names
    assert 'data-seen="site-39; site-39; 40; site-12; site-12"' in shown


def test_names_are_beside_a_figure_where_they_fit(tmp_path: Path) -> None:
    for name, buttons in (("bea", 0), ("university-hospital-lausanne", 4)):
        events = [{**START, "sites": {"ada": 8, name: 8}}, trained("ada", 1), trained(name, 1), ended(1, 3.0)]
        run = write_run(tmp_path / f"run-{name}", [*events, scored(1, **{"ada": 0.5, name: 0.7})])
        with serving(Pictured(run)) as served:
            page = rendered(served.url, tmp_path / f"{name}-profile").partition("<script>")[0]
        assert page.count("<button") == buttons
        assert page.count(f">{name}</") == 2 + 1  # both figures and the table of sites


def test_rounds_that_a_site_missed_are_a_dotted_gap_in_its_curve(tmp_path: Path) -> None:
    """bea is away in rounds 3 and 4 of six, and has one round alone before that."""
    events = [{**START, "sites": {"ada": 8, "bea": 8}}]
    for round in range(1, 7):
        here = ["ada", "bea"] if round in (1, 5, 6) else ["ada"]
        events += [*(trained(name, round, 1 / round) for name in here), ended(round, 3.0)]
    with serving(Pictured(write_run(tmp_path / "run", events))) as served:
        page = rendered(served.url, tmp_path / "profile").partition("<script>")[0]
    losses = page.partition('id="losses"')[2]
    assert [losses.count(mark) for mark in ('<path d="M', 'class="gap"', "<circle", "<polyline")] == [3, 1, 1, 4]


def test_a_page_with_a_token_reads_its_figures(tmp_path: Path) -> None:
    with serving(Pictured(write_run(tmp_path / "run")), token="0123456789abcdef") as server:
        page = rendered(server.url, tmp_path / "profile")
    assert "2 of 10" in page


def test_a_page_says_why_there_are_no_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "journal.jsonl").write_text("no event\n")
    with serving(Pictured(run)) as server:
        page = rendered(server.url, tmp_path / "profile")
    assert "is damaged" in page and "No answer" not in page.partition("<script>")[0]


def test_a_run_that_has_not_begun_says_so(tmp_path: Path) -> None:
    with serving(Pictured(write_run(tmp_path / "run", []))) as server:
        page = rendered(server.url, tmp_path / "profile")
    assert ">not begun" in page and "The sites are being opened" in page
    shown = page.partition("<script>")[0]
    assert not [word for word in ("0 of 0", "undefined", "NaN") if word in shown]


SORTED = """
<script>
const table = document.querySelector("table"), head = table.tHead.rows[0].cells;
const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent).join(" ");
const told = [];
for (const column of [2, 2, 2, 0]) { head[column].click(); told.push(names()); }
document.querySelector("figure img").click();
document.title = [...told, document.querySelector("dialog").open].join("; ");
</script>
"""


def test_tables_of_a_report_sort_and_figures_open_large(tmp_path: Path) -> None:
    """The page's own script in a browser; one that was slipped in does not run."""
    cell = TextCell
    grid = [
        [cell("site"), cell("cases"), cell("Dice")],
        [cell("hk"), cell("7"), cell("0.91 ± 0.02")],
        [cell("basel"), cell("12"), cell("–")],
        [cell("ulm"), cell("1,200"), cell("0.95 ± 0.01")],
    ]
    figure = EmbeddedImage("data:image/svg+xml;base64,PHN2Zy8+", "nothing to see", 100)
    write_html("evaluation.html", {**EMPTY, "grids": [("", grid)], "strip": figure}, tmp_path / "p.html", DataError)
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    (tmp_path / "hostile.html").write_text(page.replace("</body>", f"{SORTED}</body>"), encoding="utf-8")
    assert "<title>t</title>" in rendered(f"file://{tmp_path}/hostile.html", tmp_path / "one")
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page)
    (tmp_path / "q.html").write_text(page.replace("</body>", f"{SORTED}</body>"), encoding="utf-8")
    shown = rendered(f"file://{tmp_path}/q.html", tmp_path / "two")
    assert "<title>ulm hk basel; hk ulm basel; hk basel ulm; basel hk ulm; true</title>" in shown


def test_a_page_is_as_wide_as_the_window_allows_with_and_without_contents(tmp_path: Path) -> None:
    measure = "<script>document.title = document.querySelector('main').offsetWidth;</script></body>"
    write_html("evaluation.html", EMPTY, tmp_path / "p.html", DataError)
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page).replace("</body>", measure)
    nav = '<nav aria-label="Contents"><ul><li>one</li></ul></nav>'
    for name, text in (("short", page), ("long", page.replace("<main>", f"{nav}<main>", 1))):
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        shown = rendered(f"file://{tmp_path}/{name}.html", tmp_path / name, "--window-size=1500,900")
        assert "<title>1008</title>" in shown, name
