"""The environment of the processes this package starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# Of the GNU C library. A training step frees and allocates the same large blocks repeatedly. If they are kept, a step
# of a small network is a few per cent faster. A server that forwards messages returns their memory at once.
TRAINING = {
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the largest it accepts
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
WORKER = "CONSILIUM_WORKER"  # in a simulator's worker process: its number
PASSING_ON = {"MALLOC_MMAP_THRESHOLD_": str(2**23)}  # the tensors of a message are larger


def environment(memory: Mapping[str, str]) -> dict[str, str]:
    """One thread, the import path of this process, and memory settings unless the user has set them."""
    paths = [path for path in (os.getcwd(), *sys.path) if path]
    return {**memory, **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
