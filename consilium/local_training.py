"""`[local]`: how sites train."""

from __future__ import annotations

import math
from dataclasses import dataclass

from consilium.errors import StudyError


@dataclass(frozen=True)
class Local:
    """How sites train; shared by all methods, so that comparisons are fair."""

    optimizer: str = "adam"  # adam, adamw, sgd
    lr: float = 1e-3
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0
    schedule: str = "constant"  # "decay", "warmup-cosine", "warmup-restarts"
    decay: float = 0.99  # of the learning rate per round, for "decay"
    warmup: float = 0.02  # share of the rounds, for "warmup-cosine" and "warmup-restarts"
    restart: int = 3  # rounds per cosine, for "warmup-restarts"
    epochs: int = 1
    batch_size: int = 8
    clip: float = 0.0  # > 0: the gradient's norm is clipped to this
    threads: int = 1  # fixed per site: the number of threads changes the bits of a training step
    device: str = "auto"  # cpu, cuda, cuda:1, mps
    precision: str = "float32"  # "bfloat16", "float16": mixed precision
    compile: bool = False  # by torch.compile; the bits of a step then depend on the compiler
    batchnorm: str = "average"  # "local-statistics", "local"
    optimizer_state: str = "kept"  # from round to round, at the site; "fresh": every round starts without it

    def __post_init__(self) -> None:
        choices = {
            "optimizer": ("adam", "adamw", "sgd"),
            "schedule": ("constant", "decay", "warmup-cosine", "warmup-restarts"),
            "precision": ("float32", "bfloat16", "float16"),
            "batchnorm": ("average", "local-statistics", "local"),
            "optimizer_state": ("kept", "fresh"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise StudyError(f"[local] {name} = {getattr(self, name)!r}: it must be one of {', '.join(allowed)}.")
        for name in ("epochs", "batch_size", "threads", "restart"):
            if getattr(self, name) < 1:
                raise StudyError(f"[local] {name} = {getattr(self, name)}: it must be at least 1.")
        if not 0 < self.lr < 1e3:
            raise StudyError(f"[local] lr = {self.lr}: it must be positive (and below 1000).")
        for name in ("momentum", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise StudyError(f"[local] {name} = {getattr(self, name)}: it must be in [0, 1).")
        if not 0 < self.decay <= 1:
            raise StudyError(f"[local] decay = {self.decay}: it must be in (0, 1].")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise StudyError(f"[local] {name} = {getattr(self, name)}: it must be a number from 0 up.")
