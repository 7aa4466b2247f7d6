"""What a run imports, in its own process and in a worker: seconds of every start, held by names and not by a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from consilium.methods.fedavg import FedAvg
from consilium.site import Round, Site
from tests.toy import toy_study

# 4 s of processor time, 1 s, 1 s, 0.5 s, 0.4 s; the others are of single formats, figures and pages
HEAVY = {"monai", "sklearn", "matplotlib", "pandas", "scipy", "nibabel", "SimpleITK", "pydicom", "jinja2", "nvflare"}
COMPILER = {"sympy"}  # what torch's compiler imports, 1.5 s with it
RUN = """
import json, sys
from pathlib import Path
from consilium import load_study, run
run(load_study(sys.argv[1]), sys.argv[2], workers=1)
Path(sys.argv[3]).write_text(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@dataclass(frozen=True)
class Telling(FedAvg):
    """FedAvg that writes down what its process has imported once it has trained."""

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        done = super().train(site, memory, got, round)
        names = sorted({name.partition(".")[0] for name in sys.modules})
        Path(os.environ["TELLING"]).write_text(json.dumps(names))
        return done


@pytest.mark.federation  # it starts processes that import torch
def test_a_run_imports_only_what_its_study_uses(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "tests.architecture.test_startup:Telling", study__rounds=1)
    file, told, here = tmp_path / "study.toml", tmp_path / "worker.json", tmp_path / "main.json"
    file.write_text(study.to_toml())
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TELLING": str(told), "PYTHONPATH": os.pathsep.join((root, *sys.path))}
    command = [sys.executable, "-c", RUN, str(file), str(tmp_path / "runs"), str(here)]
    subprocess.run(command, check=True, env=environment, cwd=root)
    for process in (told, here):
        found = set(json.loads(process.read_text()))
        assert "torch" in found
        assert found & (HEAVY | COMPILER) == set(), process.stem


def test_a_command_can_start_its_workers_before_it_imports_torch() -> None:
    code = "import sys, consilium.wires.stem; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
