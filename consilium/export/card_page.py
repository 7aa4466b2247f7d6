"""The model card for people, from its facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from consilium.export import onnx_file
from consilium.export.card import Facts
from consilium.wording import counted, listed

FEW = 20  # test cases at a site below which its score says little


def markdown(facts: Facts) -> str:
    """The card, for people."""
    sections = {
        "What it is": _what(facts),
        "When not to use it": _when_not(facts),
        "What it was trained on": _trained_on(facts),
        "How well it does": _how_well(facts),
        "How the selector chooses": _how_it_chooses(facts),
        "Limits": _limits(facts),
        "Privacy": _privacy(facts),
        "How to load it": _how_to_load(facts),
        "Where it comes from": _where_from(facts),
    }
    lines = [f"# Model card: {facts['name']}", ""]
    for title, text in sections.items():
        lines += [f"## {title}", "", *text, ""] if text else []
    return "\n".join(lines)


def _what(facts: Facts) -> list[str]:
    task, method = facts["task"], facts["method"]
    sites = [name for name, site in facts["training"]["sites"].items() if not site["guest"]]
    does = f"{task['task']} of {listed(task['labels'])}"
    return [
        f"A {facts['released']} model for the {does} in {task['dimensions']}-D images with "
        f"{counted(task['channels'], 'channel')}, trained with `{method['name']}` across "
        f"{counted(len(sites), 'site')}.",
        "",
        f"- Method: {method['about']}".rstrip(": "),
        f"- Paper: {method['paper']}",
        f"- Network: `{task['network']['network']}`; models: " + listed([f"`{m['name']}`" for m in facts["models"]]),
        "",
        f"**Intended use**: research on the {does} in images made and prepared like those of the sites below, with a "
        "person who checks every result. **It is not a medical device.** Nobody has approved it for diagnosis, "
        "treatment or any other care of patients.",
    ]


def _when_not(facts: Facts) -> list[str]:
    task = facts["task"]
    how = task["preprocess"]
    prepared = [f"{key} = {value}" for key, value in how.items() if value not in ([], "", "none")]
    points = [
        f"For anything but {listed(task['labels'])}: whatever is in the image, it answers with these and nothing else.",
        "For another kind of image (modality, sequence, stain, camera) than the sites' below; it does not notice.",
        "For images of a much other resolution or field of view, or prepared otherwise than "
        + (f"with {', '.join(prepared)}." if prepared else "the sites' (as stored, no preprocessing)."),
        "At a hospital, on patients or with a device unlike those of the sites below, before it was scored there on "
        "cases with known answers.",
        "For decisions about a patient.",
    ]
    return [*(f"- {point}" for point in [*points, *_unfamiliar(facts)])]


def _unfamiliar(facts: Facts) -> list[str]:
    """What a super model does with images unlike all its sites; what a local one has for them."""
    selector = facts["selector"]
    if not selector:
        owned = facts["models"] and all(model["of"] for model in facts["models"])
        return (
            ["There is no model for a hospital outside: each belongs to one site and knows only that."] if owned else []
        )
    gamma = selector["confidence"]
    text = (
        "For images unlike all sites without looking at what was chosen: the selector shares its certainty among the "
        "known sites only, so it can be sure and wrong about an unfamiliar image."
    )
    if selector.get("outliers"):
        text = (
            "For images unlike all sites without looking at what was chosen: one that is farther from every site than "
            "nearly all of their own validation images goes to the global model, which may not know it either."
        )
    if gamma is None:
        return [text]
    if gamma <= 0:
        rest = "any other image" if selector.get("outliers") else "every image"
        return [f"{text} Here γ = 0: {rest} goes to some site's own model."]
    if gamma >= 1:
        return [f"{text} Here γ = 1: every image goes to the global model."]
    return [f"{text} Where its largest probability is at most γ = {gamma:g}, the global model answers instead."]


def _trained_on(facts: Facts) -> list[str]:
    training = facts["training"]
    table = [
        [
            name + (" (guest: scored, not trained on)" if site["guest"] else ""),
            str(site["train"]) + (f" and {site['unlabelled']} without a mask" if site["unlabelled"] else ""),
            *(str(site[split]) for split in ("valid", "test")),
            ", ".join(site["labels"]),
        ]
        for name, site in training["sites"].items()
    ]
    local = training["local"]
    lines = _table(["site", f"training {training['unit']}", "validation cases", "test cases", "annotated"], table)
    pace = f"{counted(training['rounds'], 'round')} of {counted(local['epochs'], 'epoch')}, {local['optimizer']}, "
    pace += f"learning rate {local['lr']:g}, batches of {local['batch_size']}, seed {training['seed']}"
    lines += ["", f"Training: {pace}. Augmentation: {listed(training['augment']) or 'none'}."]
    lines += [
        f"The state is that of the round best on validation ({training['best_round']}); test cases chose nothing."
    ]
    if len(set(training["best_rounds"].values())) > 1:
        each = ", ".join(f"{key}: {number}" for key, number in training["best_rounds"].items())
        lines += [f"Rounds by what decided: {each}."]
    return lines


def _how_well(facts: Facts) -> list[str]:
    lines = [
        f"Test scores: {facts['metric']}, mean over a site's cases, with a 95 % bootstrap interval over cases. An "
        "interval speaks of these sites and this one training, not of another hospital.",
    ]
    for model, labels in facts["scores"].items():
        names = list(labels)
        sites = dict.fromkeys(site for label in labels.values() for site in (*label["sites"], *label["guests"]))
        table = [
            [_guest(site, labels), *(_cell(labels[n], site) for n in names), _cases(labels, site)] for site in sites
        ]
        if any("site_mean" in label for label in labels.values()):
            table.append(["site mean", *(_interval(labels[name].get("site_mean")) for name in names), ""])
        lines += ["", f"### {model}", "", *_table(["site", *names, "cases"], table)]
        if model in facts["away"]:
            lines += ["", "A site's model counts at its own site; away from home:", "", *_away(facts["away"][model])]
    return lines


def _how_it_chooses(facts: Facts) -> list[str]:
    selector = facts["selector"]
    if not selector:
        return []
    choices = sorted({choice for row in selector["chosen"].values() for choice in row})
    table = [
        [site, *(f"{row.get(choice, 0):.0%}" for choice in choices), _percent(selector["routed"].get(site))]
        for site, row in selector["chosen"].items()
    ]
    head = (
        "How often each model answered for a site's test images, and how often the selector's first guess was the site."
    )
    gamma = selector["confidence"]
    if gamma is not None:
        head += f" An image goes to the global model if the selector's largest probability is at most γ = {gamma:g}."
    return [head, "", *_table(["images of", *choices, "first guess right"], table)]


def _limits(facts: Facts) -> list[str]:
    sites = facts["training"]["sites"]
    few = [f"{name} ({site['test']})" for name, site in sites.items() if site["test"] < FEW]
    guests = [name for name, site in sites.items() if site["guest"]]
    kept = facts["headline"] if facts["headline"] != facts["released"] else ""
    points = [
        f"The {kept} models, which the method is about, stay at their sites: the scores of what is in here are those "
        f"under '{facts['released']}'." if kept else "",
        f"Few test cases at {listed(few)}: these scores say little." if few else "",
        "" if guests else "It was not scored at any hospital outside the federation; expect lower scores there.",
        "One training with one seed; another seed gives other scores.",
        f"BatchNorm was '{facts['batchnorm']}' at the sites: an outside hospital gets normalisation that no site used."
        if facts["batchnorm"] != "average" else "",
        "Parts that are no whole model are only in the package, not in a bundle: " + listed(facts["parts"]) + "."
        if facts["parts"] else "",
        "Bundles prepare images with MONAI's transforms; where these differ from the training's, their metadata say "
        "how. The package prepares images exactly as the training did.",
        *facts["method"]["differences"],
    ]  # fmt: skip
    return [f"- {point}" for point in points if point]


def _privacy(facts: Facts) -> list[str]:
    owned = [model["name"] for model in facts["models"] if model["of"]]
    lines = [
        "No image, case name or patient is in this folder. But a model can memorise what it was trained on: something "
        "of the training images may be recovered from it, or whether a patient was among them. `consilium audit RUN` "
        "measures the latter. Give the folder only to those whom the sites would give it to.",
    ]
    if owned:
        lines += [
            "",
            f"{listed(owned)}: each is the model of one site, and tells more of its images than a shared one.",
        ]
    return lines


def _how_to_load(facts: Facts) -> list[str]:
    bundles = [
        f"One MONAI bundle per model: {listed([model['name'] for model in facts['models']])}. In its folder:",
        "",
        "    python -m monai.bundle run --config_file configs/inference.json --dataset_dir IMAGES --output_dir MASKS",
        "",
        "Weights are safetensors; there is no `model.pt`, because nothing here needs unpickling.",
    ]
    site = next((f" --site {model['of']}" for model in facts["models"] if model["of"]), "")
    must = site if all(model["of"] for model in facts["models"]) else ""
    onnx = (
        "Each bundle also holds `models/model.onnx`: preprocessed images in, logits out."
        if facts["onnx"]
        else f"There are no ONNX files: {listed(onnx_file.PACKAGES)} were not installed at the export."
    )
    return [
        "The whole, with consilium:",
        "",
        f"    consilium predict super_model IMAGES --to masks{must}",
        "",
        *(bundles if facts["models"] else ["There are no bundles: the models are not whole networks."]),
        *(["", onnx] if facts["models"] else []),
    ]


def _where_from(facts: Facts) -> list[str]:
    training = facts["training"]
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    lines = [f"- Study `{facts['name']}` ({facts['hash']}), trained {training['begun']} to {training['finished']}."]
    lines += [f"- Trained with {versions}." if versions else "", f"- Exported by {facts['exported_by']}."]
    if training["commit"]:
        lines += [f"- Commit {training['commit']}."]
    lines += [
        "- The licences of the training data are in the sites' own `site.toml`; they may limit the use of a model."
    ]
    return [line for line in lines if line]


# ---------------------------------------------------------------------------------------------- small pieces


def _guest(site: str, labels: Mapping[str, Any]) -> str:
    return f"{site} (guest)" if any(site in label["guests"] for label in labels.values()) else site


def _cell(label: Mapping[str, Any], site: str) -> str:
    return _interval(label["sites"].get(site) or label["guests"].get(site))


def _interval(cell: Mapping[str, float] | None) -> str:
    return f"{cell['value']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]" if cell else "–"


def _cases(labels: Mapping[str, Any], site: str) -> str:
    found = [
        part[site]["cases"] for label in labels.values() for part in (label["sites"], label["guests"]) if site in part
    ]
    return str(max(found))


def _away(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    sites = sorted({site for row in table.values() for site in row})
    rows = [[owner, *(f"{row[site]:.4f}" if site in row else "–" for site in sites)] for owner, row in table.items()]
    return _table(["model of", *(f"at {site}" for site in sites)], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
