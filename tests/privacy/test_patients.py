"""DP-SGD by patient: one bounded contribution each, the noise that is told, the same bits however a run is made."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.contract import Stage, run_and_copy, state
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import StudyError
from consilium.learning.discriminant import bounded_sums
from consilium.learning.fit import Job, fit
from consilium.learning.per_patient import PatientGradients
from consilium.left_log import left
from consilium.local_training import Local
from consilium.privacy import accounting
from consilium.privacy.sampling import covered, draws, sampling
from consilium.run_folder import RunFolder
from consilium.simulation import resume
from consilium.site import Round, Site, SiteCard
from consilium.site_opening import open_worker
from consilium.study import Study
from consilium.tree import flatten
from tests.toy import SIZES, draw, toy_study

ROUND = Round(0, "train", 0, 3)
ROSTER = {name: SiteCard(name, i, counts[0], ("blob",)) for i, (name, counts) in enumerate(SIZES.items())}


def private_study(federation: Path, method: str = "fedavg", **changes: Any) -> Study:
    how = {"privacy__unit": "patient", "privacy__clip": 0.5, "privacy__noise": 1.0}
    return toy_study(federation, method, **{**how, **changes})


def opened(study: Study, place: Path, site: str = "ada", **changes: Any) -> Site:
    """A site of a study, with some of its privacy changed and an empty account."""
    found = open_worker(study, study.federation(), site, ROSTER, place).site
    assert found.private is not None
    return replace(found, private=replace(found.private, spent=[], **changes))


# ------------------------------------------------------------------------------------------- one patient, one bound


class Scale(nn.Module):
    """w x: the gradient of a case's output is the case itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.w * images


def cases(values: list[float], patients: tuple[int, ...]) -> Batch:
    images = torch.tensor(values)[:, None]
    return Batch(images, torch.zeros(len(values)), tuple(map(str, values)), patients=patients)


def mean_output(output: Tensor, batch: Batch) -> Tensor:
    return output.mean()


@pytest.mark.parametrize("vectorised", [True, False])
def test_a_patient_is_clipped_as_a_whole(vectorised: bool) -> None:
    """Patient 0 has cases 2, 4 and, in the next batch, 6: mean 4, clipped to 1. Patient 1 has 0.25: as it is."""
    network = PatientGradients(Scale())
    network.vectorised = vectorised
    batches = [cases([2.0, 4.0], (0, 0)), cases([6.0, 0.25], (0, 1))]
    found = network.summed(dict(network.module.named_parameters()), batches, mean_output, clip=1.0)
    assert found.gradient.tolist() == pytest.approx([1.25])
    assert (found.cases, found.loss) == (4, pytest.approx(12.25))
    loose = network.summed(dict(network.module.named_parameters()), batches, mean_output, clip=10.0)
    assert loose.gradient.tolist() == pytest.approx([4.25])


