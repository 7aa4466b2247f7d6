"""`[local]`: how sites train."""

from __future__ import annotations

from dataclasses import dataclass

from consilium.errors import StudyError
from consilium.fields import check_below_one, check_choices, check_from_zero

THREADS = 256


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
        check_choices(
            self,
            "local",
            optimizer=("adam", "adamw", "sgd"),
            schedule=("constant", "decay", "warmup-cosine", "warmup-restarts"),
            precision=("float32", "bfloat16", "float16"),
            batchnorm=("average", "local-statistics", "local"),
            optimizer_state=("kept", "fresh"),
        )
        if self.threads > THREADS:
            raise StudyError(f"[local] threads = {self.threads}: at most {THREADS}, and more than a core each is slow.")
        for name in ("epochs", "batch_size", "threads", "restart"):
            if getattr(self, name) < 1:
                raise StudyError(f"[local] {name} = {getattr(self, name)}: it must be at least 1.")
        if not 0 < self.lr < 1e3:
            raise StudyError(f"[local] lr = {self.lr}: it must be positive (and below 1000).")
        check_below_one(self, "local", "momentum", "warmup")
        if not 0 < self.decay <= 1:
            raise StudyError(f"[local] decay = {self.decay}: it must be in (0, 1].")
        check_from_zero(self, "local", "weight_decay", "clip")
