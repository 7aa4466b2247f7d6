"""A site behind a link of 50 Mbit/s both ways (a network namespace): seconds per round, by how messages travel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.federation import _rounds, _submit_study
from benchmarks.measuring import Measured, load
from benchmarks.small import SITES, small_study, write_small
from consilium.federation.admin import open_admin
from consilium.federation.supervisor import prepare, start
from consilium.federation.trial import START, settle, stopped_by_signals
from consilium.study import with_plan

MBIT = 50
WIDTHS = (16, 32, 64, 128, 256)  # a U-Net of 6.5 MB
WAYS = (("exact", False), ("exact", True), ("float16", False), ("float16", True))


def slow_rounds(folder: Path, repeats: int) -> list[Measured]:
    """FedAvg at one site with one image: what a round takes is the link."""
    data = write_small(folder / "small")
    study = small_study(data, "fedavg", 1, rounds=1 + repeats, widths=WIDTHS)
    study = replace(study, local=replace(study.local, epochs=1))
    found: dict[tuple[str, bool], float] = {}
    with _link() as (space, address):
        for transport, compress in WAYS:
            local = settle(study, SITES[:1], folder / f"{transport}-{compress}", address)
            with stopped_by_signals(), ExitStack() as stack:
                stack.callback(local.end)
                local.start("server")
                arguments, variables = prepare(local.kits[SITES[0]], "site", local.hospital(SITES[0]))
                inside = ["ip", "netns", "exec", space, *arguments]
                local.processes[SITES[0]] = start(local.kits[SITES[0]], inside, variables)
                admin = stack.enter_context(open_admin(local.kits["admin"], START))
                admin.wait_for(admin.sites, START)
                _submit_study(admin, with_plan(study, transport=transport, compress=compress))
            found[transport, compress] = median(_rounds(local))
    exact = found["exact", False]
    facts = {"load": load(), "Mbit/s": MBIT}
    return [
        Measured(
            "slow-link",
            f"a round with 6.5 MB there and back, {transport}{', packed' if compress else ''}",
            seconds,
            "exact, not packed",
            exact,
            "s",
            seconds / exact,
            (0.85 if compress else 0.75) if transport == "float16" else 1.25,
            facts=facts,
        )
        for (transport, compress), seconds in found.items()
    ]


@contextmanager
def _link() -> Iterator[tuple[str, str]]:
    """A namespace behind a shaped link, and our address as it sees us."""
    name, ours, net = f"slow{os.getpid()}", f"sl{os.getpid()}"[:15], f"10.214.{os.getpid() % 250}"
    shape = f"root tbf rate {MBIT}mbit burst 64kb latency 2s"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for words in (
            f"ip link add {ours} type veth peer name inside netns {name}",
            f"ip addr add {net}.1/24 dev {ours}",
            f"ip link set {ours} up",
            f"ip -n {name} addr add {net}.2/24 dev inside",
            f"ip -n {name} link set inside up",
            f"ip -n {name} link set lo up",
            f"tc qdisc replace dev {ours} {shape}",
            f"tc -n {name} qdisc replace dev inside {shape}",
        ):
            subprocess.run(words.split(), check=True)
        yield name, f"{net}.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)  # and the link with it
