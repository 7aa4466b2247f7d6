"""Steps do not import torch's compiler, and whoever uses the compiler gets it whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import sys
import torch
from consilium.learning.optimizers import optimizer
from consilium.local_training import Local

def trained(kind):
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    steps = optimizer(list(network.parameters()), Local(optimizer=kind), 0.1)
    for i in range(3):
        steps.zero_grad()
        network(torch.full((2, 4), float(i))).square().sum().backward()
        steps.step()
    steps.load_state_dict(steps.state_dict())
    return torch.cat([p.detach().flatten() for p in network.parameters()])

before = {kind: trained(kind) for kind in ("sgd", "adam", "adamw")}
assert not hasattr(sys.modules["torch._dynamo"], "__file__")  # as those ask who look through all modules
assert "sympy" not in sys.modules, "the compiler was imported"
import torch._dynamo.config
assert torch._dynamo.config.cache_size_limit > 0 and "sympy" in sys.modules
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
assert all(torch.equal(bits, trained(kind)) for kind, bits in before.items()), "other bits with the compiler"
seen = []
torch.compile(lambda x: x + 1, backend=lambda graph, inputs: seen.append(graph) or graph.forward)(torch.ones(1))
assert seen, "nothing was compiled"
"""


@pytest.mark.federation  # it starts a process that imports torch and its compiler
def test_the_compiler_is_imported_when_it_is_used_and_changes_no_bit() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", STEPS], capture_output=True, text=True)
    assert not done.returncode, done.stderr
