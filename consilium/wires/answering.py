"""One request to a site and its answer; the same code whether the site runs in this process or in another."""

from __future__ import annotations

import datetime
import errno
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilium import tree
from consilium.data.site_folder import Federation
from consilium.envelope import Envelope, card_from_json
from consilium.errors import UserError
from consilium.files import read_json, write_bytes
from consilium.learning.fit import workbench
from consilium.machine import peak_memory_mb
from consilium.scores import COLUMNS, write_rows
from consilium.site import Roster
from consilium.study import Study, load_study
from consilium.tasks.inference import bench
from consilium.tree import Packet
from consilium.worker import Worker, open_worker, place_in, site_facts

Request = Mapping[str, Any]
Answer = dict[str, Any]


class Hospitals:
    """The sites this process has opened: data stay mapped and networks built from round to round."""

    def __init__(self) -> None:
        self._workers: dict[tuple[str, str], Worker] = {}
        self._studies: dict[str, tuple[Study, Federation]] = {}
        self._last: tuple[Path, Packet] | None = None  # the last order read, and its file

    def answer(self, request: Request) -> Answer:
        """Do what a request asks; a failure is part of the answer, never an exception."""
        start = time.perf_counter()
        try:
            result = getattr(self, f"_{request['do']}")(request)
        except UserError as error:
            result = {"error": str(error), "mistake": True}
        except Exception as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            result = {"error": f"{type(error).__name__}: {error}", "full": full, "log": _log(request)}
        return {**result, "seconds": time.perf_counter() - start, "memory_mb": peak_memory_mb()}

    def _card(self, request: Request) -> Answer:
        study, federation = self._study(request["run"])
        return site_facts(study, federation, request["site"])

    def _train(self, request: Request) -> Answer:
        worker, head = self._worker(request), Envelope.from_json(request["head"])
        reply = worker.train(self._order(request), head)
        return {"bytes": tree.write(reply, Path(request["reply"]))}

    def _score(self, request: Request) -> Answer:
        worker, head = self._worker(request), Envelope.from_json(request["head"])
        text = ",".join(COLUMNS) + "\n" + write_rows(worker.score(self._order(request), head))
        write_bytes(text.encode(), Path(request["reply"]))
        return {}

    def _deliver(self, request: Request) -> Answer:
        self._worker(request).deliver(self._order(request), Envelope.from_json(request["head"]))
        return {}

    def _close(self, request: Request) -> Answer:
        """Forget a run's sites and the networks kept at hand, or a pool would grow from run to run."""
        self._workers = {key: worker for key, worker in self._workers.items() if key[0] != request["run"]}
        self._studies.pop(request["run"], None)
        self._last = None
        workbench.cache_clear()
        bench.cache_clear()
        return {}

    def _order(self, request: Request) -> Packet:
        """What all sites are sent alike lies in one file, whose table is read once; no file's name is used again."""
        path = Path(request["order"])
        if self._last is not None and self._last[0] == path:
            return tree.read_again(self._last[1], path)  # a site may write to what it was sent
        self._last = path, tree.read(path)
        return self._last[1]

    def _worker(self, request: Request) -> Worker:
        key = (request["run"], request["site"])
        if key not in self._workers:
            study, federation = self._study(request["run"])
            cards = read_json(Path(request["roster"]))
            roster: Roster = {name: card_from_json(card) for name, card in cards.items()}
            place = place_in(Path(request["run"]), request["site"])
            self._workers[key] = open_worker(study, federation, request["site"], roster, place)
        return self._workers[key]

    def _study(self, run: str) -> tuple[Study, Federation]:
        if run not in self._studies:
            study = load_study(Path(run) / "study.toml")
            self._studies[run] = study, study.federation()
        return self._studies[run]


def _log(request: Request) -> str:
    """Keep the traceback under way in the site's folder; returns the file, or nothing where it could not be written."""
    path = Path(request["run"]) / "sites" / request["site"] / "errors.log"
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    round = request["head"]["round"] if request.get("head") else None
    where = f", {round['phase']} round {round['step'] + 1}" if round else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{when} {request['do']}{where}\n{traceback.format_exc()}\n")
    except OSError:
        return ""
    return str(path)
