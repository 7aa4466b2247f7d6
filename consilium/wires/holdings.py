"""What sites hold of the orders they were sent, as the server knows it: contents by name, and the last orders.

A last order is a file without a name, mapped and not read into memory, and one for all sites that were sent the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from consilium import packet_files
from consilium.differences import Version
from consilium.tree import Packet
from consilium.weights import SiteName
from consilium.wires.held import Names

Versions = Mapping[str, Version]  # by path
NONE: Versions = {}  # one object: sites that have nothing are sent the same packet


class Holdings:
    """Of every site, what it has confirmed; a site that failed has nothing, whatever it may have."""

    def __init__(self) -> None:
        self._contents: dict[SiteName, dict[str, frozenset[str]]] = {}  # by what was asked
        self._orders: dict[SiteName, Versions] = {}  # the last one, confirmed or on its way

    def confirm(self, site: SiteName, do: str, contents: frozenset[str]) -> None:
        self._contents.setdefault(site, {})[do] = contents

    def forget(self, site: SiteName) -> None:
        self._contents.pop(site, None)
        self._orders.pop(site, None)

    def known(self, site: SiteName, do: str) -> frozenset[str]:
        """Orders leave out what the last order brought; a release also what the last release did."""
        kinds = ("train",) if do == "train" else ("train", "score")
        none: frozenset[str] = frozenset()
        return none.union(*(self._contents.get(site, {}).get(kind, none) for kind in kinds))

    def keep(self, packets: Mapping[SiteName, Packet], names: Mapping[int, Names], spool: Path) -> None:
        """Orders that are sent now; `names` are their contents, by the packets' identity."""
        for site in packets:
            self._orders.pop(site, None)  # there is no room for both
        kept: dict[int, Versions] = {}
        for site, packet in packets.items():
            if id(packet) not in kept:
                kept[id(packet)] = _on_disk(packet, names[id(packet)], spool / "last")
            self._orders[site] = kept[id(packet)]

    def versions(self, site: SiteName) -> Versions:
        """The last order, by path, if the site has confirmed it: a new message may be a change of it."""
        order = self._orders.get(site, NONE)
        confirmed = self._contents.get(site, {}).get("train", frozenset())
        return order if confirmed.issuperset(version.name for version in order.values()) else NONE

    def ordered(self, site: SiteName) -> dict[str, Tensor]:
        """The last order, by content: the reply to it may be a change of it, and of no other site's."""
        return dict(self._orders.get(site, NONE).values())


def _on_disk(packet: Packet, names: Names, path: Path) -> Versions:
    packet_files.write(packet, path)
    tensors = packet_files.read(path).tensors
    path.unlink()  # what is mapped stays
    return {name: Version(names[name], tensors[name]) for name in tensors}
