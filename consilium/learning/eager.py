"""Torch's compiler is imported when something uses it.

Every step of torch's optimisers imports `torch._dynamo` to say that the step must not be compiled. The import takes a
second of processor time and 70 MB in each process. A stand-in takes its place until something asks for more.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class _StandIn(ModuleType):
    """What a step asks of the compiler. Any other name is looked up in the compiler itself, which replaces this."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__spec__ = ModuleSpec(NAME, None, is_package=True)
        self._lock = threading.RLock()

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing is compiled, so nothing has to be parted."""
        if self._replaced:
            self._compiler().graph_break()

    def disable(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The function itself, and once there is a compiler, what the compiler makes of it."""

        @wraps(function)
        def plain(*given: Any, **named: Any) -> Any:
            if self._replaced:
                return self._compiler().disable(function, *args, **kwargs)(*given, **named)
            return function(*given, **named)

        return plain

    @property
    def _replaced(self) -> bool:
        return sys.modules.get(NAME) is not self

    def _compiler(self) -> Any:
        with self._lock:
            if not self._replaced:
                del sys.modules[NAME], torch._dynamo
            return importlib.import_module(NAME)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # whoever looks through all modules does not mean the compiler
            raise AttributeError(name)
        return getattr(self._compiler(), name)


def without_compiler() -> None:
    """Put the import of the compiler off until it is used, if it has not been imported yet."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _StandIn()
