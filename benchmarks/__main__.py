"""Run the benchmarks: `python -m benchmarks [NAME...] [--quick] [--json]`.

Exit status 0: all within their limits; 1: one is over; 2: one could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

REPEATS, QUICK = 7, 3


def main() -> int:
    if not Path("/proc/self/status").exists():
        print("benchmarks: they read /proc, so they need Linux.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="consilium-bench-") as folder:
        os.environ["CONSILIUM_CACHE"] = f"{folder}/cache"
        return run(Path(folder))


def run(folder: Path) -> int:
    from benchmarks.apple import local_steps
    from benchmarks.command import help_page
    from benchmarks.federation import deployed_rounds, large_messages
    from benchmarks.measuring import Measured
    from benchmarks.memory import many_sites
    from benchmarks.overhead import empty_rounds
    from benchmarks.rounds import thousand_rounds
    from benchmarks.sharpness import sparse_steps
    from benchmarks.teachers import labelled_rounds
    from benchmarks.training import against_first_try, at_demo_sizes, long_rounds, three_models

    benchmarks: dict[str, Callable[[Path, int], list[Measured]]] = {
        "help": help_page,
        "overhead": empty_rounds,
        "rounds": thousand_rounds,
        "memory": many_sites,
        "demo": at_demo_sizes,
        "first-try": against_first_try,
        "long": long_rounds,
        "apple": local_steps,
        "susam": sparse_steps,
        "teachers": labelled_rounds,
        "fedsm": three_models,
        "federation": deployed_rounds,
        "large": large_messages,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(benchmarks)}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repeats instead of {REPEATS}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    unknown = set(options.names) - set(benchmarks)
    if unknown:
        parser.error(f"there is no benchmark {min(unknown)!r}; choose from {', '.join(benchmarks)}")
    warnings.simplefilter("ignore")
    seen: list[Measured] = []
    failed = False
    for name in options.names or benchmarks:
        try:
            lines = benchmarks[name](folder, QUICK if options.quick else REPEATS)
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
