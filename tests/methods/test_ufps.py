"""UFPS: every module on and off, what leaves the site, the shares, and the ways to climb."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files, tree
from consilium.contract import Stage, run_in_process
from consilium.data.phantoms import write_phantom
from consilium.describe import describe, describe_all
from consilium.errors import StudyError
from consilium.learning.sharp_steps import STRATEGIES, Climb, Masks, _joined, sharp_fit
from consilium.methods.fedasam import sharp_round
from consilium.methods.fedavg_pl import FedAvgPL
from consilium.methods.teachers import TeacherLabels
from consilium.methods.ufps import UFPS
from consilium.methods.ufps_modules import LabelNoise, SharpSteps, begun, first_step
from consilium.networks.parts import decoder_names
from consilium.networks.plain_unet import PlainUNet
from consilium.networks.unet import UNet
from consilium.networks.vgg import SmallVGG
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.site import Round
from consilium.study_reading import load_study
from tests.toy import toy_study

STUDIES = Path(__file__).parents[2] / "studies"
OFF = {
    "method__uncertainty__scheduler": "none",
    "method__noise__arce": 0.0,
    "method__uncertainty__parts": "none",
    "method__main_teacher__labels": "pretrained",
    "method__sharpness__strategy": "none",
}
VARIED = {"task__patch": [12, 12], "task__augment": ["flip"], "task__loss": "dice+ce"}


def last(result: Result, kind: Any = UFPS) -> Any:
    return packet_files.load(result.folder / "last.safetensors", kind.Server)


def test_with_all_modules_off_it_is_fedavg_with_pseudo_labels(organs: Path, tmp_path: Path) -> None:
    plain = run_in_process(toy_study(organs, "fedavg-pl", study__rounds=2, **VARIED), tmp_path)
    off = run_in_process(toy_study(organs, "ufps", study__rounds=2, **VARIED, **OFF), tmp_path)
    assert last(plain, FedAvgPL).global_.digest == last(off).global_.digest


MODULES = {
    "scheduler": {
        "method__uncertainty__scheduler": "tail-shift",
        "method__uncertainty__weigh_from": 2.0,
        "method__uncertainty__weigh_until": 9.0,
    },
    "arce": {"method__noise__arce": 0.01, "method__noise__start": 2.0},
    "parts": {"method__uncertainty__parts": "decoder", "method__uncertainty__trust_from": 2.0},
    "gmt": {
        "method__main_teacher__labels": "global",
        "method__main_teacher__start": 2.0,
        "method__main_teacher__guard": False,
    },
    "sharpness": {"method__sharpness__strategy": "susam", "method__sharpness__start": 2.0},
}


@pytest.fixture(scope="module")
def without(organs: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    study = toy_study(organs, "ufps", study__rounds=2, method__teachers__rounds=1, **VARIED, **OFF)
    return last(run_in_process(study, tmp_path_factory.mktemp("off"))).global_


@pytest.mark.parametrize("module", MODULES)
def test_every_module_alone_changes_the_result(module: str, organs: Path, tmp_path: Path, without: Any) -> None:
    study = toy_study(
        organs, "ufps", study__rounds=2, method__teachers__rounds=1, **{**VARIED, **OFF, **MODULES[module]}
    )
    assert last(run_in_process(study, tmp_path)).global_.digest != without.digest


@pytest.mark.parametrize(
    ("start", "total", "step"),
    [(0.0, 10, 0), (0.02, 500, 10), (0.4, 500, 200), (0.6, 500, 300), (0.6, 3, 2), (1.0, 9, 0), (300.0, 500, 299)],
)
def test_starts_are_shares_or_round_numbers(start: float, total: int, step: int) -> None:
    assert first_step(start, total) == step


def test_what_is_on_in_the_papers_rounds() -> None:
    method = UFPS()

    def on(step: int) -> list[str]:
        round = Round(step + 500, "train", step, 500, 500)
        sharp = method.sharpness
        kinds = {
            "ws": method.uncertainty.weighs,
            "ua": method.uncertainty.trusts,
            "climb": sharp.climbs,
            "masks": sharp.masks,
        }
        arce = ["arce"] if begun(method.noise.start, round) else []
        return [name for name, is_on in kinds.items() if is_on(round)] + arce

    assert on(9) == []
    assert on(10) == on(199) == ["ws"]
    assert on(200) == on(299) == ["arce"]
    assert on(300) == on(305) == ["ua", "climb", "masks", "arce"]
    assert on(301) == on(304) == ["ua", "climb", "arce"]


def test_what_leaves_the_site(organs: Path, tmp_path: Path) -> None:
    """The model, from UA's start two numbers, and in a round of masks one bit per parameter."""
    starts = {"method__uncertainty__trust_from": 2.0, "method__sharpness__start": 2.0}
    stage = Stage(toy_study(organs, "ufps", method__teachers__rounds=1, **starts), tmp_path)
    stage.round(0)
    packets = {}
    for index in (1, 2, 3):
        order = tree.flatten(stage.method.send(stage.server, stage.roster["ada"], stage.rounds[index]))
        packets[index] = stage.train("ada", order, index, index - 1)
        stage.round(index)
    uplinks = {index: tree.unflatten(packet, UFPS.Uplink) for index, packet in packets.items()}
    assert [uplinks[i].uncertainty_mean is None for i in (1, 2, 3)] == [True, False, False]
    assert [uplinks[i].mask is None for i in (1, 2, 3)] == [True, False, True]
    names = stage.task.parameters()
    d = sum(tensor.numel() for name, tensor in uplinks[2].global_.items() if name in names)
    assert packets[2].tensors["mask"].numel() == math.ceil(d / 8)  # d / 8 bytes against 4 d: a thirty-second
    assert packets[2].nbytes() - packets[3].nbytes() == pytest.approx(d / 8, abs=100)
    mask = uplinks[2].mask
    assert mask is not None and int(mask.sum()) == int(0.4 * d)
    assert 0 < uplinks[2].uncertainty_mean < math.log(3) / 3
    disputed = stage.server.disputed
    assert disputed is not None and disputed.any() and not disputed.all()


