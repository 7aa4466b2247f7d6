"""MOON*, FedAlign*, CPS* and MS-KD*: by hand, at their limits, and with each of their components off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilium import packet_files
from consilium.contract import Stage, run_in_process
from consilium.errors import StudyError
from consilium.learning.stage_outputs import levels, pooled_bottleneck, stage_outputs
from consilium.methods.cps_pl import CPSPL, cross_entropy, labels_of
from consilium.methods.fedalign_pl import FedAlignPL, alignment, kept, slimmed, top_singular, transmitting
from consilium.methods.fedavg_pl import FedAvgPL
from consilium.methods.moon_pl import MOONPL, contrast
from consilium.methods.ms_kd_pl import MSKDPL, feature_distance, logit_distance, teacher_networks
from consilium.methods.pseudo_labelled import PseudoLabelled
from consilium.methods.teachers import taught
from consilium.networks.plain_unet import PlainUNet, Supervised
from consilium.networks.unet import UNet
from consilium.simulation import Result
from consilium.site import Round, Site
from tests.toy import toy_study


@dataclass(frozen=True)
class Taught:
    """One site with its teachers, ready for a round of any method of the family."""

    site: Site
    teaching: Any
    frame: PseudoLabelled

    def round(self, method: PseudoLabelled, **memory: Any) -> tuple[Any, Any]:
        """The site's first round: its uplink and memory."""
        start = self.site.task.initial()
        more = {"second": self.site.task.initial(draw=1)} if isinstance(method, CPSPL) else {}
        got = method.Downlink(start, {}, False, **more)
        kept_ = method.Memory(self.teaching, **memory)
        teach = self.frame._teach(self.site, self.teaching)
        return method.learn(self.frame._with_maps(self.site, self.teaching), kept_, got, teach, Round(3, "train", 1, 4))


@pytest.fixture(scope="module")
def ada(organs: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    study = toy_study(organs, "fedavg-pl", local__batch_size=4, local__lr=0.02)
    stage = Stage(study, tmp_path_factory.mktemp("family"))
    own = {name: taught(w.site, stage.method.remember(w.site).teaching, 2, 2)[0] for name, w in stage.workers.items()}
    site = stage.workers["ada"].site
    others: Any = {name: teaching.best for name, teaching in own.items() if name != "ada"}
    return Taught(site, stage.method._with_teachers(site, own["ada"], others), stage.method)


@pytest.fixture(scope="module")
def plain(ada: Taught) -> Any:
    return ada.round(FedAvgPL())[0]


# ------------------------------------------------------------------------------------------------ limits

OFF = {
    "moon-pl": {"method__mu": 0.0},
    "fedalign-pl": {"method__mu": 0.0},
    "cps-pl": {"method__weight": 0.0},
    "ms-kd-pl": {"method__logits": 0.0, "method__features": 0.0},
}


def last(result: Result, study: Any) -> Any:
    return packet_files.load(result.folder / "last.safetensors", study.method.Server)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cps-pl" else [pytest.mark.slow]) for name in OFF]
)
def test_without_its_extra_term_a_run_is_fedavg_with_pseudo_labels(name: str, organs: Path, tmp_path: Path) -> None:
    """Bit by bit; of CPS* the first network."""
    fields = {"study__rounds": 2, "method__teachers__rounds": 1, "local__batch_size": 4}
    studies = [toy_study(organs, "fedavg-pl", **fields), toy_study(organs, name, **fields, **OFF[name])]
    average, off = (last(run_in_process(study, tmp_path), study) for study in studies)
    assert average.global_.digest == off.global_.digest


@pytest.mark.parametrize(
    "method", [MOONPL(mu=0.0), FedAlignPL(mu=0.0), CPSPL(weight=0.0), MSKDPL(logits=0, features=0)]
)
def test_without_its_extra_term_a_round_is_that_of_fedavg(method: Any, ada: Taught, plain: Any) -> None:
    previous = {"previous": ada.site.task.initial(draw=2)} if isinstance(method, MOONPL) else {}
    uplink, _ = ada.round(method, **previous)
    assert (uplink.global_.digest, uplink.loss) == (plain.global_.digest, plain.loss)


