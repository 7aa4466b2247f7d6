"""Memory of the server and of a whole simulation, with few and with many sites; each measured in a new process."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measuring import Measured, anonymous, peak_of
from benchmarks.small import small_study, write_small

FEW, MANY, WORKERS, ROUNDS = 6, 24, 2, 3
MB = 1e6


@dataclass(frozen=True)
class Seen:
    """Bytes, at most at any time."""

    model: int
    largest: int  # of the model's tensors
    server: int  # growth of the server's own memory over the whole run
    anonymous: int  # of all processes together
    resident: int  # the same with the mapped files


def many_sites(folder: Path, repeats: int) -> list[Measured]:
    """FedAvg and FedSM, a network of 30 MB, 6 and 24 sites, two worker processes; `repeats` changes nothing here."""
    write_small(folder / "small")
    few, many = _in_new_process(folder, FEW), _in_new_process(folder, MANY)
    lines = []
    for sites, seen in ((FEW, few), (MANY, many)):
        allowed = 2 * seen.model + seen.largest
        lines.append(
            Measured(
                "memory", f"growth of the server's memory, {sites} sites", seen.server / MB,
                "two models and a tensor", allowed / MB, "MB", seen.server / allowed, 1.0,
            )
        )  # fmt: skip
    for kind, what in (("anonymous", "own memory"), ("resident", "memory with mapped files")):
        a, b = getattr(many, kind) / MB, getattr(few, kind) / MB
        text = f"{what} of the simulator, {MANY} sites"
        lines.append(Measured("memory", text, a, f"with {FEW} sites", b, "MB", a / b, 1.2))
    few, many = _in_new_process(folder, FEW, "fedsm"), _in_new_process(folder, MANY, "fedsm")
    a, b = many.server / MB, few.server / MB
    text = f"growth of the server's memory, FedSM, {MANY} sites"
    lines.append(Measured("memory", text, a, f"with {FEW} sites", b, "MB", a / b, 1.2))
    return lines


def _in_new_process(folder: Path, sites: int, method: str = "fedavg") -> Seen:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", str(folder), str(sites), method]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Seen(**json.loads(done.stdout))


def _watch_a_run(folder: Path, sites: int, method: str) -> Seen:
    from consilium import simulation
    from consilium.wires.processes import Pool

    data, runs = folder / "small", folder / f"memory-{method}-{sites}"
    with Pool(WORKERS) as pool:
        # a run of a tiny network first: imports and code are not what is measured
        simulation.run(small_study(data, method, FEW, 1, widths=(2, 4)), runs, pool=pool)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = anonymous(os.getpid())
        study = small_study(data, method, sites, ROUNDS)
        sizes = [tensor.numel() * tensor.element_size() for tensor in study.task.shape().values()]
        with peak_of([process.pid for process in pool.processes]) as peak:
            simulation.run(study, runs, pool=pool)
    return Seen(sum(sizes), max(sizes), peak.server - before, peak.anonymous, peak.resident)


if __name__ == "__main__":
    print(json.dumps(asdict(_watch_a_run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))))
