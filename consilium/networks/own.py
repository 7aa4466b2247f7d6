"""A user's own network: any `nn.Module` class, or function that returns one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from torch import nn

from consilium.errors import StudyError

GIVEN = ("dimensions", "channels", "outputs")  # parameters that the study's data and task decide


def own_network(maker: Any, name: str) -> Any:
    """Return a dataclass with `build` for a class or function that makes a network.

    Of `dimensions`, `channels` and `outputs` the network gets those that are among its parameters. Every other
    parameter is a key of [task]. A dataclass that has `build` is returned as it is.
    """
    if dataclasses.is_dataclass(maker) and isinstance(maker, type) and hasattr(maker, "build"):
        return maker
    if not callable(maker) or (isinstance(maker, type) and not issubclass(maker, nn.Module)):
        raise StudyError(
            f"{name} is not a network: give an nn.Module, a function that returns one, or a dataclass with build()."
        )
    hints = get_type_hints(vars(maker).get("__init__", maker) if isinstance(maker, type) else maker)
    parameters = inspect.signature(maker).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    keys: list[tuple[str, Any, Any]] = []
    for parameter in (p for p in named if p.name not in GIVEN):
        default = parameter.default
        default = tuple(default) if isinstance(default, list) else default
        value = dataclasses.field() if default is parameter.empty else dataclasses.field(default=default)
        keys.append((parameter.name, hints.get(parameter.name, Any), value))
    wanted = [p.name for p in named if p.name in GIVEN]
    return dataclasses.make_dataclass(
        str(getattr(maker, "__name__", "OwnNetwork")),
        keys,
        namespace={"arguments": _arguments(wanted), "build": _build(maker, name), "source": name},
        frozen=True,
        kw_only=True,
    )


def _arguments(wanted: list[str]) -> Callable[..., dict[str, Any]]:
    def arguments(self: Any, dimensions: int, channels: int, outputs: int) -> dict[str, Any]:
        """The arguments of the network."""
        given = {"dimensions": dimensions, "channels": channels, "outputs": outputs}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**{key: given[key] for key in wanted}, **fields}

    return arguments


def _build(maker: Callable[..., Any], name: str) -> Callable[..., nn.Module]:
    def build(self: Any, dimensions: int, channels: int, outputs: int) -> nn.Module:
        network = maker(**self.arguments(dimensions, channels, outputs))
        if not isinstance(network, nn.Module):
            raise StudyError(f"[task] network = '{name}' gives {type(network).__name__}, not an nn.Module.")
        return network

    return build