def test_the_journal_shows_the_mask(organs: Path, tmp_path: Path) -> None:
    study = toy_study(
        organs, "ufps", method__teachers__rounds=1, method__sharpness__start=2.0, method__uncertainty__parts="none"
    )
    result = run_in_process(study, tmp_path)
    events = [e for e in RunFolder.open(result.folder).events() if e["event"] == "train" and e["phase"] == "train"]
    up = {event["round"]: event["bytes_up"] for event in events if event["site"] == "ada"}
    d = sum(t.numel() for t in last(result).global_.values())
    assert up[2] - up[3] == pytest.approx(d / 8, abs=200)


def test_with_one_site_nothing_is_disputed(organs: Path, tmp_path: Path) -> None:
    everything = {"data__annotated": {"ada": "all"}, "study__sites": ["ada"]}
    result = run_in_process(
        toy_study(organs, "ufps", study__rounds=2, method__sharpness__start=0.0, **everything), tmp_path
    )
    disputed = last(result).disputed
    assert disputed is not None and not disputed.any()


# ------------------------------------------------------------------------------------------------ the server


def replies_of(stage: Stage, **numbers: tuple[float, float]) -> dict[str, Any]:
    start = stage.task.initial()
    return {
        name: UFPS.Uplink(start.map(lambda t, i=i: torch.full_like(t, float(i))), None, 0.1, 1, mu, sigma)  # type: ignore[misc]
        for i, (name, (mu, sigma)) in enumerate(numbers.items(), start=1)
    }


