"""The administrator: submits studies, follows them, and fetches what they found, with the certificate of its kit."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import AuthorizationError, JobNotFound, NoConnection
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from consilium.errors import DataError, RunError, StudyError, WorkError
from consilium.federation.cell_guard import guard_cells
from consilium.federation.certificates import certificate_of, require_one_kit
from consilium.federation.downloads import copy_plain, guard_downloads, inside
from consilium.federation.job_files import write_app
from consilium.federation.places import OVER, STANDING
from consilium.federation.project import SUBMITS
from consilium.federation.returning import AGAIN, FOLLOWED_BY, OUTCOME
from consilium.federation.supervisor import kit_of
from consilium.files import read_json, read_line
from consilium.study import Study, with_plan

TRIES = 5
SHORTEST = 4  # characters by which a job is named: a variable that is not set must not name the only one
ONLY_WATCHES = "the server does not let this administrator do that: its kit is for watching only; use a submitter's."


def for_federation(study: Study, sites: tuple[str, ...]) -> Study:
    """A study as it travels: its sites by name, no word about where data lie, and local models stay where they are."""
    if study.task_fields.initial:
        raise StudyError(
            "[task] initial names a file of this machine, which the sites do not have; it is for simulation only."
        )
    if study.pooled:
        raise StudyError("pooled training moves data to one place, so it is for simulation only (`consilium run`).")
    known = [*study.plan.sites, *study.plan.leave_out, *study.plan.away, *study.data.annotated]
    for name in known:
        if name not in sites:
            raise StudyError(f"there is no site '{name}'; the federation has {', '.join(sites)}.")
    members = tuple(sorted(set(study.plan.sites or sites) - set(study.plan.leave_out)))
    if not members:
        raise StudyError("[study] leave_out leaves no site to train.")
    method = study.method
    if getattr(method, "share_local_parts", False):  # between hospitals nobody uploads a model that nobody merges
        method = replace(method, share_local_parts=False)  # type: ignore[call-arg]
    return with_plan(replace(study, method=method, data=replace(study.data, federation="")), sites=members)


def write_job(study: Study, folder: Path, again: bool = False) -> Path:
    """A job in NVIDIA FLARE's layout: two small settings and the study; no code. `again`: for a new run folder."""
    job = folder / study.name
    write_app(job / "app", study.to_toml())
    sites = [*study.plan.sites, *study.plan.leave_out]
    meta = {
        "name": study.name,
        "resource_spec": {},
        "min_clients": 1,
        "deploy_map": {"app": ["server", *sites]},
        AGAIN: again,
    }
    (job / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return job


@dataclass(frozen=True)
class AdminClient:
    """A session with the server."""

    session: Session
    sites: tuple[str, ...]
    role: str = SUBMITS  # as it is on the certificate; the server holds to it, whatever is said here

    def connected(self) -> list[str]:
        return sorted(client.name for client in _patiently(self.session.get_system_info).client_info)

    def standing(self) -> dict[str, dict[str, Any]]:
        """Of everyone connected, by the name on the certificate: `since` and `expires`, and of sites `round`, `run`."""
        found = _patiently(lambda: self.session._do_command("check_status server"))
        rows = (found.get("meta") or {}).get(STANDING) or ()  # a server before 0.2 has none
        return {str(row["name"]): row for row in rows}

    def wait_for(self, sites: tuple[str, ...], seconds: float) -> None:
        """Until all these sites are connected."""
        end = time.monotonic() + seconds
        while missing := sorted(set(sites) - set(self.connected())):
            if time.monotonic() > end:
                raise WorkError(f"{', '.join(missing)} did not connect within {seconds:.0f} s; read their logs.")
            time.sleep(0.5)

    def submit(self, study: Study, again: bool = False) -> str:
        """The job's name; its sites must be connected.

        A study that is finished already is not trained again, unless `again` asks for a new run.
        """
        if self.role != SUBMITS:
            raise RunError(ONLY_WATCHES)
        here = self.connected()
        newer = [name for name in here if name in study.plan.sites and name not in self.sites]  # than this kit
        study = for_federation(study, (*self.sites, *newer))
        missing = sorted({*study.plan.sites, *study.plan.leave_out} - set(here))
        if missing:
            raise RunError(
                f"not connected: {', '.join(missing)}. Start them with `consilium federation site`, or leave them out "
                "with --set study.sites=[…]."
            )
        with tempfile.TemporaryDirectory() as folder, _asking():
            return str(self.session.submit_job(str(write_job(study, Path(folder), again))))

    def state(self, job: str) -> str:
        return str(self._meta(job).get("status", ""))

    def wait(self, job: str, seconds: float = float("inf")) -> str:
        """The state of a job once it is over."""
        end = time.monotonic() + seconds
        while not self.over(job):
            if time.monotonic() > end:
                raise WorkError(f"job {job} has not ended after {seconds:.0f} s: {self.state(job).lower()}.")
            time.sleep(0.5)
        return self.state(job)

    def over(self, job: str) -> bool:
        return self.state(job).startswith(OVER)

    def jobs(self) -> list[Mapping[str, Any]]:
        return list(_patiently(self.session.list_jobs))

    def named(self, start: str) -> str:
        """The job whose name starts so."""
        if len(start) < SHORTEST:
            raise RunError(f"'{start}' is too short for a job's name; give its first {SHORTEST} characters or more.")
        found = [str(job["job_id"]) for job in _patiently(lambda: self.session.list_jobs(id_prefix=start))]
        if not found:
            raise RunError(f"no such job: {start}; `consilium federation status` lists the server's jobs.")
        if len(found) > 1:
            raise RunError(f"'{start}' is the start of {len(found)} jobs: {', '.join(found)}; give more of the name.")
        return found[0]

    def ending(self, job: str) -> str:
        """How a job that is over ended, beyond its state: as which job it was resumed, or what its run lacks."""
        facts = self._meta(job)
        if next_ := facts.get(FOLLOWED_BY):
            return f", resumed as {next_}"
        said = (facts.get(OUTCOME) or {}).get("said")
        return f"; {' '.join(said.splitlines())}" if said else ""

    def journal(self, job: str, after: int = 0) -> list[Mapping[str, Any]]:
        """The events of a run, from number `after` on; of a job that is over, out of its results."""
        if self.state(job) == "RUNNING":
            with _quietly(), contextlib.suppress(Exception):  # it may end between the two questions
                return list(self.session.do_app_command(job, "journal", {"after": after})["events"])
        if not self.over(job):
            return []
        with self._results(job) as found:
            paths = list(found.glob("*/journal.jsonl"))
            lines = paths[0].read_text(encoding="utf-8").splitlines() if paths else []
            return [read_line(line) for line in lines[after:]]

    def outcome(self, job: str) -> Mapping[str, Any]:
        """How a job that is over ended: `state` and what was `said`."""
        if found := self._told(job):
            return found
        with self._results(job) as results:
            facts: Mapping[str, Any] = read_json(results / "outcome.json")
            return facts

    def _told(self, job: str) -> dict[str, Any]:
        """The outcome in a job's own facts, where the server writes it just after the job is over."""
        for _ in range(10):
            if found := self._meta(job).get(OUTCOME):
                return dict(found)
            time.sleep(0.5)
        return {}

    def successor(self, job: str) -> str | None:
        """The job as which the run of this one went on, if it did."""
        found = self._meta(job).get(FOLLOWED_BY)
        return str(found) if found else None

    def latest(self, job: str) -> str:
        """The last of the jobs as which a run went on."""
        while next_ := self.successor(job):
            job = next_
        return job

    def awaited_successor(self, job: str) -> str | None:
        """As `successor`; of a job that is to go on by itself, it is waited for."""
        outcome = self.outcome(job)
        if outcome["state"] != "going on" and not outcome.get("again"):
            return self.successor(job)
        for _ in range(120):
            if next_ := self.successor(job):
                return next_
            time.sleep(1.0)
        raise WorkError(f"job {job} was not resumed as a new job; use `consilium federation resume {job}`.")

    def follow(self, job: str, show: Callable[[Mapping[str, Any]], None] | None = None) -> str:
        """Wait until a run is over, through however many jobs; returns the last of them. `show` gets every event."""
        seen = 0
        while True:
            over = self.over(job)
            if show is not None:
                for event in self.journal(job, seen):
                    show(event)
                    seen += 1
            next_ = self.awaited_successor(job) if over else None
            if over and next_ is None:
                return job
            job = next_ or job
            time.sleep(0.5)

    def _meta(self, job: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = _patiently(lambda: self.session.get_job_meta(job))
        return found

    def fetch(self, job: str, runs: Path) -> Path:
        """The run folder of a job that is over; of a run that went on, only the last job has all of it."""
        last = self.latest(job)
        if last != job:
            raise RunError(f"job {job} was resumed as {last}; `consilium federation fetch {last}` has the whole run.")
        with self._results(job) as found:
            outcome = read_json(found / "outcome.json")
            if not inside(found, outcome["run"]).is_dir():
                raise RunError(f"job {job} left no run folder: {outcome['said'] or outcome['state']}")
            target = inside(runs, outcome["run"])
            copy_plain(found / outcome["run"], target)
        return target

    @contextlib.contextmanager
    def _results(self, job: str) -> Iterator[Path]:
        state = self.state(job)
        if not state.startswith(OVER):
            raise RunError(f"job {job} is still running ({state.lower()}); wait for it, or stop it.")
        with tempfile.TemporaryDirectory() as folder:
            with _asking():
                place = Path(self.session.download_job_result(job, folder))
            found = next(iter(sorted(place.rglob("results/outcome.json"))), None)
            if found is None:
                raise RunError(
                    f"job {job} left no results ({state.lower()}): the server could not store them, as when its disk "
                    "is full; its log says why. Everything committed is saved; when the cause is fixed, "
                    f"`consilium federation resume {job}`."
                )
            yield found.parent

    def resume(self, job: str) -> str:
        """A new job that goes on where the run of this one stands; the server's own, if it goes on by itself."""
        last = self.latest(job)
        if not self.over(last):
            raise RunError(
                f"the run of job {job} is under way as job {last}; `consilium federation log {last}` shows it."
            )
        ended = self._told(last)
        if ended.get("again"):
            return self.awaited_successor(last) or last
        if ended.get("state") == "finished" and not ended.get("lacks", ended.get("said")):  # 0.2 had no `lacks`
            raise RunError(
                f"the run of job {job} is finished and lacks nothing: `consilium federation fetch {last}` brings it, "
                "and `submit --again` trains the study anew."
            )
        with _asking():
            return str(self.session.clone_job(last))

    def stop(self, job: str) -> None:
        with _asking():
            self.session.abort_job(job)


@contextlib.contextmanager
def open_admin(kit: Path, seconds: float = 10.0) -> Iterator[AdminClient]:
    """Log in with the administrator's kit."""
    facts = kit_of(kit, "admin")
    require_one_kit(kit, str(facts.get("user", "")))
    if not (own := certificate_of(kit)).holds:
        raise DataError(own.warning())
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    guard_cells()
    guard_downloads()
    session = _log_in(kit, seconds)
    try:
        yield AdminClient(session, tuple(facts["sites"]), certificate_of(kit).role)
    finally:
        with _quietly():
            session.close()


def _log_in(kit: Path, seconds: float) -> Session:
    """A session; a server that is just starting is asked again."""
    user = certificate_of(kit).name
    began = time.monotonic()
    while True:
        try:
            with _quietly():
                return new_secure_session(user, str(kit.resolve()), timeout=15.0, command_timeout=30.0)
        except Exception as error:
            if (waited := time.monotonic() - began) > seconds:
                if isinstance(error, NoConnection):  # NVIDIA FLARE's sentence counts its last attempt only
                    said = f"the server did not answer within {waited:.0f} s"
                else:
                    said = f"the server did not let the administrator in within {waited:.0f} s: {error}"
                raise WorkError(f"{said}; is it running, and is this a kit for it that was not revoked?") from error
        time.sleep(1.0)


def _patiently(question: Callable[[], Any]) -> Any:
    """An answer that may be asked for again: a server that is busy or just starting is no reason to give up."""
    for attempt in range(TRIES):
        try:
            with _asking():
                return question()
        except NoConnection as error:
            if attempt == TRIES - 1:
                raise WorkError(f"the server cannot be reached: {error}; is it running?") from error
            time.sleep(2.0)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """One request to the server; what it says of a full disk, of rights, of a job that is not there, is a sentence."""
    try:
        with _quietly():
            yield
    except AuthorizationError as error:
        raise RunError(ONLY_WATCHES) from error
    except JobNotFound as error:
        raise RunError(f"{error}; `consilium federation status` lists the server's jobs.") from error
    except Exception as error:
        if "No space left on device" not in str(error) and "Disk quota exceeded" not in str(error):
            raise
        raise WorkError(
            "the server's disk is full, so it cannot answer. Everything committed is saved; make room there, then ask "
            "again, and go on with the run with `consilium federation resume JOB`."
        ) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what NVIDIA FLARE prints: greetings, and a traceback of every question that did not reach the server."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
