"""One model as a MONAI bundle: configs/metadata.json, configs/inference.json, models/model.safetensors, docs/README.md.

The weights are safetensors, not MONAI's usual model.pt: nothing in a bundle needs to be unpickled. inference.json loads
them itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import safetensors.torch

from consilium import __version__
from consilium.export import transforms
from consilium.export.models import Model
from consilium.export.network import SCRIPTS, Portable, outputs_of
from consilium.study import Study
from consilium.tasks.segmentation import Segmentation
from consilium.weights import Weights
from consilium.wording import counted

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
WEIGHTS = "models/model.safetensors"
NOT_A_DEVICE = "Research only: this is not a medical device, and nobody has approved it for the care of patients."


def write_bundle(
    folder: Path, study: Study, network: Portable, model: Model, scores: Mapping[str, float], about: str
) -> None:
    """Write one bundle; `scores` are the model's own test scores, by name."""
    for part in ("configs", "models", "docs"):
        (folder / part).mkdir(parents=True)
    weights = renamed(model.weights, network.prefix)
    safetensors.torch.save_file(dict(weights), folder / WEIGHTS, metadata={"format": "pt"})
    for name, file in network.files.items():
        (folder / SCRIPTS / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / SCRIPTS / name)
    _write_json(folder / "configs/inference.json", inference(study, network))
    _write_json(folder / "configs/metadata.json", describe(study, network, model, scores, about))
    (folder / "docs/README.md").write_text(_readme(study, network, model, about), encoding="utf-8")


def renamed(weights: Weights, prefix: str) -> Weights:
    """The tensors under the names they have without consilium's wrapper."""
    return Weights.over({name.removeprefix(prefix): tensor.contiguous() for name, tensor in weights.items()})


# ---------------------------------------------------------------------------------------------- inference.json


def inference(study: Study, network: Portable) -> dict[str, Any]:
    """A MONAI workflow that predicts every image of `dataset_dir` into `output_dir`."""
    imports = [f"$import {module}" for module in ("functools", "glob", "os", "monai", "torch")]
    # as consilium itself predicts, so that the same bits come out
    place = "@device, memory_format=torch.channels_last" if study.task.dimensions == 2 else "@device"
    evaluator: dict[str, Any] = {
        "_target_": "SupervisedEvaluator",
        "device": "@device",
        "val_data_loader": "@dataloader",
        "network": "@network",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
    }
    config: dict[str, Any] = {
        "imports": [*imports, "$from safetensors.torch import load_file", *network.imports],
        "bundle_root": ".",
        "dataset_dir": "$os.path.join(@bundle_root, 'images')",
        "output_dir": "$os.path.join(@bundle_root, 'masks')",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        **network.config,
        "weights": f"$load_file(os.path.join(@bundle_root, '{WEIGHTS}'))",
        # load_state_dict returns what did not fit (nothing: it is strict), so the network is taken from the pair
        "network": f"$(@network_def.load_state_dict(@weights), @network_def.to({place}).eval())[1]",
        "preprocessing": _compose(transforms.preprocessing(study, network.divisor)),
        "datalist": "$sorted(glob.glob(os.path.join(@dataset_dir, '*')))",
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': path} for path in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": transforms.inferer(study, network.divisor),
        "postprocessing": _compose(transforms.postprocessing(study)),
        "evaluator": evaluator,
        "run": ["$@evaluator.run()"],
    }
    if not isinstance(study.task, Segmentation):
        config["handlers"] = [_class_table()]
        evaluator["val_handlers"] = "@handlers"
    return config


def _compose(steps: list[transforms.Transform]) -> dict[str, Any]:
    return {"_target_": "Compose", "transforms": steps}


def _class_table() -> dict[str, Any]:
    return {
        "_target_": "ClassificationSaver",
        "output_dir": "@output_dir",
        "batch_transform": "$lambda batch: batch[0]['image'].meta",
        "output_transform": "$monai.handlers.from_engine(['pred'])",
    }


# ---------------------------------------------------------------------------------------------- metadata.json