@pytest.mark.parametrize("parts", ["decoder", "encoder", "whole"])
def test_only_the_trusted_part_is_averaged_by_trust(parts: str, organs: Path, tmp_path: Path) -> None:
    """Sites of equal size: shares of a third elsewhere; ada, the calmest, has more where trust counts."""
    fields = {
        "method__uncertainty__parts": parts,
        "method__uncertainty__trust_from": 0.0,
        "method__uncertainty__tau_mean": 0.05,
        "method__uncertainty__tau_variance": 0.001,
    }
    stage = Stage(toy_study(organs, "ufps", **fields), tmp_path)
    replies = replies_of(stage, ada=(0.03, 2e-4), bea=(0.04, 5e-4), cid=(0.05, 9e-4))
    server = stage.method.merge(stage.server, replies, Round(3, "train", 0, 3))
    decoder = decoder_names(stage.task.network())
    assert list(server.global_) == list(stage.server.global_)  # the network's own order
    for name, tensor in server.global_.items():
        trusted = parts == "whole" or (name in decoder) == (parts == "decoder")
        calm = [(x + y + 1 / 3) / 3 for x, y in ((0.4018, 0.4456), (0.3289, 0.3301), (0.2693, 0.2243))]
        expected = sum(i * share for i, share in enumerate(calm, start=1)) if trusted else 2.0
        assert tensor.mean().item() == pytest.approx(expected, abs=1e-2 if trusted else 1e-6)
        assert not trusted or tensor.mean().item() < 1.9


def test_before_it_starts_everything_is_averaged_by_cases(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "ufps"), tmp_path)
    replies = {k: replace(r, uncertainty_mean=None) for k, r in replies_of(stage, ada=(0, 0), bea=(0, 0)).items()}
    server = stage.method.merge(stage.server, replies, Round(3, "train", 0, 3))
    assert all(tensor.mean().item() == pytest.approx(1.5) for tensor in server.global_.values())


def test_gmt_can_wait_until_the_global_model_matches_everywhere(organs: Path, tmp_path: Path) -> None:
    stage = Stage(
        toy_study(organs, "ufps", method__main_teacher__when="match", method__main_teacher__start=0.0), tmp_path
    )
    round = Round(4, "train", 1, 3, 3)
    server, method = stage.server, stage.method
    card = stage.roster["ada"]
    assert not method.send(server, card, round).gmt
    replies = replies_of(stage, ada=(0.1, 0.1), bea=(0.1, 0.1), cid=(0.1, 0.1))
    told = {name: replace(reply, matches=name != "cid") for name, reply in replies.items()}
    server = method.merge(server, told, round)
    assert server.matched == ("ada", "bea") and not method.send(server, card, round).gmt
    server = method.merge(server, {"cid": replace(replies["cid"], matches=True)}, round)
    assert method.send(server, card, round).gmt
    at_a_round = Stage(toy_study(organs, "ufps", method__main_teacher__start=2.0), tmp_path / "round")
    starts = [at_a_round.method.send(at_a_round.server, card, r).gmt for r in at_a_round.rounds[3:]]
    assert starts == [False, True, True]


def test_decoders_by_module() -> None:
    plain = decoder_names(PlainUNet((4, 8, 8)).build(2, 1, 3))
    assert {name.split(".")[0] for name in plain} == {"decoder", "head"}
    network = UNet((4, 8, 16), 1).build(2, 1, 3)
    names = decoder_names(network)
    assert names == {n for n in network.state_dict() if n.startswith(("net.model.2.", "net.model.1.submodule.2."))}
    assert names
    with pytest.raises(StudyError, match="parts = 'whole'"):
        decoder_names(SmallVGG((4,)).build(2, 1, 3))


# ------------------------------------------------------------------------------------------------ climbing


