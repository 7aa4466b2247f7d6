"""Networks as ONNX files, where the packages for it are installed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from consilium.weights import Weights

PACKAGES = ("onnx", "onnxscript")


def available() -> bool:
    return all(find_spec(name) for name in PACKAGES)


class OnnxWriter:
    """One network traced once (it takes half a minute), written with any number of weights."""

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        free: Any = torch.export.Dim.AUTO  # batch and image sides stay free where the layers allow it
        sides = dict.fromkeys((0, *range(2, example.dim())), free)
        with _quiet():
            # not optimised: folding would mix weights into constants, which could then not be exchanged
            program: Any = torch.onnx.export(
                network.eval(), (example,), dynamo=True, verbose=False, optimize=False,
                input_names=["image"], output_names=["pred"], dynamic_shapes=(sides,),
            )  # fmt: skip
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, with this machine's paths
        self._program = program

    def write(self, weights: Weights, path: Path) -> None:
        with _quiet():
            self._program.apply_weights(dict(weights))
            self._program.save(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of packages it could also use."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