def describe(study: Study, network: Portable, model: Model, scores: Mapping[str, float], about: str) -> dict[str, Any]:
    """metadata.json, in the fields of MONAI's schema and a few of our own."""
    facts, labels = study.facts, ", ".join(study.facts.labels)
    return {
        "schema": SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported by consilium {__version__}"},
        "monai_version": _version("monai"),
        "pytorch_version": _version("torch").partition("+")[0],
        "numpy_version": _version("numpy"),
        "required_packages_version": {name: _version(name) for name in _packages(study, network)},
        "name": f"{study.name} {model.name}",
        "task": f"{facts.task} of {labels} in {facts.dimensions}-D images",
        "description": about,
        "authors": "see model_card.md",
        "copyright": "see model_card.md",
        "intended_use": NOT_A_DEVICE,
        "references": [study.method.paper],
        "data_type": "png, jpeg, tiff" if facts.dimensions == 2 else "nifti",
        "image_classes": f"{counted(facts.channels, 'channel')}, intensities normalised: {study.preprocess.normalise}",
        "pred_classes": "logits; " + "; ".join(f"channel {i}: {text}" for i, text in _channels(study).items()),
        "eval_metrics": dict(scores),
        "network_data_format": _data_format(study, network),
        "preprocess": study.tables()["preprocess"],
        "differences_from_training": transforms.differences(study, network.divisor),
    }


def _channels(study: Study) -> dict[str, str]:
    names = ["background"] * (outputs_of(study) - len(study.facts.labels)) + list(study.facts.labels)
    return {str(i): name for i, name in enumerate(names)}


def _data_format(study: Study, network: Portable) -> dict[str, Any]:
    shape = _shape(study, network.divisor)
    patch = bool(study.task_fields.patch)
    ranges: dict[str, list[int]] = {"unit": [0, 1], "signed": [-1, 1]}
    image = {
        "type": "image",
        "format": "magnitude",
        "modality": "n/a",
        "num_channels": study.facts.channels,
        "spatial_shape": shape,
        "dtype": "float32",
        "value_range": ranges.get(study.preprocess.normalise, []),
        "is_patch_data": patch,
        "channel_def": {str(i): "image" for i in range(study.facts.channels)},
    }
    masks = isinstance(study.task, Segmentation)
    pred = {
        "type": "image" if masks else "probabilities",
        "format": "labels" if masks and not study.facts.contains else "classes",
        "num_channels": outputs_of(study),
        "spatial_shape": shape if masks else [],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": patch,
        "channel_def": _channels(study),
    }
    return {"inputs": {"image": image}, "outputs": {"pred": pred}}


def _shape(study: Study, divisor: int) -> list[int | str]:
    """The network's image size; with none in the study, any multiple of the divisor (n, of each side its own)."""
    fixed = study.task_fields.patch or study.preprocess.size
    return [side + -side % divisor for side in fixed] if fixed else [f"{divisor}*n"] * study.task.dimensions


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "any"


# ---------------------------------------------------------------------------------------------- docs


def _packages(study: Study, network: Portable) -> tuple[str, ...]:
    """What MONAI's command line needs for this bundle beside MONAI itself, which installs none of them."""
    files = "pillow" if study.facts.dimensions == 2 else "nibabel"
    return ("safetensors", "pytorch-ignite", "fire", files, *network.packages)


def _readme(study: Study, network: Portable, model: Model, about: str) -> str:
    sides = (
        f"\nImage sides must be multiples of {network.divisor}; the transforms pad.\n" if network.divisor > 1 else ""
    )
    packages = ", ".join(f"`{name}`" for name in ("monai", *_packages(study, network)))
    alone = ", ".join(f"`{name}`" for name in ("monai", "safetensors", *network.packages))
    differ = [f"- {text}" for text in transforms.differences(study, network.divisor)]
    return "\n".join([
        f"# {study.name}: {model.name}",
        "",
        f"{about} {NOT_A_DEVICE}",
        "What it was trained on, its scores and when not to use it: `model_card.md`, one folder up.",
        "",
        f"Predict all images of `images/` into `masks/` (needs {packages}):",
        "",
        "    python -m monai.bundle run --config_file configs/inference.json --bundle_root . \\",
        "        --dataset_dir images --output_dir masks",
        "",
        f"The network alone, in Python (needs {alone}):",
        "",
        "    from monai.bundle import ConfigParser",
        "    parser = ConfigParser()",
        '    parser.read_config("configs/inference.json")',
        '    network = parser.get_parsed_content("network")  # eval mode; preprocessed images in, logits out',
        sides,
        "There is no `models/model.pt`: weights are `models/model.safetensors`, which cannot run code when read.",
        *(["", "Where these transforms differ from those of the training:", "", *differ] if differ else []),
        "",
    ])  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
