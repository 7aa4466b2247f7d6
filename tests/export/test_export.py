"""What leaves with an export, and that it says what the run's own models say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from consilium import simulation
from consilium.cli import exports as command
from consilium.errors import NotForOutsiders, RunError, UserError, WorkError
from consilium.export import exporting, fresh, onnx_file
from consilium.export.exporting import export_run
from consilium.export.models import released
from consilium.export.package import is_package, open_package
from consilium.methods import METHODS
from consilium.prediction import open_predictor, predict
from consilium.site import SiteCard
from consilium.study import Study
from tests.toy import SIZES, toy_study

pytestmark = pytest.mark.xdist_group("monai")  # one process loads it, and makes the runs and exports below once


@pytest.fixture(scope="module", autouse=True)
def _no_onnx() -> Any:
    """Tracing takes long; its own test puts it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_file, "available", lambda: False)
        yield


@pytest.fixture(scope="module")
def run_of(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    runs = tmp_path_factory.mktemp("runs")

    def run(method: str) -> Path:
        if method not in made:
            study = toy_study(federation, method, study__rounds=1, study__score_every=1)
            made[method] = simulation.run(study, runs, workers=0).folder
        return made[method]

    return run


@pytest.fixture(scope="module")
def exported(run_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An export per method, unchecked."""
    made: dict[str, Path] = {}

    def export(method: str) -> Path:
        if method not in made:
            made[method] = export_run(run_of(method), tmp_path_factory.mktemp(method) / "out", check=False).folder
        return made[method]

    return export


def images(count: int = 3) -> torch.Tensor:
    return torch.rand((count, 1, 16, 16), generator=torch.Generator().manual_seed(1))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------------------------------------- the same outputs


@pytest.mark.federation
def test_a_fresh_process_gets_the_logits_of_the_run(
    run_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`consilium export` loads every bundle with MONAI alone, and the package, in a new process: equal to 1e-6."""
    seen: list[Any] = []
    monkeypatch.setattr(exporting, "export_run", lambda run, to: seen.append(export_run(run, to)) or seen[0])
    app = typer.Typer()
    command.add_to(app)
    done = CliRunner().invoke(app, [str(run_of("fedsm")), "--to", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == str(tmp_path / "out")
    (export,) = seen
    assert export.models == ("global", "personal_ada", "personal_bea", "personal_cid")
    assert set(export.gaps) == {*export.models, "super_model"}
    assert max(export.gaps.values()) <= 1e-6


def test_a_wrong_weight_is_noticed_and_nothing_is_left(
    run_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_in_a_fresh_process", lambda draft, expected: {"global": 2e-6})
    with pytest.raises(WorkError, match="'global' differs from the run's model by 2e-06"):
        export_run(run_of("fedavg"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "gap"), [([2.0, 4.0], 0.0), ([2.0, 4.004], 0.001), ([2.0], float("inf")), ([0.001, 0.0], 1.0)]
)
def test_a_gap_is_relative_to_the_largest_logit(output: list[float], gap: float) -> None:
    assert fresh.gap(torch.tensor(output), torch.tensor([2.0, 4.0])) == pytest.approx(gap, rel=1e-3)
    assert fresh.gap(torch.tensor([0.25]), torch.tensor([0.125])) == 0.125  # absolute below 1


def test_the_package_needs_neither_run_nor_data(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = shutil.copytree(run_of("fedsm"), tmp_path / "run")
    _, ours = open_predictor(run)
    expected = ours.answer(images())
    export_run(run, tmp_path / "out", check=False)
    shutil.rmtree(run)
    for folder in (tmp_path / "out/super_model", tmp_path / "out"):
        assert is_package(folder)
        study, predictor = open_package(folder)
        answer = predictor.answer(images())
        assert study.facts.labels == ("blob",)
        assert torch.equal(answer.output, expected.output)
        assert answer.choices == expected.choices
    _, own = open_package(tmp_path / "out", "bea")
    assert own.answer(images()).choices[0].key == "personal/bea"


def test_a_run_whose_data_are_gone_can_be_exported(
    run_of: Callable[[str], Path], federation: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(run_of("fedavg"), tmp_path / "run")
    text = (run / "study.toml").read_text()
    (run / "study.toml").write_text(text.replace(str(federation), str(tmp_path / "gone")))
    export_run(run, tmp_path / "out", check=False)
    study, predictor = open_package(tmp_path / "out")
    assert study.facts.labels == ("blob",)
    assert predictor.answer(images()).output.isfinite().all()


def test_a_bundle_predicts_the_masks_of_consilium(
    run_of: Callable[[str], Path], exported: Callable[[str], Path], tmp_path: Path
) -> None:
    """From a file to a mask by MONAI's transforms, on an image whose sides (21×17) need padding."""
    from monai.bundle import ConfigParser
    from monai.data import decollate_batch

    (tmp_path / "images").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (21, 17), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "images/a.png")
    Image.fromarray(noise.astype(np.uint16) * 200).save(tmp_path / "images/b.png")  # 16 bits
    predict(run_of("fedavg"), [tmp_path / "images"], tmp_path / "ours")

    parser = ConfigParser()
    parser.read_config(str(exported("fedavg") / "global/configs/inference.json"))
    parser["bundle_root"] = str(exported("fedavg") / "global")
    parser["dataset_dir"], parser["output_dir"] = str(tmp_path / "images"), str(tmp_path / "theirs")
    network, inferer, after = (parser.get_parsed_content(key) for key in ("network", "inferer", "postprocessing"))
    with torch.no_grad():
        for batch in parser.get_parsed_content("dataloader"):
            after(decollate_batch({**batch, "pred": inferer(batch["image"], network)})[0])

    for name in ("a", "b"):
        ours, theirs = (np.asarray(Image.open(tmp_path / p)) for p in (f"ours/{name}.png", f"theirs/{name}_mask.png"))
        assert ours.shape == theirs.shape == (21, 17)
        assert (ours != theirs).sum() == 0
        assert 0 < ours.mean() < 1


# ---------------------------------------------------------------------------------------------- what is in it


@pytest.mark.parametrize(
    ("method", "bundles"),
    [
        ("fedavg", ["global"]),
        ("local", ["local_ada", "local_bea", "local_cid"]),
        ("fedsm", ["global", "personal_ada", "personal_bea", "personal_cid"]),
    ],
)
def test_one_bundle_per_model(method: str, bundles: list[str], exported: Callable[[str], Path]) -> None:
    inside = sorted(path.name for path in exported(method).iterdir())
    assert inside == sorted([*bundles, "model_card.json", "model_card.md", "super_model"])
    for bundle in bundles:
        assert set(files(exported(method) / bundle)) == {
            "configs/inference.json", "configs/metadata.json", "docs/README.md", "models/model.safetensors",
        }  # fmt: skip


def test_metadata_has_what_the_schema_of_monai_requires(exported: Callable[[str], Path]) -> None:
    """The required keys and types of meta_schema_20240725.json, which cannot be fetched here."""
    for method in ("fedavg", "local"):
        for path in exported(method).glob("*/configs/metadata.json"):
            meta = json.loads(path.read_text())
            text = (
                "schema version monai_version pytorch_version numpy_version task description authors copyright "
                "data_type image_classes pred_classes intended_use"
            )
            assert all(isinstance(meta[key], str) for key in text.split())
            assert all(
                isinstance(meta[key], dict) for key in ("required_packages_version", "changelog", "eval_metrics")
            )
            image, pred = meta["network_data_format"]["inputs"]["image"], meta["network_data_format"]["outputs"]["pred"]
            assert (image["num_channels"], pred["num_channels"]) == (1, 2)
            assert image["spatial_shape"] == ["2*n", "2*n"]
            assert pred["channel_def"] == {"0": "background", "1": "blob"}


def test_a_bundle_says_what_to_install(exported: Callable[[str], Path]) -> None:
    """MONAI installs neither what its command line needs nor what reads the images."""
    bundle = exported("fedavg") / "global"
    needed = {"safetensors", "pytorch-ignite", "fire", "pillow"}
    assert json.loads((bundle / "configs/metadata.json").read_text())["required_packages_version"].keys() == needed
    assert all(f"`{name}`" in (bundle / "docs/README.md").read_text() for name in needed)


def test_local_models_belong_to_their_sites(run_of: Callable[[str], Path], exported: Callable[[str], Path]) -> None:
    _, nobody = open_package(exported("local"))
    with pytest.raises(NotForOutsiders, match="--site"):
        nobody.answer(images())
    _, theirs = open_package(exported("local"), "cid")
    _, ours = open_predictor(run_of("local"), "cid")
    assert torch.equal(theirs.answer(images()).output, ours.answer(images()).output)


@pytest.mark.parametrize("method", ["fedavg", "local", "fedsm"])
def test_nothing_of_the_machine_or_the_patients(
    method: str, exported: Callable[[str], Path], run_of: Callable[[str], Path], federation: Path
) -> None:
    cases = [path.stem.encode() for path in federation.glob("*/images/*")]
    assert len(cases) == sum(map(sum, SIZES.values()))
    places = [str(place).encode() for place in (federation, run_of(method), Path(exporting.__file__).parents[2])]
    for name, content in files(exported(method)).items():
        found = [word for word in (*cases, *places, b"/tmp/", b"site-packages") if word in content]
        assert not found, f"{name}: {found}"


def test_two_exports_are_the_same_bytes(run_of: Callable[[str], Path], exported: Callable[[str], Path]) -> None:
    again = exported("fedavg").with_name("again")
    export_run(run_of("fedavg"), again, check=False)
    assert files(again) == files(exported("fedavg"))


# ---------------------------------------------------------------------------------------------- the card


def test_the_card_says_what_it_was_trained_on(exported: Callable[[str], Path], run_of: Callable[[str], Path]) -> None:
    card = (exported("fedsm") / "model_card.md").read_text()
    for site, counts in SIZES.items():
        assert f"| {site} | {' | '.join(map(str, counts))} | blob |" in card
    for title in (
        "When not to use it", "What it was trained on", "How well it does", "How the selector chooses", "Limits",
        "Privacy", "How to load it",
    ):  # fmt: skip
        assert f"## {title}\n" in card
    assert "not a medical device" in card
    assert "memorise" in card
    assert "no ONNX files" in card

    facts = json.loads((exported("fedsm") / "model_card.json").read_text())
    summary = json.loads((run_of("fedsm") / "summary.json").read_text())
    cells = facts["scores"]["super"]["mean"]["sites"]
    assert {s: cell["value"] for s, cell in cells.items()} == pytest.approx(summary["headline"]["sites"])
    assert all(cell["low"] <= cell["value"] <= cell["high"] and cell["cases"] == 3 for cell in cells.values())
    gamma = open_package(exported("fedsm"))[1].confidence  # type: ignore[attr-defined]
    assert facts["selector"]["confidence"] == gamma
    assert f"γ = {gamma:g}" in card
    assert all(sum(row.values()) == pytest.approx(1) for row in facts["selector"]["chosen"].values())


def test_the_card_of_local_models_shows_them_away_from_home(exported: Callable[[str], Path]) -> None:
    card = (exported("local") / "model_card.md").read_text()
    assert "each belongs to one site" in card
    assert "| model of | at ada | at bea | at cid |" in card
    assert "## How the selector chooses" not in card


def test_guests_are_shown_as_guests(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedavg", study__rounds=1, study__leave_out=["cid"])
    run = simulation.run(study, tmp_path / "runs", workers=0).folder
    card = (export_run(run, tmp_path / "out", check=False).folder / "model_card.md").read_text()
    assert "| cid (guest: scored, not trained on) | 0 | 3 | 3 | blob |" in card
    assert "| cid (guest) | 0." in card
    assert "across 2 sites" in card
    assert "not scored at any hospital outside" not in card


@pytest.fixture(scope="module")
def routed(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedSM with its selector in closed form, exported; the run is gone."""
    place = tmp_path_factory.mktemp("routed")
    fields = {"method__selector_training": "discriminant", "method__confidence": 0.5}
    study = toy_study(federation, "fedsm", study__rounds=1, study__score_every=1, **fields)
    run = simulation.run(study, place / "runs", workers=0).folder
    out = export_run(run, place / "out", check=False).folder
    shutil.rmtree(place / "runs")
    return out


def test_a_package_routes_in_closed_form_and_says_why(routed: Path, federation: Path, tmp_path: Path) -> None:
    """Images of the sites are named by their site; a bright square of one grey is like nothing anyone trained on."""
    strange = tmp_path / "strange.png"
    Image.fromarray(np.full((16, 16), 255, np.uint8)).save(strange)
    first = {site: sorted((federation / site / "images").glob("*.png"))[0] for site in SIZES}
    found = predict(routed, [*first.values(), strange], tmp_path / "masks")
    for site, one in zip(first, found):
        assert one.model == f"personal/{site}"
        assert re.fullmatch(rf"most like {site} \((0\.\d+|1\.000) > 0\.5\)", one.why), one.why
    assert found[-1].model == "global"
    assert re.fullmatch(r"unlike all three sites \(nearest \w+, distance [\d.e+]+ > [\d.]+\)", found[-1].why)
    table = (tmp_path / "masks" / "predictions.csv").read_text()
    assert "most like ada (" in table and "unlike all three sites" in table
    # what a hospital asks for by name needs no selector
    assert predict(routed, [strange], tmp_path / "own", site="bea")[0].model == "personal/bea"


def test_the_card_of_a_closed_form_says_what_it_does_with_strange_images(routed: Path) -> None:
    card = (routed / "model_card.md").read_text()
    assert "farther from every site than nearly all of their own validation images goes to the global model" in card
    assert "largest probability is at most γ = 0.5" in card
    facts = json.loads((routed / "model_card.json").read_text())
    assert facts["selector"]["outliers"] is True
    assert set(facts["selector"]["routed"]) == set(SIZES)


# ---------------------------------------------------------------------------------------------- every method


def bundles_of(study: Study) -> list[str] | str:
    cards = {s: SiteCard(s, i, n, ("blob",)) for i, (s, (n, *_)) in enumerate(SIZES.items())}
    try:
        return [model.name for model in released(study, study.method.start(study.task, cards)).models]
    except NotForOutsiders as error:
        return str(error)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_models_for_outsiders_or_says_so(name: str, federation: Path) -> None:
    found = bundles_of(toy_study(federation, name))
    if isinstance(found, str):
        assert found.endswith(".")
    else:
        assert len(set(found)) == len(found)
        assert "/" not in "".join(found)


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_refusals_are_sentences(
    run_of: Callable[[str], Path], exported: Callable[[str], Path], federation: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"is not a run: it has no study\.toml"):
        export_run(federation, tmp_path / "out")
    unfinished = shutil.copytree(run_of("fedavg"), tmp_path / "unfinished")
    (unfinished / "summary.json").unlink()
    with pytest.raises(RunError, match="not finished; continue it with `consilium resume"):
        export_run(unfinished, tmp_path / "out")
    with pytest.raises(RunError, match="not an empty folder; give --to a new one"):
        export_run(run_of("fedavg"), exported("fedavg"))
    with pytest.raises(RunError, match="not a package"):
        open_package(tmp_path)
    assert not (tmp_path / "out").exists()


def test_models_that_were_not_shared_cannot_be_exported(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "local", study__rounds=1, method__share_local_parts=False)
    run = simulation.run(study, tmp_path / "runs", workers=0).folder
    with pytest.raises(NotForOutsiders, match="not shared"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_target_is_used(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_run(run_of("fedavg"), tmp_path / "out", check=False)
    assert is_package(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["release.safetensors", "study.toml"])
def test_a_damaged_package_is_refused(name: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    package = shutil.copytree(exported("fedavg") / "super_model", tmp_path / "package")
    content = (package / name).read_bytes()
    (package / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=f"{name} is damaged or missing"):
        open_package(package)
    (package / name).unlink()
    with pytest.raises(RunError, match=f"{name} is damaged or missing"):
        open_package(package)


@pytest.mark.parametrize("text", ['{"format": 99, "consilium": "9.9"}', "[]", "{"])
def test_a_package_of_another_format_is_refused(text: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    package = shutil.copytree(exported("fedavg") / "super_model", tmp_path / "package")
    (package / "package.json").write_text(text)
    with pytest.raises(UserError, match=r"format|cannot be read"):
        open_package(package)


def test_onnx_files_say_the_same(
    run_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in (*onnx_file.PACKAGES, "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.setattr(onnx_file, "available", lambda: True)
    export = export_run(run_of("fedavg"), tmp_path / "out")
    assert set(export.gaps) == {"global", "onnx:global", "super_model"}
    assert export.gaps["onnx:global"] < 1e-5
    assert b"site-packages" not in (tmp_path / "out/global/models/model.onnx").read_bytes()