# ------------------------------------------------------------------------------------------------ components


def changed(one: Any, other: Any) -> bool:
    """Whether both the weights and the loss of two rounds differ."""
    return one.global_.digest != other.global_.digest and one.loss != pytest.approx(other.loss, rel=1e-6)


def test_components_of_moon(ada: Taught, plain: Any) -> None:
    """The contrast, its negative from the last round, and its temperature."""
    first, memory = ada.round(MOONPL())
    assert first.global_.digest == plain.global_.digest  # there is no negative yet
    assert memory.previous.digest == first.global_.digest
    second, _ = ada.round(MOONPL(), previous=memory.previous)
    other, _ = ada.round(MOONPL(), previous=ada.site.task.initial(draw=2))
    warm, _ = ada.round(MOONPL(temperature=5.0), previous=memory.previous)
    assert changed(second, plain) and changed(second, other) and changed(second, warm)


def test_components_of_fedalign(ada: Taught, plain: Any) -> None:
    """The alignment, and the slimmed block: at full width there is nothing to align."""
    quarter, half, full = (ada.round(FedAlignPL(width=width))[0] for width in (0.25, 0.5, 1.0))
    assert changed(quarter, plain) and changed(quarter, half)
    assert full.loss == pytest.approx(plain.loss, rel=1e-3)
    assert quarter.loss == pytest.approx(1.45 * plain.loss, rel=0.1)  # the alignment is 0.45 of the loss


def test_components_of_cps(ada: Taught, plain: Any) -> None:
    """The second network, and the labels that the two make for each other."""
    both, _ = ada.round(CPSPL())
    alone, _ = ada.round(CPSPL(weight=0.0))
    assert changed(both, plain)
    assert both.second.digest != alone.second.digest  # the first labels for the second, too
    assert both.second.digest != both.global_.digest
    assert alone.second.digest != ada.site.task.initial(draw=1).digest  # it learns from the teachers


def test_components_of_ms_kd(ada: Taught, plain: Any) -> None:
    """Logits, features, and every level of features."""
    whole, logits, features = (ada.round(MSKDPL(logits=x, features=y))[0] for x, y in ((1, 1), (1, 0), (0, 1)))
    assert changed(whole, logits) and changed(whole, features)
    assert changed(logits, plain) and changed(features, plain)
    count = len(levels(ada.site.task.network()))
    assert count == 2
    for left_out in range(1, count + 1):
        rest = tuple(number for number in range(1, count + 1) if number != left_out)
        assert changed(ada.round(MSKDPL(levels=rest))[0], whole)


def test_both_networks_of_cps_are_averaged(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "cps-pl"), tmp_path)
    start = stage.server
    assert start.second.digest != start.global_.digest
    replies = {
        name: CPSPL.Uplink(start.global_ * factor, None, 0.1, 1, start.second * (factor + 1))
        for name, factor in (("ada", 1.0), ("bea", 3.0))
    }
    server = stage.method.merge(start, replies, Round(3, "train", 0, 3))
    assert (server.global_ - start.global_ * 2).norm() < 1e-5  # sites of one size
    assert (server.second - start.second * 3).norm() < 1e-5
    sent = stage.method.send(server, stage.roster["ada"], Round(4, "train", 1, 3))
    assert sent.second.digest == server.second.digest
    assert stage.method.release(server, None).global_.digest == server.global_.digest  # the first is used


# ------------------------------------------------------------------------------------------------ by hand


def test_the_contrast_by_hand() -> None:
    """cos = 1 with the near and 0 with the far: −log(e² / (e² + 1)) at τ = 0.5; the other case the other way round."""
    now = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    near, far = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    good, bad = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert contrast(now, near, far, 0.5).item() == pytest.approx((good + bad) / 2, rel=1e-5)


