"""A live display of a run: rounds, sites, scores so far, time left; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from consilium.wording import counted, listed


@contextmanager
def kept(how: str, what: str = "Committed rounds") -> Iterator[None]:
    """Add a note to any exception inside: what is saved, and how to continue."""
    try:
        yield
    except BaseException as error:  # Ctrl-C may come as any exception, of a library too
        error.add_note(f"{what} are saved; {how} continues.")
        raise


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work on many cases, as a function of those done and all; nothing where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ProgressDisplay:
    """Follows the journal of one run after another."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)
        self._fancy = self.console.is_terminal and not quiet
        self._board = _RunStatus()

    def __enter__(self) -> ProgressDisplay:
        if self._fancy:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fancy:
            self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)  # a path cut by a line break cannot be copied

    def of(self, folder: Path) -> Callable[[Mapping[str, Any]], None]:
        """Shows one run's events, and where the run is once it has begun."""

        def show(event: Mapping[str, Any]) -> None:
            self.show(event)
            if event["event"] in ("start", "resume"):
                self.say(f"  in {folder}")

        return show

    def show(self, event: Mapping[str, Any]) -> None:
        """One event of a journal."""
        line = self._board.take(event)
        if line:
            self.say(line)
        elif self._fancy:
            self._live.update(self._board.table())


class _RunStatus:
    """What is known of the run under way."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> str:
        """Remember an event; returns a line worth keeping on the screen, or nothing."""
        what = event["event"]
        facts = self.facts
        if what in ("start", "resume"):
            facts.clear()
            facts.update(
                method=event["method"], rounds=event["rounds"], done=event["round"], first=event["round"],
                aside=event["aside"], now="", sites=event["sites"], began=time.monotonic(), answered={}, losses={},
                score=None, refines=event.get("refines", []),
            )  # fmt: skip
            verb = "training" if what == "start" else f"continuing after round {event['round']} of"
            cases = ", ".join(f"{name} {n}" for name, n in event["sites"].items())
            many, where = counted(event["rounds"], "round"), counted(len(event["sites"]), "site")
            return f"{event['method']}: {verb} {many} at {where} ({cases})"
        if what == "warning":
            return f"note: {event['text']}"
        if what == "left out":
            return f"note: site '{event['site']}' is left out: {event['why']}"
        if what == "privacy":
            told = f"ε {event['epsilon']:.3g} at δ {event['delta']:.3g} over {counted(event['rounds'], 'round')}"
            whose = "patients" if event.get("unit") == "patient" else "cases"
            return f"note: differential privacy of every site's training {whose}: {told}"
        if what == "unscored" and event["phase"] in ("best", "last"):
            return f"note: {event['site']} did not score the {event['phase']} state; `resume` asks it again"
        odd = event.get("firewall", {}).get("verdict") == "odd"
        if odd and event["loss"] is not None:
            facts["losses"][event["site"]] = event["loss"]
        if what in ("lost", "refused") or odd:
            verb = {"lost": "did not answer", "refused": "was rejected"}.get(what, "sent an outlier, which was merged")
            where = event["phase"] if event["phase"] in facts["aside"] else f"round {event['round']}"
            return f"{where}: {event['site']} {verb}: {event['firewall']['why'] if odd else event['why']}"
        if what == "train" and event["loss"] is not None:
            facts["losses"][event["site"]] = event["loss"]
        if what == "round":
            if event["phase"] in facts["aside"]:
                return self._aside(event)
            facts["done"], facts["now"] = event["round"], ""
        if what == "score":
            return self._score(event)
        if what == "finish":
            return f"{facts['method']}: finished, {event['seconds']:.0f} s of training"
        return ""

    def _aside(self, event: Mapping[str, Any]) -> str:
        """A step of a phase that is not the paper's: it is shown by itself, and tells nothing of the time left."""
        facts = self.facts
        facts["began"] += event["seconds"]
        facts["now"] = f"{event['phase']} {event['step']}/{event['steps']}"
        return "" if event["step"] < event["steps"] else f"  {event['phase']}: done"

    def _score(self, event: Mapping[str, Any]) -> str:
        valid, test = event["valid"]["site_mean"], event["test"]["site_mean"]
        if event["phase"] in ("best", "last"):
            said = "" if test is None else f": test {event['metric']} {test:.3f}"
            lacks = self.facts["refines"] if event["phase"] == "last" else []  # they refine the best state only
            when = f"round {event['round']}{f', without {listed(lacks)}' if lacks else ''}"
            return f"  {event['phase']} state ({when}) of the {event['model']} model{said}"
        self.facts["score"] = event
        if valid is None:
            return f"  round {event['round']}/{self.facts['rounds']}: no validation cases to score"
        # a method of several phases has not all its models from the start
        whose = f" of the {event['model']} model" if event["phase"] != "train" else ""
        return (
            f"  round {event['round']}/{self.facts['rounds']}  validation {event['metric']} {valid:.3f}{whose}"
            f"  loss {self._loss()}  {self._left()}".rstrip()
        )

    def _loss(self) -> str:
        losses = self.facts["losses"].values()
        return f"{sum(losses) / len(losses):.3f}" if losses else "-"

    def _left(self) -> str:
        facts = self.facts
        made = facts["done"] - facts["first"]
        if not made or facts["done"] >= facts["rounds"]:
            return ""
        left = (time.monotonic() - facts["began"]) / made * (facts["rounds"] - facts["done"])
        return f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left"

    def table(self) -> Table:
        facts = self.facts
        table = Table.grid(padding=(0, 2))
        if not facts:
            return table
        width = 30
        full = round(width * facts["done"] / max(1, facts["rounds"]))
        bar = Text("━" * full, style="green") + Text("━" * (width - full), style="dim")
        table.add_row(facts["method"], bar, facts["now"] or f"round {facts['done']}/{facts['rounds']}", self._left())
        score = facts["score"]
        sites = score["valid"]["sites"] if score else {}
        marks = "  ".join(f"{name} {sites[name]:.2f}" if name in sites else name for name in facts["sites"])
        table.add_row("", Text(marks, style="dim"), f"loss {self._loss()}", "")
        return table
