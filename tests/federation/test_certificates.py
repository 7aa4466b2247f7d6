"""Certificates of one participant: added, renewed and revoked, and nobody else's kit changes."""

from __future__ import annotations

import json
import logging
import re
import shutil
import stat
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.flare_api.api_spec import NoConnection

from consilium.errors import DataError, StudyError, UserError, WorkError
from consilium.federation import admin, connection_guard, job_files
from consilium.federation.authority import read_authority
from consilium.federation.certificates import REVOKED, Certificate, certificate_of, read_revoked
from consilium.federation.connection_guard import Connections
from consilium.federation.kits import add_kit, describe_kits, make_kits, renew_kit, revoke_kit
from consilium.federation.project import Project, read_project
from consilium.federation.supervisor import kit_of, prepare
from tests.cli.terminal import call, refused
from tests.federation.test_job_files import deployed

PROJECT = Project("eyes", "localhost", 8002, ("ada", "bea"), {"max": "watch"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("made") / "kits"
    make_kits(PROJECT, to)
    return to


@pytest.fixture
def consortium(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A project file and the folder of its kits."""
    shutil.copytree(made, tmp_path / "kits")
    PROJECT.write(tmp_path / "eyes.toml")
    return tmp_path / "eyes.toml", tmp_path / "kits"


def contents(folder: Path, but: str) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and but not in path.parts]
    return {str(path): path.read_bytes() for path in paths if path.name not in ("cert.json", "consilium.json")}


def keys_in(authority: Path) -> int:
    return sum(path.read_text().count("BEGIN RSA PRIVATE KEY") for path in authority.rglob("*") if path.is_file())


def test_one_site_joins_and_nobody_elses_kit_changes(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    before = contents(kits, "dan")
    assert add_kit(file, "dan", "site", kits) == kits / "dan"
    assert add_kit(file, "eva", "submit", kits) == kits / "eva"
    assert {path: data for path, data in contents(kits, "dan").items() if "/eva/" not in path} == before
    assert read_project(file) == Project(
        "eyes", "localhost", 8002, ("ada", "bea", "dan"), {"max": "watch", "eva": "submit"}
    )
    assert json.loads((kits / "admin/consilium.json").read_text())["sites"] == ["ada", "bea", "dan"]
    new = certificate_of(kits / "dan"), certificate_of(kits / "eva")
    assert [(one.name, one.role) for one in new] == [("dan", ""), ("eva@consilium.org", "project_admin")]
    assert (kits / "dan/startup/rootCA.pem").read_bytes() == (kits / "ada/startup/rootCA.pem").read_bytes()
    with pytest.raises(DataError, match="has a kit already"):
        add_kit(file, "dan", "site", kits)


def test_an_edited_project_file_is_not_rewritten(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    file.write_text("# ours\n" + file.read_text())
    with pytest.raises(DataError, match="write 'dan' into the list `sites`"):
        add_kit(file, "dan", "site", kits)
    file.write_text(file.read_text().replace('"bea"]', '"bea", "dan"]'))
    assert add_kit(file, "dan", "site", kits).is_dir()
    assert file.read_text().startswith("# ours\n")


def test_a_renewed_kit_keeps_what_its_owner_has_in_it(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    (kits / "ada/process.log").write_text("a line\n")
    old = certificate_of(kits / "ada")
    assert renew_kit(file, "ada", kits) == kits / "ada"
    new = certificate_of(kits / "ada")
    assert (new.name, (kits / "ada/process.log").read_text()) == ("ada", "a line\n")
    assert new.serial != old.serial
    (kits / "bea").rename(kits.parent / "sent")  # a kit that its owner has
    renew_kit(file, "bea", kits)
    assert certificate_of(kits / "bea").serial != certificate_of(kits.parent / "sent").serial
    with pytest.raises(DataError, match="did you mean 'ada'"):
        renew_kit(file, "adda", kits)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (("client.crt", "renewed"), "client.key does not belong to client.crt; copy the whole `startup` folder"),
        (("rootCA.pem", "others"), "client.crt is not by the authority of rootCA.pem beside it"),
        (("client.crt", "bea"), "client.crt is of 'bea', but the kit is of 'ada'"),
        (("client.key", "garbage"), "has no key or no authority that can be read"),
        (("consilium.json", "garbage"), "consilium.json cannot be read .*; copy it from the kit"),
    ],
)
def test_a_kit_of_several_kits_parts_is_not_started(
    broken: tuple[str, str], said: str, consortium: tuple[Path, Path], tmp_path: Path
) -> None:
    file, kits = consortium
    name, source = broken
    kit = Path(shutil.copytree(kits / "ada", tmp_path / "kit"))
    place = kit / ("consilium.json" if name == "consilium.json" else f"startup/{name}")
    if source == "garbage":
        place.write_text("{")
    elif source == "bea":
        shutil.copy(kits / "bea/startup" / name, place)
    else:
        ours = renew_kit(file, "ada", kits) if source == "renewed" else make_kits(PROJECT, tmp_path / "more")["ada"]
        shutil.copy(ours / "startup" / name, place)
    with pytest.raises(UserError, match=said):
        prepare(kit, "site")


def test_an_administrators_kit_is_looked_at_before_the_server_is_asked(consortium: tuple[Path, Path]) -> None:
    _, kits = consortium
    shutil.copy(kits / "ada/startup/client.key", kits / "max/startup/client.key")
    said = call("federation", "status", "--kit", str(kits / "max"))
    assert (said.status, said.err.count("\n")) == (2, 1)
    assert "client.key does not belong to client.crt" in said.err


def test_a_server_that_does_not_answer_is_one_sentence(
    consortium: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise NoConnection("cannot connect to server for 15.0 seconds")

    monkeypatch.setattr(admin, "new_secure_session", nobody)
    said = r"^the server did not answer within 0 s; is it running, and is this a kit for it that was not revoked\?$"
    with pytest.raises(WorkError, match=said), admin.open_admin(consortium[1] / "max", seconds=0.0):
        pass


def test_a_certificate_outlives_its_first_year() -> None:
    """The authority's own certificate does not end with those it has issued, so that these can be renewed."""
    from consilium.federation.kits import ROOT_DAYS

    assert ROOT_DAYS > 5 * 365


def test_the_authority_holds_its_own_key_and_no_others(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    add_kit(file, "dan", "site", kits)
    renew_kit(file, "ada", kits)
    revoke_kit(file, "bea", kits)
    assert keys_in(kits / "authority") == 1
    paths = [kits / "authority", *(kits / "authority").rglob("*"), *kits.glob("*/revoked.pem"), *kits.glob("ada/**/*")]
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert modes == {True: 0o700, False: 0o600}


def test_an_authority_of_an_earlier_version_loses_the_others_keys(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    path = kits / "authority/cert.json"
    now = json.loads(path.read_text())
    before = {key: now[key] for key in ("root_cert", "root_pri_key")}
    users = {"server": "localhost", "admin": "office@consilium.org", "max": "max@consilium.org"}
    for name, pems in now["issued"].items():
        before[users.get(name, name)] = {"cert": pems[0], "pri_key": "-----BEGIN RSA PRIVATE KEY-----"}
    path.write_text(json.dumps(before))
    assert keys_in(kits / "authority") == 6
    assert describe_kits(file, kits)[0].startswith("server  server  valid until ")
    assert keys_in(kits / "authority") == 1
    assert read_authority(kits / "authority").issued.keys() == now["issued"].keys()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:100],
        lambda text: "[]",
        lambda text: text.replace("root_pri_key", "root_pri_kex"),
        lambda text: text.replace("BEGIN CERTIFICATE", "BEGIN", 1),
        lambda text: text.replace("BEGIN RSA PRIVATE KEY", "BEGIN", 1),
        lambda text: text.replace('"number": 0', '"number": []'),
    ],
    ids=["cut", "empty", "no key", "certificate", "key", "number"],
)
def test_a_damaged_file_of_the_authority_is_named_with_a_remedy(
    damage: Callable[[str], str], consortium: tuple[Path, Path]
) -> None:
    file, kits = consortium
    path = kits / "authority/cert.json"
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    done = call("federation", "kits", "list", file, "--to", kits)
    said = refused(done, str(path), "restore it from a backup, or make a new set of kits in another folder")
    assert "study" not in said
    assert path.read_text() == damaged  # nothing is written over it


def test_a_damaged_kit_is_named_with_a_remedy(consortium: tuple[Path, Path]) -> None:
    path = consortium[1] / "ada/consilium.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(UserError, match=re.escape(str(path))) as said:
            kit_of(path.parent, "site")
        assert "ask the consortium for a new kit" in str(said.value)


def test_revoked_is_who_was_and_not_who_is_renewed(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    old, other = certificate_of(kits / "bea"), certificate_of(kits / "ada")
    assert revoke_kit(file, "bea", kits) == kits / REVOKED
    renew_kit(file, "bea", kits)
    for kit in ("server", "ada", "admin"):
        assert read_revoked(kits / kit).serials == {old.serial}
    assert not {certificate_of(kits / "bea").serial, other.serial} & read_revoked(kits / "server").serials
    revoke_kit(file, "ada", kits)
    assert read_revoked(kits / "server").number == 2
    assert [line for line in describe_kits(file, kits) if "revoked" in line] == ["ada  site  revoked"]
    with pytest.raises(DataError, match="no certificate that could be revoked"):
        revoke_kit(file, "ada", kits)
    with pytest.raises(DataError, match="make a new set of kits"):
        revoke_kit(file, "server", kits)


@pytest.mark.parametrize(
    ("days", "said"), [(300, "valid until {}"), (10, "valid until {} (soon)"), (-1, "expired on {}")]
)
def test_the_list_of_kits_tells_what_is_over_from_what_ends_soon(days: int, said: str) -> None:
    end = datetime.now(UTC) + timedelta(days=days, minutes=1)
    assert Certificate("ada", "", 1, end).validity() == said.format(f"{end:%Y-%m-%d}")


def test_who_renews_a_kit_is_told_what_to_copy(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    done = call("federation", "kits", "renew", str(file), "ada", "--to", str(kits))
    assert done.out.strip() == str(kits / "ada")
    assert f"copies the whole folder {kits / 'ada' / 'startup'} over" in done.err


def test_who_left_comes_back_with_the_name_in_the_project_file(consortium: tuple[Path, Path]) -> None:
    file, kits = consortium
    whole = file.read_text()
    revoke_kit(file, "bea", kits)
    file.write_text(whole.replace('"bea", ', "").replace(', "bea"', ""))
    with pytest.raises(DataError, match=r"write 'bea' into .*again, then `consilium federation kits renew`"):
        add_kit(file, "bea", "site", kits)
    file.write_text(whole)
    renew_kit(file, "bea", kits)
    assert any(line.startswith("bea  site  valid until") for line in describe_kits(file, kits))


def test_a_list_of_another_authority_is_not_taken(consortium: tuple[Path, Path], tmp_path: Path) -> None:
    _, kits = consortium
    make_kits(PROJECT, tmp_path / "others")
    PROJECT.write(tmp_path / "others.toml")
    revoke_kit(tmp_path / "others.toml", "ada", tmp_path / "others")
    for spoilt in ((tmp_path / "others" / REVOKED).read_bytes(), b"", b"-----BEGIN X509 CRL-----\n"):
        (kits / "server" / REVOKED).write_bytes(spoilt)
        with pytest.raises(DataError, match="no list of revoked certificates"):
            read_revoked(kits / "server")
        with pytest.raises(DataError, match="restore the consortium's"):
            Connections(kits / "server")  # no start without it


@pytest.mark.parametrize("words", [(), ("make",), ("add", "dan"), ("renew", "ada"), ("revoke", "ada"), ("list",)])
def test_the_commands_of_kits_say_what_is_missing(words: tuple[str, ...], tmp_path: Path) -> None:
    """`kits FILE.toml`, without a word in between, is `kits make`."""
    file = tmp_path / "none.toml"
    done = call("federation", "kits", *words[:1], file, *words[1:], "--to", tmp_path / "kits")
    assert (done.status, "cannot read" in done.err) == (2, True)
    assert not (tmp_path / "kits").exists()


# ------------------------------------------------------------------------------------ the server holds to the list


def line(kit: Path, closed: list[str] | None = None) -> Any:
    """A connection of whoever has this kit."""
    shown = {"x509_pem_cert": [(kit / "startup/client.crt").read_bytes()]}
    return SimpleNamespace(
        name=kit.name,
        context=SimpleNamespace(auth_context=lambda: shown),
        get_conn_properties=dict,
        close=lambda: (closed if closed is not None else []).append(kit.name),
    )


def test_a_revoked_connection_is_cut_off_and_not_let_in_again(
    consortium: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    file, kits = consortium
    connections, closed = Connections(kits / "server"), list[str]()
    for name in ("ada", "bea", "admin"):
        connections.take(line(kits / name, closed))
    revoke_kit(file, "bea", kits)
    connections.look()
    assert closed == ["bea"]
    with pytest.raises(CommError, match="revoked"):
        connections.take(line(kits / "bea"))
    renew_kit(file, "bea", kits)
    connections.take(line(kits / "bea"))
    with pytest.raises(CommError, match="without a certificate"):
        connections.take(SimpleNamespace(context=SimpleNamespace(auth_context=dict)))
    assert "its certificate was revoked" in caplog.text


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"damaged"), lambda path: path.unlink()])
def test_a_list_that_is_lost_or_damaged_lets_nobody_in(
    consortium: tuple[Path, Path], spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    file, kits = consortium
    revoke_kit(file, "bea", kits)
    connections = Connections(kits / "server")
    spoil(kits / "server" / REVOKED)
    with caplog.at_level(logging.ERROR), pytest.raises(CommError, match="revoked"):
        connections.take(line(kits / "bea"))
    assert "stays as it was" in caplog.text


def test_a_list_that_could_not_be_read_is_tried_again(
    consortium: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copied by root and not yet given to the server's user: its content and time do not change when it is."""
    file, kits = consortium
    connections, closed = Connections(kits / "server"), list[str]()
    connections.take(line(kits / "bea", closed))
    revoke_kit(file, "bea", kits)

    def unreadable(kit: Path) -> None:
        raise DataError("cannot read the list")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(connection_guard, "read_revoked", unreadable)
        for _ in range(3):
            connections.look()
    assert caplog.text.count("stays as it was") == 1
    assert closed == []
    connections.look()
    assert closed == ["bea"]


def test_a_study_signed_by_one_who_watches_or_was_revoked_does_not_run(
    consortium: tuple[Path, Path], tmp_path: Path
) -> None:
    file, kits = consortium
    all_kits = {path.name: path for path in kits.iterdir()}
    watched, signed = deployed(all_kits, tmp_path / "w", signer="max"), deployed(all_kits, tmp_path / "a")
    assert job_files.fault(watched, kits / "ada") == "the administrator has not signed this job"
    assert job_files.fault(signed, kits / "ada") == ""
    revoke_kit(file, "admin", kits)
    assert job_files.fault(signed, kits / "ada").endswith("who signed this job, was revoked")


# ------------------------------------------------------------------------------------ the end of a certificate


@pytest.mark.parametrize(
    ("days", "said"), [(31, ""), (29, "expires on .*, in 29 days"), (1, "expires on .*, in 1 day;"), (-2, "expired on")]
)
def test_an_end_is_warned_of_thirty_days_ahead(days: int, said: str) -> None:
    import re

    end = datetime.now(UTC) + timedelta(days=days, minutes=1)
    warning = Certificate("ada", "", 1, end).warning()
    assert re.search(said, warning) if said else warning == ""


def test_a_clock_that_is_wrong_is_named() -> None:
    """A site whose clock is behind does not connect, and NVIDIA FLARE says nothing at all."""
    now = datetime.now(UTC)
    early = Certificate("ada", "", 1, now + timedelta(days=300), now + timedelta(hours=3))
    assert not early.holds
    assert early.warning().endswith(f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC; set the clock.")
    assert early.validity() == f"valid from {early.begins:%Y-%m-%d}"
    late = Certificate("ada", "", 1, now - timedelta(days=2), now - timedelta(days=300))
    assert not late.holds
    assert f"(this machine's clock says {now:%Y-%m-%d})" in late.warning()


def test_an_administrator_with_a_wrong_clock_reads_one_sentence(
    consortium: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = datetime.now(UTC) + timedelta(hours=3)
    early = Certificate("office@consilium.org", "", 1, ahead + timedelta(days=300), ahead)
    monkeypatch.setattr(admin, "certificate_of", lambda _: early)
    monkeypatch.setattr(admin, "require_one_kit", lambda *_: None)
    with pytest.raises(DataError, match="set the clock"), admin.open_admin(consortium[1] / "admin", seconds=0.0):
        pass


def test_a_question_that_does_not_reach_the_server_shows_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """NVIDIA FLARE prints one whenever its connection is gone."""

    def gone() -> None:
        try:
            raise AttributeError("'NoneType' object has no attribute 'send_request'")
        except AttributeError:
            traceback.print_exc()
        raise NoConnection("no reply")

    with pytest.raises(NoConnection), admin._asking():
        gone()
    assert capfd.readouterr() == ("", "")


def test_no_certificate_is_made_that_would_end_with_the_authority(
    consortium: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, kits = consortium
    monkeypatch.setattr("consilium.federation.kits.AHEAD", timedelta(days=4000))
    with pytest.raises(DataError, match="the authority's own certificate ends on"):
        renew_kit(file, "ada", kits)


@pytest.mark.parametrize(
    ("admins", "why"),
    [({"ada": "watch"}, "a site's"), ({"admin": "watch"}, "reserved"), ({"eva": "rule"}, "use one of submit, watch")],
)
def test_administrators_that_cannot_be_are_refused(admins: dict[str, str], why: str) -> None:
    with pytest.raises(StudyError, match=why):
        Project("eyes", "localhost", 8002, ("ada",), admins)