@pytest.mark.parametrize("network", [PlainUNet((4, 8, 16)).build(2, 1, 3), UNet((4, 8, 16), 1).build(2, 1, 3)])
def test_features_are_those_of_the_lowest_level(network: nn.Module) -> None:
    images = torch.rand(2, 1, 16, 16)
    answer, pooled = pooled_bottleneck(network.eval(), images)
    assert isinstance(answer, Tensor) and answer.shape == (2, 3, 16, 16) and pooled.shape == (2, 16)
    with stage_outputs(levels(network)) as outputs:
        network(images)
    torch.testing.assert_close(pooled, outputs[2].mean((2, 3)))
    assert [tuple(o.shape[1:]) for o in outputs[:3]][2] == (16, 4, 4)
    assert all(o.shape[1] in (4, 8, 16) for o in outputs) and len(outputs) >= 4
    assert not any(stage._forward_hooks for stage in levels(network))  # none is left behind


def test_the_largest_singular_value_by_hand() -> None:
    torch.manual_seed(0)
    matrices = torch.rand(3, 4, 6) + 0.1  # positive, so that the iteration from ones finds the largest
    torch.testing.assert_close(top_singular(matrices), torch.linalg.svdvals(matrices)[:, 0], rtol=1e-4, atol=1e-5)
    assert top_singular(torch.zeros(1, 2, 2)).item() == pytest.approx(1e-6)


def test_the_transmitting_matrix_by_hand() -> None:
    """Above: one channel 1 2 / 3 4, averaged to 2.5; below: two channels of one voxel, 2 and −1."""
    above, below = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[[[2.0]], [[-1.0]]]])
    assert transmitting(above, below).tolist() == [[[5.0, -2.5]]]
    volume = transmitting(torch.ones(1, 2, 4, 4, 4), torch.ones(1, 3, 2, 2, 2))
    assert volume.tolist() == [[[1.0] * 3] * 2]
    assert alignment(above, below, below[:, :1]).item() == pytest.approx((5 - math.hypot(5, 2.5)) ** 2, rel=1e-5)


def test_a_slimmed_block_is_one_with_fewer_channels() -> None:
    """Against the same block cut by hand: the first quarter of every convolution's and normalisation's channels."""
    torch.manual_seed(0)
    network: Any = PlainUNet((4, 8)).build(2, 1, 2)
    block, images = network.encoder[1], torch.rand(2, 4, 8, 8)
    with slimmed(block, 0.25):
        slim = block(images)
    conv, norm, _ = block.first
    out = nn.functional.conv2d(images, conv.weight[:2], conv.bias[:2], 2, 1)
    out = nn.functional.leaky_relu(nn.functional.instance_norm(out, None, None, norm.weight[:2], norm.bias[:2]), 0.01)
    conv, norm = block.second
    out = nn.functional.conv2d(out, conv.weight[:2, :2], conv.bias[:2], 1, 1)
    out = nn.functional.leaky_relu(nn.functional.instance_norm(out, None, None, norm.weight[:2], norm.bias[:2]), 0.01)
    torch.testing.assert_close(slim[:, :2], out, rtol=1e-4, atol=1e-5)
    assert not slim[:, 2:].any()
    assert (kept(8, 0.25), kept(3, 0.25), kept(1, 0.1)) == (2, 1, 1)


def test_labelling_leaves_no_statistics() -> None:
    """To label for another network is no training: running statistics stay, and the network goes on training."""
    network = UNet((4, 8), 1, norm="batch").build(2, 1, 3)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    labels_of(network, torch.rand(2, 1, 8, 8))
    assert network.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())


def test_cross_entropy_with_the_other_s_labels_by_hand() -> None:
    """Probabilities 3/4 and 1/4 for the label: −(ln 0.75 + ln 0.25) / 2; heads inside count by their weight."""
    chances = torch.tensor([[[[0.75, 0.75]], [[0.25, 0.25]]]])
    labels, value = torch.tensor([[[0, 1]]]), -(math.log(0.75) + math.log(0.25)) / 2
    assert cross_entropy(chances.log(), labels).item() == pytest.approx(value, rel=1e-5)
    deep = Supervised(chances.log(), ((0.5, chances.log()),))
    assert cross_entropy(deep, labels).item() == pytest.approx(1.5 * value, rel=1e-5)


