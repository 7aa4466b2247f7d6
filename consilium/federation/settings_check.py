"""A look at a hospital.toml in a process of its own: the check needs torch, and the supervisor that asks does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from consilium.errors import DataError, UserError, WorkError


@dataclass(frozen=True)
class OwnSettings:
    """What a supervisor needs to know of a hospital."""

    site: str
    memory: Path
    data: Path = Path()
    device: str = "auto"


Reader = Callable[[Path], OwnSettings]


def read_here(path: Path) -> OwnSettings:
    """In this process; raises what `read_hospital` raises."""
    from consilium.hospital import read_hospital

    found = read_hospital(path)
    return OwnSettings(found.site, Path(found.memory), Path(found.data), found.device)


def read_apart(path: Path) -> OwnSettings:
    """The same, and this process imports nothing for it."""
    command = [sys.executable, "-m", "consilium.federation.settings_check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise DataError(done.stderr.strip())
    if done.returncode:
        raise WorkError(f"{path} could not be checked: {done.stderr.strip()[-500:]}")
    facts = json.loads(done.stdout)
    return OwnSettings(facts["site"], Path(facts["memory"]), Path(facts["data"]), facts["device"])


def main(path: str) -> int:
    try:
        found = read_here(Path(path))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({name: str(value) for name, value in vars(found).items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
