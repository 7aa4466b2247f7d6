"""The demo's FedAvg in consilium, in other frameworks and in a plain loop, each from its start to its end, in turn."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measuring import Measured, load
from benchmarks.peers.work import used
from benchmarks.plain import open_data
from benchmarks.weight import code_lines
from consilium.data.phantoms import write_phantom
from consilium.demo import CASES, SIZE
from consilium.machine import default_workers
from consilium.ready_studies import folder_of_studies
from consilium.study_reading import load_study

PEERS = Path(__file__).parent / "peers"
ROUNDS = 20
SLOW = 900  # seconds after which a program is given up
OURS, PLAIN = "consilium", "a plain PyTorch loop"


@dataclass(frozen=True)
class Program:
    """A peer's program, and what the reader has to bring for it, see docs/speed.md."""

    file: str
    also: str = ""  # another file that its user writes; the work itself, `work.py`, is the same for all but us
    python: str = ""  # the variable that names the interpreter of its own environment
    checkout: str = ""  # the variable that names the folder of its code

    def command(self) -> list[str]:
        """Empty where what it needs was not given."""
        needed = self.python or self.checkout
        if needed and not os.environ.get(needed):
            return []
        return [os.environ[self.python] if self.python else sys.executable, str(PEERS / self.file)]

    def lines(self) -> int:
        files = [name for name in (self.file, self.also, "work.py") if name]
        return sum(code_lines((PEERS / name).read_text()) for name in files)


PROGRAMS = {
    PLAIN: Program("plain_loop.py"),
    "a loop of PFLlib's form, ours": Program("pfllib_form.py"),
    "PFLlib itself": Program("pfllib_itself.py", "checkouts.py", checkout="BENCH_PFLLIB"),
    "Flower's simulation": Program("flower_app.py", "flower_client.py", python="BENCH_FLOWER_PYTHON"),
    "NVIDIA FLARE's simulator": Program("flare_app.py", "flare_client.py", python="BENCH_FLARE_PYTHON"),
}


@dataclass(frozen=True)
class Course:
    """What one program took, from its start."""

    first_step: float  # seconds
    first_cpu: float  # processor seconds of all its processes until then
    rounds: Sequence[float]  # when each ended
    end: float
    memory: int  # the most bytes that all processes together had of their own
    largest: int  # the most that one of them had
    cpu: float  # processor seconds of all its processes, as far as they were seen

    @property
    def round(self) -> float:
        return median(b - a for a, b in zip(self.rounds, self.rounds[1:])) if len(self.rounds) > 1 else float("nan")


