"""An administrator's session belongs to the certificate of its connection, not to whatever key its holder has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("nvflare")

from consilium.federation.cell_guard import MOST_ADMINS

PREPARED = """
from types import SimpleNamespace
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.login import LoginModule
from consilium.federation import cell_guard, connection_guard
from consilium.federation.cell_policy import Link

done = []
LoginModule.handle_cert_login = lambda module, conn, args: done.append(args[1])
LoginModule.pre_command = lambda module, conn, args: True
connection_guard.shown = lambda pem: SimpleNamespace(serial=int(pem))
connection_guard.bind_sessions()
eva = Link(False, False, "eva@consilium.org", "project_admin", 7)
assert cell_guard._remember("_admin_1", eva) == ""

def conn(origin, **props):
    request = SimpleNamespace(get_header=lambda name: origin) if origin else None
    named = {getattr(ConnProps, key): value for key, value in props.items()}
    answers = []
    return SimpleNamespace(get_prop={**named, ConnProps.REQUEST: request}.get, append_string=answers.append,
                           append_error=answers.append, answers=answers)
"""
LOGIN = """
for origin, serial in (("_admin_1", "7"), ("_admin_1", "8"), ("_admin_2", "7"), ("_admin_1", "x"), ("_admin_1", None)):
    asked = conn(origin, CMD_HEADERS={"cert": serial})
    LoginModule.handle_cert_login(None, asked, ["", f"{origin} {serial}"])
    assert bool(asked.answers) == (f"{origin} {serial}" not in done)
assert done == ["_admin_1 7"], done
"""
SESSION = """
session = SimpleNamespace(origin_fqcn="_admin_1")
def allowed(origin, user, role):
    return LoginModule.pre_command(None, conn(origin, USER_NAME=user, USER_ROLE=role, SESSION=session), [])
assert allowed("_admin_1", "eva@consilium.org", "project_admin")
assert allowed(None, "eva@consilium.org", "project_admin")  # with an upload
assert not allowed("_admin_1", "max@consilium.org", "project_admin")
assert not allowed("_admin_1", "eva@consilium.org", "watcher")
assert not allowed("_admin_2", "eva@consilium.org", "project_admin")
assert cell_guard._remember("_admin_1", Link(False, False, "max@consilium.org", "watcher", 8))
for number in range(2, 2 * cell_guard.MOST_ADMINS):
    cell_guard._remember(f"_admin_{number}", eva)
assert len(cell_guard.ADMIN_LINKS) == cell_guard.MOST_ADMINS
"""


def run(program: str) -> None:
    """In a process of its own: the overrides stay for as long as it lives."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", PREPARED + program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_administrator_logs_in_with_the_certificate_of_its_connection() -> None:
    run(LOGIN)


def test_a_session_is_its_administrators_alone() -> None:
    assert MOST_ADMINS >= 100
    run(SESSION)
