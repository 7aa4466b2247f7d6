"""Run the benchmarks: `python -m benchmarks [NAME...] [--quick] [--json]`.

Exit status 0: all within their limits; 1: one is over; 2: one could not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measuring import Measured

REPEATS, QUICK = 7, 3
BENCHMARKS = {  # the module is imported when it is asked for
    "weight": "weight:package",
    "help": "command:help_page",
    "startup": "startup:first_step",
    "growth": "growth:more_sites",
    "peers": "side_by_side:fedavg",
    "overhead": "overhead:empty_rounds",
    "rounds": "rounds:thousand_rounds",
    "digests": "digests:checked_reads",
    "memory": "memory:many_sites",
    "loading": "loading:batches_and_patches",
    "volumes": "volumes:few_volumes",
    "demo": "training:at_demo_sizes",
    "firewall": "shares:firewall",
    "scoring": "shares:scoring",
    "first-try": "training:against_first_try",
    "long": "training:long_rounds",
    "apple": "apple:local_steps",
    "apple-peers": "apple_peers:local_steps",
    "dp": "dp:private_steps",
    "susam": "sharpness:sparse_steps",
    "teachers": "teachers:labelled_rounds",
    "fedsm": "training:three_models",
    "federation": "federation:deployed_rounds",
    "large": "federation:large_messages",
    "packing": "packing:changes",
    "slow-link": "slow_link:slow_rounds",
}
PLACES = {  # of what is no dependency of ours; for `peers` and `apple-peers`
    "flower-python": "the interpreter of an environment with benchmarks/peers/requirements-flower.txt",
    "flare-python": "the interpreter of an environment with benchmarks/peers/requirements-flare.txt",
    "pfllib": "a checkout of PFLlib (github.com/TsingZ0/PFLlib)",
    "apple-authors": "a checkout of the code of APPLE's authors (github.com/ljaiverson/pFL-APPLE)",
}
Benchmark = Callable[[Path, int], "list[Measured]"]


def main() -> int:
    if not Path("/proc/self/status").exists():
        print("benchmarks: they read /proc, so they need Linux.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="consilium-bench-") as folder:
        os.environ["CONSILIUM_CACHE"] = f"{folder}/cache"
        return run(Path(folder))


def run(folder: Path) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repeats instead of {REPEATS}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    for name, what in PLACES.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=what)
    options = parser.parse_args()
    for name in PLACES:
        if value := getattr(options, name.replace("-", "_")):
            if not Path(value).exists():
                parser.error(f"--{name}: there is no {value}")
            os.environ[f"BENCH_{name.replace('-', '_').upper()}"] = value
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {min(unknown)!r}; choose from {', '.join(BENCHMARKS)}")
    warnings.simplefilter("ignore")
    seen: list[Measured] = []
    failed = False
    for name in options.names or BENCHMARKS:
        try:
            module, _, function = BENCHMARKS[name].partition(":")
            benchmark: Benchmark = getattr(importlib.import_module(f"benchmarks.{module}"), function)
            lines = benchmark(folder, QUICK if options.quick else REPEATS)
        except Exception as error:  # the others may still run
            print(f"benchmarks: {name} could not run: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
            continue
        seen += lines
        for line in () if options.json else lines:
            print(line.line(), flush=True)
    if options.json:
        print(json.dumps({"benchmarks": [line.to_json() for line in seen]}, indent=1))
    return 2 if failed else 0 if all(line.ok for line in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
