"""The server signs what it releases, and a hospital stores nothing else; with real certificates, without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nvflare.lighter.utils import load_private_key_file, sign_content

from consilium import engine, packet_files
from consilium.data.profile import DataProfile, read_profile
from consilium.federation.admin import for_federation
from consilium.federation.hospital_site import HospitalSite
from consilium.federation.kits import make_kits
from consilium.federation.project import Project
from consilium.federation.signed_releases import _statement, checker, signer, told
from consilium.hospital import Hospital
from consilium.messages import Request, Seal
from consilium.policy import Refused
from consilium.run_folder import RunFolder
from consilium.store import read_release
from consilium.tree import Packet
from consilium.wires import held
from consilium.wires.flare import FlareWire
from tests.federation.test_service_and_wire import Direct, events
from tests.toy import SIZES, toy_study

RELEASE = Packet('{"shape":1}', {"global/w": torch.arange(6.0).view(2, 3)})
PROFILE = DataProfile(7, (), (), (), (), (0.0, 0.0), (1.0, 1.0), ((0.0, 1.0),) * 3)
REQUEST = Request("deliver", "a-s0-1", "fedavg", merged=3, tensors=held.contents(RELEASE))


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_kits(Project("ours", "localhost", 8002, ("ada",)), tmp_path_factory.mktemp("ours") / "kits")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kits of another consortium, with the same names."""
    return make_kits(Project("theirs", "localhost", 8002, ("ada",)), tmp_path_factory.mktemp("theirs") / "kits")


def sealed(kit: Path, request: Request = REQUEST, site: str = "ada") -> Request:
    return replace(request, seal=signer(kit)(site, request, RELEASE.header))


def test_a_signed_release_is_taken(kits: dict[str, Path]) -> None:
    checker(kits["ada"], "ada")(sealed(kits["server"]), RELEASE)


@pytest.mark.parametrize(
    "change",
    [
        lambda request, packet: (replace(request, seal=None), packet),
        lambda request, packet: (replace(request, run="b-s0-2"), packet),
        lambda request, packet: (replace(request, merged=4), packet),
        lambda request, packet: (replace(request, profile=PROFILE), packet),
        lambda request, packet: (request, packet._replace(header='{"shape":2}')),
        lambda request, packet: (request, packet._replace(tensors={"global/w": packet.tensors["global/w"] + 1})),
    ],
    ids=["no signature", "another run", "another round", "other ranges of images", "another header", "another weight"],
)
def test_what_was_not_signed_is_refused(
    change: Callable[[Request, Packet], tuple[Request, Packet]], kits: dict[str, Path]
) -> None:
    with pytest.raises(Refused) as refused:
        checker(kits["ada"], "ada")(*change(sealed(kits["server"]), RELEASE))
    assert refused.value.word == "signature"


def test_a_release_for_another_site_or_of_another_consortium_is_refused(
    kits: dict[str, Path], others: dict[str, Path]
) -> None:
    check = checker(kits["ada"], "ada")
    for request in (sealed(kits["server"], site="bea"), sealed(others["server"])):
        with pytest.raises(Refused, match="does not hold"):
            check(request, RELEASE)


def test_a_site_is_not_the_server_though_its_certificate_is_of_the_consortium(kits: dict[str, Path]) -> None:
    startup = kits["ada"] / "startup"
    signature = sign_content(_statement("ada", REQUEST, RELEASE.header), load_private_key_file(startup / "client.key"))
    request = replace(REQUEST, seal=Seal(signature, told(startup / "client.crt")))
    with pytest.raises(Refused, match="signed by 'ada', which is not the server"):
        checker(kits["ada"], "ada")(request, RELEASE)


def test_a_run_delivers_signed_releases_and_names_a_site_that_refused_its_own(
    kits: dict[str, Path], others: dict[str, Path], federation: Path, tmp_path: Path
) -> None:
    """The signature is kept beside the release, with what it is of."""
    study = for_federation(toy_study(federation, "apfl", study__rounds=1), tuple(SIZES))
    line = Direct(study, {})
    for name, trusts in (("ada", kits), ("bea", others), ("cid", kits)):
        hospital = Hospital(name, str(federation / name), str(tmp_path / name), ("blob",), "cpu")
        line.sites[name] = HospitalSite(hospital, name, study.to_toml(), checker(trusts["ada"], name))
    folder = RunFolder.create(study, tmp_path / "server")
    engine.run(study, FlareWire(study, folder, line, signer(kits["server"])), folder)
    (undelivered,) = events(folder, "undelivered")
    assert undelivered["site"] == "bea"
    assert "has not signed the release" in undelivered["why"]
    assert not (tmp_path / "bea" / folder.path.name / "release.safetensors").exists()
    packet, facts = read_release(tmp_path / "ada" / folder.path.name)
    seal = facts["seal"]
    request = Request("deliver", facts["run"], facts["method"], merged=facts["merged"], tensors=held.contents(packet))
    profile = read_profile(facts.get("distribution"))
    request = replace(request, seal=Seal(seal["signature"], seal["certificate"]), profile=profile)
    checker(kits["ada"], "ada")(request, packet._replace(header=seal["header"]))
    assert packet_files.digest_of(packet)