@pytest.fixture(scope="module")
def climbing(organs: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One site's round in each of the ways, from the same weights, on its own annotation."""
    study = toy_study(organs, "fedavg", local__optimizer="sgd", local__momentum=0.0, local__lr=0.1, local__batch_size=2)
    site = Stage(study, tmp_path_factory.mktemp("climb")).workers["cid"].site
    start, round = site.task.initial(), Round(3, "train", 1, 4)

    def climb(strategy: str, masks: Masks | None = None, **fields: Any) -> Any:
        known = masks or Masks(True, 3, None, None, None)
        how = Climb(strategy, **{"rho": 0.5, **fields})
        return sharp_fit(site, start, round, how, lambda b: lambda out: site.task.loss(out, b), known)

    return climb, site, start, round


def test_the_ways_of_table_s8_differ(climbing: Any) -> None:
    climb, _, start, _ = climbing
    done = {strategy: climb(strategy) for strategy in STRATEGIES if strategy != "susam"}
    assert len({c.weights.digest for c in done.values()} | {start.digest}) == len(STRATEGIES)
    assert {c.steps for c in done.values()} == {4}
    assert all(math.isfinite(c.loss) for c in done.values())
    assert done["top-k"].chosen is not None and done["usam"].chosen is None


def test_asam_on_the_sites_own_data_is_fedasams_step(climbing: Any) -> None:
    climb, site, start, round = climbing
    weights, _, steps, _ = sharp_round(site, start, 0.5, 0.001, round)
    assert climb("asam").weights.digest == weights.digest and steps == 4


def test_masks_that_keep_everything_change_nothing(climbing: Any) -> None:
    climb, *_ = climbing
    full = climb("usam").weights.digest
    assert climb("top-k", keep=1.0).weights.digest == full == climb("susam", keep=1.0).weights.digest
    assert climb("top-k", keep=0.5).weights.digest != full


def test_explored_positions_matter_and_stay_until_the_next_update(climbing: Any) -> None:
    climb, site, _, round = climbing
    first = climb("susam", keep=0.3)
    d = len(first.chosen)
    assert int(first.chosen.sum()) == int(0.3 * d)
    assert first.momentum is not None and (first.momentum >= 0).all()
    other = torch.zeros(d, dtype=torch.bool)
    other[: d // 2] = True
    later = Masks(False, 3, first.chosen, other, first.momentum)
    with_explored, plain = climb("susam", later, keep=0.3), climb("susam", replace(later, disputed=None), keep=0.3)
    assert with_explored.weights.digest != plain.weights.digest
    assert with_explored.chosen is first.chosen and with_explored.momentum is first.momentum
    one, two, new = (
        _joined(first.chosen, replace(later, drawn=drawn), Climb(), site, replace(round, index=index), "")
        for index, drawn in ((3, 3), (4, 3), (8, 8))
    )
    assert torch.equal(one, two) and not torch.equal(one, new)
    extra = one & ~first.chosen
    assert int(extra.sum()) == min(int(0.1 * d), int((other & ~first.chosen).sum()))
    assert not (extra & ~other).any()


# ------------------------------------------------------------------------------------------------ volumes


@pytest.fixture(scope="module")
def abdomen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_phantom("abdomen", folder := tmp_path_factory.mktemp("phantom") / "abdomen", cases=14, size=24)
    return folder


def test_the_ready_study_runs_every_module_on_volumes(abdomen: Path, tmp_path: Path) -> None:
    """Four hospitals, four organs, three dimensions, a supervised encoder; the fourth hospital is outside."""
    path = STUDIES / "abdomen_ufps.toml"
    assert path.read_text().startswith("# consilium run studies/abdomen_ufps.toml\n")
    small = ["study.rounds=3", "preprocess.size=[8, 12, 12]", "task.widths=[4, 8, 8]", "method.teachers.rounds=1"]
    result = run_in_process(load_study(path, [f'data.federation="{abdomen}"', *small]), tmp_path)
    rows = [row for row in RunFolder.open(result.folder).rows() if row.phase == "best" and row.split == "test"]
    assert {row.label for row in rows if row.site == "word"} >= {"kidney", "liver", "spleen", "pancreas"}
    assert any(row.outside for row in rows)
    assert last(result).disputed is not None  # sUSAM has begun


def test_the_papers_study_starts_modules_in_the_papers_rounds(abdomen: Path) -> None:
    study = load_study(STUDIES / "ufps_base.toml", [f'data.federation="{abdomen}"'])
    method: Any = study.method
    assert (method.uncertainty.weigh_from, method.uncertainty.weigh_until) == (11, 201)
    assert (method.noise.start, method.uncertainty.trust_from) == (201, 300)
    assert (method.main_teacher.start, method.sharpness.start) == (300, 300)
    assert (study.plan.rounds, study.task_fields.patch, study.local.lr) == (500, (80, 192, 192), 1e-4)
    shape = study.task.shape()
    assert sum(tensor.numel() for tensor in shape.values()) == pytest.approx(30.79e6, rel=0.02)  # the published network


# ------------------------------------------------------------------------------------------------ tables of a study


def test_modules_are_tables_of_a_study(organs: Path, tmp_path: Path) -> None:
    """In the file, with --set, and in the run's own study, which says every field."""
    path = tmp_path / "study.toml"
    path.write_text(f'[data]\nfederation = "{organs}"\n[method]\nname = "ufps"\n[method.sharpness]\nrho = 0.2\n')
    method: Any = load_study(path).method
    assert method.sharpness == SharpSteps(rho=0.2) and method.noise == LabelNoise()
    study = load_study(path, ["method.sharpness.rho=0.3", 'method.teachers.labels="live"'])
    assert study.method == replace(method, sharpness=SharpSteps(rho=0.3), teachers=TeacherLabels(labels="live"))
    path.write_text(study.to_toml())
    assert load_study(path).method == study.method and load_study(path).hash == study.hash
    for change, sentence in {
        "method.sharpness.roh=0.3": r"\[method.sharpness\] has no key 'roh'; did you mean 'rho'",
        "method.sharpnes.rho=0.3": r"has no key 'sharpnes'; did you mean 'sharpness'",
        'method.noise="none"': r"noise = 'none': it must be a table",
        "method.noise.arce=true": r"\[method.noise\] arce = True: it must be a number",
    }.items():
        with pytest.raises(StudyError, match=sentence):
            load_study(path, [change])


def test_the_fields_of_every_module_are_described() -> None:
    text = describe("ufps")
    for section in ("method.teachers", "method.noise", "method.uncertainty", "method.main_teacher", "method.sharpness"):
        assert f"Fields of [{section}]:" in text
    assert "  keep_share = 0.4                      T_L, the share of parameters that are perturbed" in text
    (facts,) = describe_all(["ufps"])
    assert facts["fields"]["sharpness"]["rho"] == 0.7


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"method__uncertainty__scheduler": "head"},
            "scheduler = 'head': it must be one of tail-shift, base-decrement, round-trip",
        ),
        ({"method__uncertainty__parts": "norm"}, "parts = 'norm': it must be one of decoder, encoder, whole, none"),
        (
            {"method__main_teacher__labels": "union"},
            "labels = 'union': it must be one of intersection, global, pretrained",
        ),
        ({"method__main_teacher__when": "soon"}, "when = 'soon': it must be one of round, match"),
        ({"method__sharpness__strategy": "sam"}, "strategy = 'sam': it must be one of susam, usam"),
        (
            {"method__uncertainty__trust_from": 1.5},
            r"\[method.uncertainty\] trust_from = 1.5: give a share of the rounds below 1, or a round's number",
        ),
        ({"method__noise__arce": -1.0}, "arce = -1.0: it must be a number from 0 up"),
        ({"method__main_teacher__agreement": 2.0}, r"agreement = 2.0: it must be in \[0, 1\]"),
        ({"method__sharpness__momentum": 1.0}, r"momentum = 1.0: it must be in \[0, 1\)"),
        ({"method__uncertainty__width": 0.0}, "width = 0.0: it must be positive"),
        ({"method__sharpness__mask_every": 0}, "mask_every = 0: it must be at least 1"),
        ({"method__sharpness__rho": -0.1}, "rho = -0.1: it must be a number from 0 up"),
        ({"local__precision": "float16"}, "'float16' cannot be scaled over two steps"),
    ],
)
def test_studies_that_cannot_work(changes: dict[str, Any], sentence: str, organs: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=sentence):
        run_in_process(toy_study(organs, "ufps", **changes), tmp_path)
