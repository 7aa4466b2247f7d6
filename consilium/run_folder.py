"""A run on disk: its study, journal and scores, and the states to resume from after a crash at any time."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from consilium import packet_files, tree
from consilium.errors import RunError, StudyError, WorkError, not_a_run
from consilium.files import append_lines, make_folder, read_json, write_json, write_text
from consilium.method import Method
from consilium.run_files import lock
from consilium.run_files.journal import Event, Journal
from consilium.run_files.origin import Origin
from consilium.run_files.states import States
from consilium.scores.rows import COLUMNS, ScoreRow, check_rows, read_rows, write_rows
from consilium.scores.summary import unscored
from consilium.store import say_once
from consilium.study import Study
from consilium.study_reading import load_study
from consilium.weights import SiteName
from consilium.wording import command


class RunFolder:
    """`runs/<name>-s<seed>-<hash>/`; states are committed by renaming, the journal and the scores only grow."""

    def __init__(self, path: Path, study: Study, watch: Callable[[Event], None] | None = None) -> None:
        self.path, self.study = path, study
        self.journal = Journal(path / "journal.jsonl", watch)
        self.origin = Origin(path)
        self.states = States(path, study.plan.keep_rounds, self.journal)

    def note(self, event: str, **facts: Any) -> None:
        """Append an event to the journal and pass it to the watchers."""
        self.journal.note(event, **facts)

    def warn(self, text: str) -> None:
        """Log a warning for a person; before the journal starts, print it."""
        if self.begun:
            self.note("warning", text=text)
        else:
            say_once(text)

    def events(self) -> list[Event]:
        """The journal's events."""
        return self.journal.events()

    # ------------------------------------------------------------------------------------ opening

    @classmethod
    def create(cls, study: Study, runs: Path, watch: Callable[[Event], None] | None = None) -> RunFolder:
        """The folder of a study's first run."""
        return cls.create_at(cls.path_of(study, runs), study, watch)

    @classmethod
    def create_at(cls, path: Path, study: Study, watch: Callable[[Event], None] | None = None) -> RunFolder:
        try:
            make_folder(path, durable=True)
            write_text(study.to_toml(), path / "study.toml", durable=True)
        except OSError as error:
            raise RunError(f"cannot make the run folder {path}: {error.strerror}; name another with --runs.") from error
        return cls(path, study, watch)

    @staticmethod
    def path_of(study: Study, runs: Path, attempt: int = 1) -> Path:
        """`<name>-s<seed>-<hash>`, with `-2`, `-3` for runs repeated after a change of data or plug-ins."""
        return runs / f"{study.name}-s{study.plan.seed}-{study.hash}{f'-{attempt}' if attempt > 1 else ''}"

    @classmethod
    def attempts(cls, study: Study, runs: Path) -> list[Path]:
        """The existing runs of a study, the oldest first."""
        found: list[Path] = []
        while (path := cls.path_of(study, runs, len(found) + 1)).joinpath("study.toml").is_file():
            found.append(path)
        return found

    @classmethod
    def open(cls, path: Path, watch: Callable[[Event], None] | None = None) -> RunFolder:
        if not (path / "study.toml").is_file():
            raise not_a_run(path)
        folder = cls(path, _own_study(path / "study.toml"), watch)
        folder.origin.check_format()
        return folder

    @property
    def finished(self) -> bool:
        try:
            return (self.path / "summary.json").exists() and bool(read_json(self.path / "summary.json"))
        except RunError:  # a damaged summary is written again
            return False

    @property
    def lacking(self) -> list[SiteName]:
        """Sites whose scores or release are missing at the end of a run; `resume` asks them again."""
        if not self.finished:
            return []
        summary = self.summary()
        return sorted({*summary.get("unscored", ()), *summary.get("undelivered", ())})

    @property
    def begun(self) -> bool:
        return self.journal.path.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for one process."""
        with lock.locked(self.path):
            yield

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def check_method(self) -> None:
        """Reject a study of another method than the run began with; states of two methods can look alike."""
        now = self.study.method_name
        for event in self.events():
            if event["event"] == "start" and (began := event.get("method", now)) != now:
                raise RunError(
                    f"{self.path} was begun with method '{began}', and its study.toml says '{now}'; restore it, or "
                    f"start the study again with {command('run', self.path / 'study.toml', '--runs', 'ELSEWHERE')}."
                )

    # ------------------------------------------------------------------------------------ scores

    def add_scores(self, rows: Iterable[ScoreRow]) -> None:
        path = self.path / "scores.csv"
        head = "" if path.exists() else ",".join(COLUMNS) + "\n"
        append_lines(head + write_rows(rows), path, durable=True)  # before the journal refers to them

    def unscored(self) -> dict[str, list[SiteName]]:
        """By final state: the sites whose scores of it are missing."""
        return unscored(self.events())

    def mend_scores(self) -> None:
        """Drop scores of a round that a crash interrupted; the round is scored again."""
        path = self.path / "scores.csv"
        if not path.exists() and not self.journal.scored():
            return
        expected = {(e["round"], e["phase"]): e["rows"] for e in self.events() if e["event"] == "score"}
        found: Counter[tuple[int, str]] = Counter()
        kept = []
        for row in read_rows(path):
            place = row.round, row.phase
            if found[place] < expected.get(place, 0):  # more: a site was scored later without a log entry
                kept.append(row)
                found[place] += 1
        for place, number in expected.items():
            if found[place] != number:
                raise RunError(f"{path} has lost scores of round {place[0]}; restore it, or start the study again.")
        check_rows(kept, self.events(), path)
        write_text(",".join(COLUMNS) + "\n" + write_rows(kept), path)

    def rows(self) -> list[ScoreRow]:
        path = self.path / "scores.csv"
        return read_rows(path) if path.exists() else []

    # ------------------------------------------------------------------------------------ the end

    def finish(self, method: Method, summary: Mapping[str, Any]) -> None:
        """Write the two states in full, then the summary, whose existence marks the run as finished."""
        best = self.states.best(method)
        assert best is not None
        packet_files.save(best.server, self.path / "best.safetensors", durable=True)
        packet_files.save(self.states.last(method).server, self.path / "last.safetensors", durable=True)
        write_json(summary, self.path / "summary.json")

    def check_finished(self) -> None:
        if not self.finished:
            raise RunError(f"{self.path} is not finished; {lock.way_on(self.path)}.")

    def summary(self) -> Mapping[str, Any]:
        self.check_finished()
        facts: Mapping[str, Any] = read_json(self.path / "summary.json")
        return facts

    def server(self, method: Method) -> Any:
        """The state to use: the best one; in a finished run, from its own file."""
        path = self.path / "best.safetensors"
        if path.exists():
            try:
                return self._checked(path, method)
            except tree.PacketError as error:
                return self._mended(path, method, error)
        best = self.states.best(method)
        if best is None:
            raise RunError(f"{self.path} has no scored round yet; {lock.way_on(self.path)}.")
        return best.server

    def _checked(self, path: Path, method: Method) -> Any:
        """The best state from its own file. Version 0.1 wrote no digest into it: then the store's are compared."""
        packet = packet_files.read(path)
        server: Any = tree.unflatten(packet, method.Server)
        if packet_files.digest_of(packet) is None:
            kept, found = self.states.best_document(), tree.split(server)
            if kept is None:
                say_once(f"{path} was written by version 0.1, without a digest: it is used unchecked.")
                return server
            if found.shape != kept["shape"] or {p: w.digest for p, w in found.weights.items()} != kept["weights"]:
                raise tree.PacketError(f"{path} is damaged: it is not the run's best state")
        return server

    def _mended(self, path: Path, method: Method, error: tree.PacketError) -> Any:
        """The best state from the store, and its own file written again."""
        best = self.states.best(method)  # checked by its digests
        if best is None:
            raise RunError(f"{error}; copy it again from where the run was made.") from error
        with contextlib.suppress(OSError):  # the folder may be read-only
            packet_files.save(best.server, path)
        say_once(f"{error}; it was written again from the run's store.")
        return best.server


def _own_study(path: Path) -> Study:
    """The study of a run. A file that was cut short, without its facts at the end, is rejected."""
    try:
        study = load_study(path)
        told = tomllib.loads(path.read_text(encoding="utf-8")).get("facts", {})
        if told.keys() >= {field.name for field in fields(study.facts)}:
            return study
        fault = "it is cut short"
    except StudyError as error:
        fault = str(error).removeprefix(f"{path} ").rstrip(".")
    raise RunError(f"{path} is not as the run wrote it ({fault}); restore it, or start the study again.")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn disk errors into a message that says what to do; committed rounds are safe."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "When the cause is mended,")
        raise WorkError(
            f"{error.strerror or error} ({error.filename or path}): the run stopped; everything committed is saved. "
            f"{remedy} {command('resume', path)}."
        ) from error


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room, then"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Allow reading and writing there, then"),
}