@pytest.fixture(scope="module")
def one_with_ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy federation, in which all but one of the training cases of ada (ten of eleven) are of one patient."""
    folder = tmp_path_factory.mktemp("ten") / "federation"
    write_federation_toml(folder, "segmentation", ["blob"], 2, 1)
    for site in SIZES:
        rows = []
        for sub in ("images", "labels"):
            (folder / site / sub).mkdir(parents=True)
        for index in range(15):
            image, mask = draw(site, index)
            paths = [folder / site / sub / f"{index}.png" for sub in ("images", "labels")]
            Image.fromarray(image).save(paths[0])
            Image.fromarray(mask).save(paths[1])
            split = "train" if index < 11 else "valid" if index < 13 else "test"
            rows.append(Case(f"{site}{index}", "anna" if index < 10 else f"p{index}", split, paths[0], paths[1]))
        write_site(folder, site, rows)
    return folder


def test_ten_cases_of_one_patient_are_one_bounded_contribution(one_with_ten: Path, tmp_path: Path) -> None:
    """The network's real gradients: anna's ten cases, in four batches, add up to exactly one clip."""
    site = opened(private_study(one_with_ten), tmp_path)
    assert list(site.data.patients()) == ["anna", "p10"]
    network = PatientGradients(site.task.network())
    values = dict(network.module.named_parameters())
    both = list(site.data.of_patients([0, 1], 3, seed=5))
    assert [batch.patients for batch in both] == [(0, 0, 0)] * 3 + [(0, 1)]
    anna = network.summed(values, site.data.of_patients([0], 3, seed=5), site.task.loss, clip=1e-3)
    assert network.vectorised  # the project's networks need not be run patient by patient
    assert anna.cases == 10
    assert anna.gradient.norm().item() == pytest.approx(1e-3, rel=1e-4)
    other = network.summed(values, site.data.of_patients([1], 3, seed=5), site.task.loss, clip=1e-3)
    everyone = network.summed(values, both, site.task.loss, clip=1e-3)
    torch.testing.assert_close(everyone.gradient, anna.gradient + other.gradient)
    network.vectorised = False
    torch.testing.assert_close(
        network.summed(values, both, site.task.loss, clip=1e-3).gradient, everyone.gradient, rtol=1e-3, atol=1e-7
    )


def test_without_clip_and_noise_it_is_the_plain_gradient(federation: Path, tmp_path: Path) -> None:
    """All patients drawn, one case each: the mean of their gradients is the gradient of the mean loss."""
    site = opened(private_study(federation), tmp_path)
    module = site.task.network()
    values = dict(module.named_parameters())
    batches = list(site.data.of_patients(range(8), 8, seed=5))
    found = PatientGradients(module).summed(values, batches, site.task.loss, clip=1e9)
    (batch,) = batches
    plain = torch.autograd.grad(site.task.loss(module(batch.images), batch), list(values.values()))
    together = torch.cat([part.flatten() for part in plain])
    torch.testing.assert_close(found.gradient / 8, together, rtol=1e-3, atol=1e-6)


def test_a_gradient_that_is_not_finite_adds_nothing() -> None:
    network = PatientGradients(Scale())
    batches = [cases([math.inf, 0.25], (0, 1))]
    found = network.summed(dict(network.module.named_parameters()), batches, mean_output, clip=1.0)
    assert found.gradient.tolist() == [0.25]


# ------------------------------------------------------------------------------------------- draws and noise


def test_patients_are_drawn_each_by_itself(federation: Path, tmp_path: Path) -> None:
    """8 cases, batches of 2: every patient is in a step with chance 1/4; over 400 steps that is 800 ± 4 √600."""
    site = opened(private_study(federation, local__epochs=100, local__batch_size=2), tmp_path)
    start = [site.task.initial()]
    found = list(draws(site, ROUND, start, 10, ["global"]))
    assert sampling(8, Local(batch_size=2, epochs=100)) == (0.25, 400)
    assert len(found) == 400
    sizes = [sum(len(batch.cases) for batch in step.batches) for step in found]
    assert sum(sizes) == pytest.approx(800, abs=4 * math.sqrt(400 * 8 * 0.25 * 0.75))
    assert {0, 4} <= set(sizes)  # Poisson: also nobody, and also twice the mean
    assert all(step.expected == 2.0 for step in found)

    def drawn(where: Site, round: Round = ROUND, first: Any = start) -> list[tuple[str, ...]]:
        return [b.cases for step in draws(where, round, first, 10, ["global"]) for b in step.batches]

    assert drawn(site) == drawn(site)
    assert site.private is not None
    others = [
        drawn(site, first=[site.task.initial(draw=1)]),
        drawn(site, round=Round(1, "train", 1, 3)),
        drawn(replace(site, private=replace(site.private, key=b"another"))),
    ]
    assert all(other != drawn(site) for other in others)


def test_the_same_model_with_another_control_variate_gets_other_draws(federation: Path, tmp_path: Path) -> None:
    """Else a server that repeats a round with another c would see the same drawn patients twice."""
    stage = Stage(private_study(federation, "scaffold"), tmp_path)
    order = stage.method.send(stage.server, stage.roster["ada"], stage.rounds[0])
    for c in (order.c, order.c, order.c.map(lambda t: t + 0.01)):
        stage.train("ada", flatten(replace(order, c=c)), 0, -1)
    passes = [entry["drawn"] for line in left(stage.workers["ada"].place) for entry in line["spent"] if entry["drawn"]]
    assert passes[0] == passes[1] != passes[2]


def test_noise_has_the_size_that_is_told_and_depends_on_what_it_covers() -> None:
    total = torch.zeros(100_000)
    noised = covered(total, 0.5, 3.0, b"key", "global")
    assert noised.std().item() == pytest.approx(1.5, rel=0.01)
    assert covered(total, 0.5, 3.0, b"key", "global").equal(noised)
    one = total.clone()
    one[0] = 1e-3  # another sum gets other noise: two answers cannot be subtracted
    for other in (covered(one, 0.5, 3.0, b"key", "global"), covered(total, 0.5, 3.0, b"key", "personal")):
        assert (noised - other).std().item() == pytest.approx(1.5 * math.sqrt(2), rel=0.02)


def test_models_on_the_same_draws_share_the_bound(federation: Path, tmp_path: Path) -> None:
    """Two models are one vector of length √2 clips, so each has √2 times the noise, for the price of one pass."""
    study = private_study(federation, local__optimizer="sgd", local__momentum=0.0, local__lr=1.0, local__batch_size=8)
    site = opened(study, tmp_path, clip=1e-4, noise=1e3)  # next to nothing but noise
    start = site.task.initial()

    def length(jobs: dict[str, Job]) -> float:
        moved, _ = (fit(site, jobs, ROUND)["global"].weights - start).split(site.task.parameters().__contains__)
        return moved.norm()

    alone, beside = length({"global": Job(start)}), length({"global": Job(start), "personal": Job(start)})
    count = sum(start[name].numel() for name in site.task.parameters())
    assert alone == pytest.approx(1e3 * 1e-4 * math.sqrt(count) / 8, rel=0.15)  # a draw of a few hundred values
    assert beside == pytest.approx(math.sqrt(2) * alone, rel=0.15)
    assert site.private is not None
    assert [(entry.what, entry.noise, entry.rate, entry.steps) for entry in site.private.spent] == [
        (("global",), 1e3, 1.0, 1),
        (("global", "personal"), 1e3, 1.0, 1),
    ]


def test_apples_core_and_p_learn_from_the_noised_gradient_alone(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the covered sum is zero nothing of the cases is left: p and the core stay where they were."""
    study = private_study(federation, "apple", method__mu=0.0, method__relation_lr=1.0)
    site, method = opened(study, tmp_path), study.method
    memory = method.remember(site)

    def after() -> tuple[dict[str, float], Any]:
        _, kept = method.train(site, memory, method.Downlink({}), ROUND)
        return dict(kept.p), kept.cores["ada"].digest

    before = dict(memory.p), memory.cores["ada"].digest
    p, core = after()
    assert max(abs(p[name] - before[0][name]) for name in p) > 1e-3 and core != before[1]
    monkeypatch.setattr("consilium.learning.fit.covered", lambda total, *rest: torch.zeros_like(total))
    p, core = after()
    assert p == pytest.approx(before[0], abs=1e-7) and core == before[1]