def followed(command: Sequence[str], marks: Path, only_first: bool = False, **variables: str) -> Course:
    """Run a program to its end, or to its first step."""
    marks.unlink(missing_ok=True)
    environment = {**os.environ, **variables, "BENCH_MARKS": str(marks)}
    began, memory, largest, cpu = time.time(), 0, 0, 0.0
    log = marks.with_suffix(".log").open("w+")  # not a pipe, which fills up
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=log, stderr=subprocess.STDOUT, text=True
    )
    try:
        while process.poll() is None and not (only_first and _stepped(marks)):
            spent, held, most = used(str(marks))
            cpu, memory, largest = max(cpu, spent), max(memory, held), max(largest, most)
            time.sleep(0.05)
            if time.time() - began > SLOW:
                raise TimeoutError(f"{command[1]} took more than {SLOW} s")
        end = time.time() - began
        if process.returncode:
            said = Path(log.name).read_text().strip()[-300:]
            raise RuntimeError(f"{' '.join(command)}: {said}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()
    seen = [line.split() for line in marks.read_text().splitlines()]
    step = next(line for line in seen if line[0] == "step")
    rounds = [float(line[1]) - began for line in seen if line[0] == "round"]
    return Course(float(step[1]) - began, float(step[2]), rounds, end, memory, largest, cpu)


def _stepped(marks: Path) -> bool:
    return marks.exists() and "step" in marks.read_text()


def demo_study(folder: Path, method: str, rounds: int) -> tuple[Path, Path]:
    """The demo's FedAvg as a study file, and its training cases as arrays for the others."""
    data = folder / "retina"
    if not data.exists():
        write_phantom("retina", data, CASES, SIZE, 0)
    changes = {
        "data.federation": f'"{data}"',
        "study.rounds": rounds,
        "study.score_every": rounds,
        "local.optimizer_state": '"fresh"',  # as the loops do it
        "method.name": f'"{method}"',
    }
    study = load_study(folder_of_studies() / "demo_fedavg.toml", [f"{key}={value}" for key, value in changes.items()])
    file, arrays = folder / f"{method.rpartition(':')[2]}-{rounds}.toml", folder / "arrays.npz"
    file.write_text(study.to_toml())
    if not arrays.exists():
        held = {}
        for name, site in open_data(study).items():
            places = site.indices("train")
            held[f"{name}/images"] = np.stack([site.image(i) for i in places])
            held[f"{name}/masks"] = np.stack([np.asarray(site.truth(i)) for i in places])
        np.savez(arrays, **held)
    return file, arrays


def our_command(study: Path, runs: Path) -> list[str]:
    shutil.rmtree(runs, ignore_errors=True)
    return [sys.executable, "-m", "consilium", "run", str(study), "--runs", str(runs)]


def fedavg(folder: Path, repeats: int) -> list[Measured]:
    """Twenty rounds from start to end, interleaved; `repeats` is cut to three, a peer takes half a minute."""
    study, arrays = demo_study(folder, "benchmarks.marked:Marked", ROUNDS)
    seen: dict[str, list[Course]] = {}
    for _ in range(min(repeats, 3)):
        seen.setdefault(OURS, []).append(followed(our_command(study, folder / "runs"), folder / "marks"))
        for name, program in PROGRAMS.items():
            if command := program.command():
                course = followed([*command, str(arrays), str(ROUNDS)], folder / "marks")
                seen.setdefault(name, []).append(course)
    for line in table(seen):
        print(line, flush=True)
    return _against(seen)


def table(seen: Mapping[str, Sequence[Course]]) -> list[str]:
    lines = [
        f"FedAvg, six sites, {ROUNDS} rounds, {default_workers()} cores, load {load()}; medians",
        "| | first step after | processor time until then | seconds per round | whole run | its processor time | "
        "peak memory | of its largest process | code lines |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (OURS, *PROGRAMS):
        courses = seen.get(name, ())
        lines.append(f"| {name} | not run |" if not courses else _row(name, courses))
    return lines


def _row(name: str, courses: Sequence[Course]) -> str:
    def of(field: str) -> float:
        return float(median(getattr(course, field) for course in courses))

    lines = f"{_study_lines()} of TOML" if name == OURS else str(PROGRAMS[name].lines())
    return (
        f"| {name} | {of('first_step'):.1f} s | {of('first_cpu'):.1f} s | {of('round'):.3f} s | {of('end'):.1f} s | "
        f"{of('cpu'):.1f} s | {of('memory') / 1e9:.2f} GB | {of('largest') / 1e9:.2f} GB | {lines} |"
    )


def _study_lines() -> int:
    """The lines of the demo's study, without blank ones and comments alone."""
    lines = (folder_of_studies() / "demo_fedavg.toml").read_text().splitlines()
    return sum(bool(line.strip()) and not line.startswith("#") for line in lines)


def _against(seen: Mapping[str, Sequence[Course]]) -> list[Measured]:
    """Ratios of whole runs and rounds, taken within a repeat."""
    limits = {PLAIN: 0.85, "Flower's simulation": 1 / 2.5, "NVIDIA FLARE's simulator": 1 / 4}
    found = []
    for name, limit in limits.items():
        if name in seen:
            ratio = median(a.end / b.end for a, b in zip(seen[OURS], seen[name], strict=True))
            ends = [median(course.end for course in seen[who]) for who in (OURS, name)]
            work = median(a.cpu / b.cpu for a, b in zip(seen[OURS], seen[name], strict=True))
            facts = {"in processor time": work, "load": load()}
            what = f"{ROUNDS} rounds, from start to end"
            found.append(Measured("peers", what, ends[0], name, ends[1], "s", ratio, limit, facts=facts))
    cores = default_workers()
    ratio = median(a.round * cores / b.round for a, b in zip(seen[OURS], seen[PLAIN], strict=True))
    ours, plain = (median(course.round for course in seen[who]) for who in (OURS, PLAIN))
    found.append(
        Measured("peers", "seconds per round", ours, f"the plain loop's / {cores}", plain / cores, "s", ratio, 1.10)
    )
    largest, theirs = (median(course.largest / 1e6 for course in seen[who]) for who in (OURS, PLAIN))
    what = "memory of the largest process"
    found.append(Measured("peers", what, largest, PLAIN, theirs, "MB", largest / theirs, 2.0))
    return found
