"""Run in a process of its own, by path: loads an export and says how far its outputs are from those expected.

    python -P fresh.py EXPORT EXPECTED.safetensors

Bundles are loaded with MONAI alone; consilium is imported only for the super model, and for networks of its own.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

IMAGES = "images"
PACKAGE = "super_model"
ONNX = "onnx:"


def bundle_logits(folder: Path, images: Tensor) -> Tensor:
    """What a bundle's network says, as MONAI's own parser makes it."""
    from monai.bundle import ConfigParser

    parser = ConfigParser()
    parser.read_config(str(folder / "configs/inference.json"))
    parser["bundle_root"] = str(folder)
    parser["device"] = "$torch.device('cpu')"
    network = parser.get_parsed_content("network")
    with torch.no_grad():
        return network(images)  # type: ignore[no-any-return]


def onnx_logits(path: Path, images: Tensor) -> Tensor:
    runtime: Any = import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"image": images.numpy()})[0])


def package_logits(folder: Path, site: str, images: Tensor) -> Tensor:
    from consilium.export.package import open_package

    _, predictor = open_package(folder, site or None, device="cpu")
    return predictor.answer(images).output


def gaps(folder: Path, expected: dict[str, Tensor]) -> dict[str, float]:
    """For every model the largest difference, relative to its largest logit where that is above 1."""
    images = expected.pop(IMAGES)
    found = {}
    for name, logits in sorted(expected.items()):
        site = name.partition(":")[2]
        if name.partition(":")[0] == PACKAGE:
            output = package_logits(folder / PACKAGE, site, images)
        else:
            output = bundle_logits(folder / name, images)
        found[name] = gap(output, logits)
        if (path := folder / name / "models/model.onnx").exists() and find_spec("onnxruntime"):
            found[f"{ONNX}{name}"] = gap(onnx_logits(path, images), logits)
    return found


def gap(output: Tensor, logits: Tensor) -> float:
    if output.shape != logits.shape:
        return float("inf")
    return float((output - logits).abs().max() / logits.abs().max().clamp(min=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(gaps(Path(sys.argv[1]), load_file(sys.argv[2]))))