def test_one_patient_changes_the_discriminants_sums_by_at_most_the_root_of_two() -> None:
    """(3, 4) cut to length 1 is (0.6, 0.8), its squares (0.36, 0.64); what is not finite counts as nothing."""
    ten, one = torch.tensor([0.1, 0.0]), torch.tensor([3.0, 4.0])
    without, beside = bounded_sums([ten], 1.0), bounded_sums([ten, one, torch.tensor([math.nan, 0.0])], 1.0)
    assert (beside.values - without.values).tolist() == pytest.approx([0.6, 0.8, 0.36, 0.64])
    longest = bounded_sums([torch.tensor([1e9, 0.0])], 1.0).values
    assert longest.norm().item() == pytest.approx(math.sqrt(2))


# ------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {"study__rounds": 2}),
        pytest.param("fedsm", {"method__selector_training": "discriminant"}, marks=pytest.mark.slow),
        pytest.param("fedprox", {}, marks=pytest.mark.slow),
        pytest.param("fedsm", {}, marks=pytest.mark.slow),
        pytest.param("apple", {"method__budget": 1}, marks=pytest.mark.slow),
        pytest.param("local", {}, marks=pytest.mark.slow),
        pytest.param("scaffold", {}, marks=pytest.mark.slow),
        pytest.param("fedavg-finetune", {}, marks=pytest.mark.slow),
    ],
)
def test_a_private_run_has_the_same_bits_when_it_is_resumed(
    method: str, changes: dict[str, Any], federation: Path, tmp_path: Path
) -> None:
    study = private_study(federation, method, **changes)
    whole, cut = run_and_copy(study, tmp_path, round=1)
    assert state(whole) == state(resume(cut, workers=0))
    train = [event for event in RunFolder.open(whole.folder).events() if event["event"] == "train"]
    assert all(event["loss"] is None for event in train)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fedavg", {"privacy__noise": 0.0}, "unit = 'patient' needs a target epsilon, or noise"),
    ("fedavg", {"privacy__epsilon": 2.0}, "epsilon and noise both decide"),
    ("fedavg", {"privacy__unit": "hospital"}, "unit = 'hospital': it must be one of site, patient"),
    ("fedavg", {"privacy__accountant": "moments"}, "accountant = 'moments': it must be one of rdp, prv"),
    ("fedavg", {"privacy__statistics": 0.0}, "statistics and feature_clip must be above 0"),
    ("fedavg", {"task__norm": "batch"}, "batch normalisation.*use .task. norm = 'instance' or 'group'"),
    ("fedavg", {"local__precision": "float16"}, "use 'float32' or 'bfloat16'"),
    ("apfl", {}, "'apfl' cannot be trained so, because its sites take steps of their own"),
    ("fedsm", {"method__personal": "apfl"}, "personal = 'apfl' takes steps of its own"),
]


@pytest.mark.parametrize(("method", "changes", "words"), REFUSED)
def test_what_cannot_be_private_is_refused_with_a_remedy(
    method: str, changes: dict[str, Any], words: str, federation: Path
) -> None:
    with pytest.raises(StudyError, match=words):
        private_study(federation, method, **changes)


def test_a_job_with_an_objective_of_its_own_is_refused(federation: Path, tmp_path: Path) -> None:
    """It would be trained on the task's loss instead, and nobody would notice."""
    site = opened(private_study(federation), tmp_path)
    start = site.task.initial()
    job = Job(start, objective=lambda module, batch: module(batch.images).mean())
    with pytest.raises(StudyError, match=r"'global' has an objective of its own.*gives `loss` instead"):
        fit(site, {"global": job}, ROUND)


def test_it_needs_opacus(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    with pytest.raises(StudyError, match=r"pip install 'consilium\[dp\]'"):
        private_study(federation)