def test_the_distance_of_logits_by_hand() -> None:
    """The teacher knows the second of two labels; the student's first counts as background for it."""
    student = torch.tensor([[[[0.3, 0.2]], [[0.3, 0.2]], [[0.4, 0.6]]]]).log()
    teacher = torch.tensor([[[[0.5, 0.5]], [[0.5, 0.5]]]]).log()
    where = torch.tensor([[[True, False]]])
    expected = 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)
    assert logit_distance(student, teacher, [1], where).item() == pytest.approx(expected, rel=1e-5)
    assert logit_distance(student, teacher, [1], torch.zeros_like(where)).item() == 0  # no organ, nothing to learn


def test_the_distance_of_features_by_hand() -> None:
    """Two channels of 2 × 2; of the image's 4 × 4 one voxel is an organ, in the upper left."""
    student, teacher = torch.zeros(1, 2, 2, 2), torch.full((1, 2, 2, 2), 3.0)
    teacher[0, 1, 0, 0] = 1.0
    where = torch.zeros(1, 4, 4, dtype=torch.bool)
    where[0, 1, 1] = True
    assert feature_distance(student, teacher, where).item() == pytest.approx((9 + 1) / 2)
    assert feature_distance(student, teacher, torch.zeros_like(where)).item() == 0


def test_every_teacher_is_heard_with_the_labels_it_knows(ada: Taught) -> None:
    networks = teacher_networks(ada.site, ada.teaching)
    assert [known for known, _ in networks] == [("round",), ("square",), ("round", "square")]
    assert not any(parameter.requires_grad for _, network in networks for parameter in network.parameters())
    outputs = [network(torch.rand(1, 1, 16, 16)).shape[1] for _, network in networks]
    assert outputs == [2, 2, 3]


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("moon-pl", {"method__mu": -1.0}, "mu = -1.0: it must be a number from 0 up; 0 is fedavg-pl"),
        ("moon-pl", {"method__temperature": 0.0}, "temperature = 0.0: it must be positive"),
        ("fedalign-pl", {"method__mu": -1.0}, "mu = -1.0: it must be a number from 0 up"),
        ("fedalign-pl", {"method__width": 0.0}, r"width = 0.0: it must be in \(0, 1\]"),
        ("cps-pl", {"method__weight": -0.5}, "weight = -0.5: it must be a number from 0 up"),
        ("ms-kd-pl", {"method__features": -0.5}, "features = -0.5: it must be a number from 0 up"),
        ("ms-kd-pl", {"method__levels": [0]}, r"levels = \[0\]: levels count from 1"),
        ("ms-kd-pl", {"method__levels": [9]}, r"levels = \[9\]: this network has 2 levels with features"),
    ],
)
def test_studies_that_cannot_work(
    name: str, changes: dict[str, Any], sentence: str, organs: Path, tmp_path: Path
) -> None:
    with pytest.raises(StudyError, match=sentence):
        run_in_process(toy_study(organs, name, **changes), tmp_path)


@pytest.mark.parametrize("name", ["moon-pl", "fedalign-pl", "ms-kd-pl"])
def test_a_network_without_known_stages_is_refused(name: str, organs: Path, tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text(
        "import torch\n"
        "class Flat(torch.nn.Conv2d):\n"
        "    def __init__(self, dimensions, channels, outputs):\n"
        "        super().__init__(channels, outputs, 3, padding=1)\n"
    )
    none: dict[str, Any] = {"task__widths": None, "task__residual_units": None}
    study = toy_study(organs, name, **none, task__network=f"{tmp_path / 'flat.py'}:Flat")
    with pytest.raises(StudyError, match="looks inside the network, and the stages of this one are not known"):
        run_in_process(study, tmp_path)
