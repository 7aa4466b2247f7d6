"""A release as a folder of its own: `consilium predict` takes it in place of a run folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from consilium import __version__, packet_files
from consilium.data.profile import DataProfile, read_profile
from consilium.errors import RunError
from consilium.export.models import Released
from consilium.extensions import code_files
from consilium.files import file_sha256, read_json, write_json, write_text
from consilium.machine import pick_device
from consilium.predictor import Predictor
from consilium.study import Study
from consilium.study_reading import load_study

FORMAT = 1  # of the package; a change keeps older ones readable or refuses them in words
FOLDER = "super_model"  # inside an export
_MARK = "package.json"


def write_package(folder: Path, study: Study, released: Released, trained_on: DataProfile | None = None) -> None:
    """Everything that predicting needs; of the data it was trained on only ranges, nothing of the machine."""
    folder.mkdir(parents=True)
    packet_files.save(released.message, folder / "release.safetensors")
    code = code_files(study.plugins)
    for name, file in code.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    write_text(_anywhere(study).to_toml(places=False), folder / "study.toml")
    write_text(_readme(study, released), folder / "README.md")
    sites = sorted({model.of for model in released.models if model.of})
    facts = {
        "format": FORMAT,
        "consilium": __version__,
        "method": study.method_name,
        "model": released.predictor.model,
        "sites": sites,  # those with a model of their own, for --site
        **({"distribution": trained_on.to_json()} if trained_on else {}),
        "sha256": {name: file_sha256(folder / name) for name in ("release.safetensors", "study.toml", *code)},
    }
    write_json(facts, folder / _MARK)


def _anywhere(study: Study) -> Study:
    """The study without the place of its data and the device of its training."""
    return replace(study, data=replace(study.data, federation=""), local=replace(study.local, device="auto"))


def is_package(folder: Path) -> bool:
    """The folder is a package, or an export that holds one."""
    return (folder / _MARK).is_file() or (folder / FOLDER / _MARK).is_file()


def open_package(folder: Path, site: str | None = None, device: str = "auto") -> tuple[Study, Predictor]:
    """The model of a package, or of the export that holds it, ready to use; `site` asks for one hospital's own."""
    folder = folder if (folder / _MARK).is_file() else folder / FOLDER
    _check(folder)
    study = load_study(folder / "study.toml")
    released: Any = packet_files.load(folder / "release.safetensors", study.method.Release)
    task = study.task.on(pick_device(device, 0))
    predictor = study.method.deploy(task, None, released)
    return study, predictor.of_site(site) if site else predictor


def trained_on(folder: Path) -> DataProfile | None:
    """What the training images were like; None where the package does not say."""
    folder = folder if (folder / _MARK).is_file() else folder / FOLDER
    return read_profile(read_json(folder / _MARK).get("distribution"))


def sites_of(folder: Path) -> tuple[str, ...]:
    """The sites that have a model of their own in a package."""
    folder = folder if (folder / _MARK).is_file() else folder / FOLDER
    return tuple(read_json(folder / _MARK).get("sites", ()))


def _check(folder: Path) -> None:
    if not (folder / _MARK).is_file():
        raise RunError(f"{folder} is not a package: it has no {_MARK}. `consilium export RUN --to DIR` makes one.")
    facts = read_json(folder / _MARK)
    made = facts.get("consilium", "an unknown version") if isinstance(facts, Mapping) else "an unknown version"
    if not isinstance(facts, Mapping) or facts.get("format") != FORMAT:
        raise RunError(
            f"{folder} was made by consilium {made} in another format than {FORMAT}, which {__version__} reads; use "
            "that version, or export the run again."
        )
    digests = facts.get("sha256")
    listed = digests if isinstance(digests, Mapping) else {}
    for name in {"release.safetensors", "study.toml", *listed}:  # one without a digest is not one of ours
        path = folder / name
        if not path.is_file() or not isinstance(digests, Mapping) or file_sha256(path) != digests.get(name):
            raise RunError(f"{path} is damaged or missing; copy the package again, or export the run again.")


def _readme(study: Study, released: Released) -> str:
    own = [model.of for model in released.models if model.of]
    lines = [
        f"# {study.name}: a consilium package",
        "",
        f"The `{released.predictor.model}` model of a `{study.method_name}` run, complete: it needs neither the run",
        "folder nor the training data. Its training, its scores, when not to use it: `model_card.md`, one folder up.",
        "",
        "    consilium predict THIS_FOLDER scans/ --to masks",
        "",
    ]
    if own:
        lines += [f"For one hospital's own model add `--site NAME`: {', '.join(own)}.", ""]
    names = {
        "release.safetensors": "the weights; reading them cannot run code",
        "study.toml": "the network, the preprocessing and the method",
        _MARK: f"the package's format, and what it was made by: {json.dumps(__version__)}",
    }
    return "\n".join([*lines, *(f"- `{name}`: {text}" for name, text in names.items()), ""])
