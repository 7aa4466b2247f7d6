"""What this machine is and has."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from consilium import __version__
from consilium.children import WORKER
from consilium.errors import StudyError


def default_workers() -> int:
    """One process per core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(count: int) -> None:
    """Compute with this many threads from now on. To set them again costs a millisecond: torch drops what it cached."""
    if getattr(_set, "threads", 0) != count or torch.get_num_threads() != count:
        torch.set_num_threads(count)
        _set.threads = count


_set = threading.local()  # the number of threads that was set last, by thread


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Compute with this many threads; the number changes the last bits of what a network answers."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(wanted: str, index: int) -> str:
    """The device of a site. A worker process stays on one GPU, and processes are spread over them; else sites are."""
    kind, _, number = wanted.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (number and not number.isdecimal()):
        raise StudyError(f"[local] device = '{wanted}': it is one of auto, cpu, cuda, cuda:1, mps.")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted == "cuda" and torch.cuda.is_available():
        return f"cuda:{int(os.environ.get(WORKER, max(index, 0))) % torch.cuda.device_count()}"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0].split(". ")[0]  # of 'mps' torch says it in forty lines
        raise StudyError(
            f"[local] device = '{wanted}' cannot be used on this machine: {why}; take 'auto' or 'cpu'."
        ) from error
    return wanted


def check_compiler(device: str) -> None:
    """Refuse [local] compile = true where torch would find no compiler: it would say so in the first step only."""
    if not device.startswith("cuda"):
        wanted = os.environ.get("CXX", "")
        if not any(shutil.which(name) for name in (wanted, "g++", "clang++", "c++") if name):
            raise StudyError(
                "[local] compile = true needs a C++ compiler, and this machine has none: install g++ or clang++, or "
                "leave compile at false."
            )
    elif importlib.util.find_spec("triton") is None:
        raise StudyError("[local] compile = true on a GPU needs the package triton: install it, or leave it at false.")


def machine_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_mb() -> float:
    """The most memory this process has held; kilobytes on Linux, bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def origin() -> dict[str, Any]:
    """Versions, commit and machine, for whoever wants to repeat the run."""
    machine = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    return {
        "versions": {"consilium": __version__, "python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "machine": machine,
        "MKL_CBWR": os.environ.get("MKL_CBWR", ""),
    }


@cache
def _versions() -> dict[str, str]:
    """Of the packages that decide the numbers, as far as they are installed."""
    found = {}
    for package in ("torch", "monai", "numpy", "safetensors", "nibabel", "SimpleITK"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache  # of the code that this process runs
def _commit() -> str:
    git = shutil.which("git")
    if not git:
        return ""
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
