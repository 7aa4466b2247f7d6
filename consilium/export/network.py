"""A study's network in MONAI's words: a class path with arguments, so that a bundle needs no consilium."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from consilium.extensions import code_files
from consilium.networks.nested_unet import NestedUNet
from consilium.networks.unet import AnySize
from consilium.study import Study
from consilium.tasks.segmentation import Segmentation

SCRIPTS = "scripts"  # where a bundle keeps code
# for every layer that needs no consilium: the arguments that make it again, kept under the same name
_LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((nn.Conv2d, nn.Conv3d), ("in_channels", "out_channels", "kernel_size", "stride", "padding")),
    **dict.fromkeys((nn.MaxPool2d, nn.MaxPool3d), ("kernel_size", "stride", "padding", "ceil_mode")),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), ("output_size",)),
    nn.Linear: ("in_features", "out_features"),
    nn.Flatten: ("start_dim",),
    nn.ReLU: ("inplace",),
    nn.Dropout: ("p",),
}
_UNET = (
    "in_channels", "out_channels", "channels", "strides", "kernel_size", "up_kernel_size", "num_res_units",
    "act", "norm", "dropout", "bias", "adn_ordering",
)  # fmt: skip


@dataclass(frozen=True)
class Portable:
    """A network as a bundle's configuration, and how consilium's tensors are named in it."""

    module: nn.Module  # the network itself, with untrained weights
    config: Mapping[str, Any]  # "network_def", and what it refers to
    prefix: str = ""  # taken off consilium's tensor names
    divisor: int = 1  # image sides must be a multiple of it
    imports: tuple[str, ...] = ()
    packages: tuple[str, ...] = field(default=())  # needed beside MONAI's own
    files: Mapping[str, Path] = field(default_factory=dict)  # of the user's own code, for the bundle's scripts/


def outputs_of(study: Study) -> int:
    """Output channels: one per label, and one for the background where labels are exclusive."""
    task = study.task
    return len(task.labels) + (isinstance(task, Segmentation) and not task.overlapping)


def portable(study: Study) -> Portable:
    """The network without consilium's wrapper; one of somebody's own class is named by that class."""
    from monai.networks.nets import UNet

    whole = study.task.network().eval()
    wrapped = isinstance(whole, AnySize)
    bare, prefix, divisor = (whole.net, "net.", whole.divisor) if isinstance(whole, AnySize) else (whole, "", 1)
    if isinstance(bare, NestedUNet):
        return Portable(
            bare, {"network_def": {"_target_": "monai.networks.nets.UNet", **bare.as_monai}}, prefix, divisor
        )
    if type(bare) is UNet:
        arguments = {name: _plain(getattr(bare, name)) for name in _UNET}
        config = {"_target_": "monai.networks.nets.UNet", "spatial_dims": bare.dimensions, **arguments}
        return Portable(bare, {"network_def": config}, prefix, divisor)
    if type(bare) is nn.Sequential and not wrapped and all(type(layer) in _LAYERS for layer in bare):
        layers = [_layer(layer) for layer in bare]
        return Portable(bare, {"layers": layers, "network_def": "$torch.nn.Sequential(*@layers)"})
    return _own_class(study, whole)


def _layer(layer: nn.Module) -> dict[str, Any]:
    kind = type(layer)
    config = {name: _plain(getattr(layer, name)) for name in _LAYERS[kind]}
    return {"_target_": f"torch.nn.{kind.__name__}", **config}


def _own_class(study: Study, whole: nn.Module) -> Portable:
    """A class that only consilium or the user's own package has: the bundle then needs that package."""
    kind = type(study.network)
    fields: Any = study.network
    source = str(getattr(kind, "source", ""))
    if ".py:" in source:
        return _own_file(study, whole, source, fields)
    arguments = ", ".join(f"{f.name}={getattr(fields, f.name)!r}" for f in dataclasses.fields(fields))
    build = f"build({study.task.dimensions}, {study.facts.channels}, {outputs_of(study)})"
    config = {"network_def": f"${kind.__name__}({arguments}).{build}"}
    package = kind.__module__.partition(".")[0]
    return Portable(whole, config, imports=(f"$from {kind.__module__} import {kind.__name__}",), packages=(package,))


def _own_file(study: Study, whole: nn.Module, source: str, fields: Any) -> Portable:
    """A class in the user's own file, which goes into the bundle with the files it imports."""
    arguments = fields.arguments(study.task.dimensions, study.facts.channels, outputs_of(study))
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    file, _, name = source.rpartition(":")
    # MONAI takes an expression with the word "import" for a statement
    folder, path = (f"os.path.join(@bundle_root, '{part}')" for part in (SCRIPTS, f"{SCRIPTS}/{Path(file).name}"))
    config = {"network_def": f"$(sys.path.insert(0, {folder}), runpy.run_path({path})['{name}']({text}))[1]"}
    return Portable(whole, config, imports=("$import sys", "$import runpy"), files=code_files([source]))


def _plain(value: Any) -> Any:
    """An argument as JSON holds it; MONAI's names of layers are text of a class of their own."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return str(value) if isinstance(value, str) else value
