"""Toy studies as files, and finished runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.messages import Request
from consilium.outgoing import Outgoing
from consilium.tree import Packet
from consilium.worker import Worker
from tests.cli.terminal import call

TASK = """
[task]
widths = [4, 8]
residual_units = 0
selector_widths = [4, 8]

[local]
batch_size = 4
lr = 0.01
"""


def write_study(path: Path, federation: Path, method: str = "fedavg", rounds: int = 2) -> Path:
    """A study of the toy task."""
    head = f'[study]\nrounds = {rounds}\nscore_every = 1\n\n[data]\nfederation = "{federation}"\n'
    path.write_text(f'{head}{TASK}\n[method]\nname = "{method}"\n')
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty page where a command writes a report of its run: the figures take longer than the toy's training."""
    monkeypatch.setattr("consilium.reporting.write_report", lambda runs, page: page.touch())


@pytest.fixture
def study(federation: Path, tmp_path: Path) -> Path:
    return write_study(tmp_path / "toy.toml", federation)


@pytest.fixture(scope="session")
def finished(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished run of a method; made once, not to be changed."""
    made: dict[str, Path] = {}

    def finish(method: str) -> Path:
        if method not in made:
            place = tmp_path_factory.mktemp(method)
            file = write_study(place / "toy.toml", federation, method)
            done = call("run", file, "--workers", 0, "--runs", place / "runs", "--json")
            assert done.status == 0, done.err
            made[method] = Path(done.document["run"])
        return made[method]

    return finish


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """All sites of this process fail in one round, as long as the context lasts."""
    train = Worker.train

    @contextmanager
    def fail(round: int) -> Iterator[None]:
        def answer(self: Worker, order: Packet, request: Request, *rest: Any) -> Outgoing:
            if request.round is not None and request.round.index + 1 == round:
                raise RuntimeError("the link broke")
            return train(self, order, request, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "train", answer)
            yield

    return fail
