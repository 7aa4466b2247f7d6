"""Which versions work together: the server is updated first, and sites follow when they can."""

from __future__ import annotations

import pytest

from consilium import __version__
from consilium.wires import versions
from consilium.wires.versions import incompatible


@pytest.mark.parametrize(
    ("server", "site", "said"),
    [
        ("0.2.0", "0.2.0", ""),
        ("0.2.0", "0.2.7", ""),
        ("0.2.7", "0.2.0", ""),
        ("0.4.1", "0.3.0", ""),
        ("0.3.0", "0.4.0", "update the server first"),
        ("0.3.0", "0.1.9", "which works with sites from 0.2 on; update the site"),
        ("2.1.0", "1.9.0", "which works with sites from 2.0 on; update the site"),
        ("1.0.0", "2.0.0", "update the server first"),
        ("0.3.0rc1", "0.3.0rc1", ""),
        ("0.3.0", "0.3.0rc1", "install the same consilium on both"),
        ("0.3.0", "../../etc", "install the same consilium on both"),
        ("0.3.0", "", "install the same consilium on both"),
    ],
)
def test_which_sites_a_server_works_with(server: str, site: str, said: str) -> None:
    found = incompatible(server, site)
    assert found == "" if not said else found.endswith(said) and f"{site} where the server has {server}" in found


def test_this_version_works_with_itself_and_its_own_repairs() -> None:
    major, minor, patch = __version__.split(".")
    assert (int(major), int(minor)) >= versions.OLDEST
    assert incompatible(__version__, f"{major}.{minor}.{int(patch) + 1}") == ""
