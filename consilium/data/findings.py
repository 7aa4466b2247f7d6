"""What is worth knowing of a federation's cases and sites, each with what it does to training and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from consilium.data.differences import of_geometry, of_values
from consilium.data.seen import (
    DataFinding,
    Rule,
    SeenFederation,
    of_site,
    some_cases,
    some_names,
)
from consilium.data.site_folder import SPLITS, Federation
from consilium.wording import counted

TINY = 0.02  # of the label's usual size
BORDER = 0.9  # of the outermost voxels: a mask that covers them shows the background
ONE_SIDED = 0.8  # of a label's cases lie on one side of the body
OFF_CENTRE = 0.04  # of the volume's width
ENOUGH = 5  # cases before one of them is called unusual
LOPSIDED = 0.95  # of a site's training cases in one class
RARE = 0.01  # of all cases


def of_cases(seen: SeenFederation) -> Iterator[DataFinding]:
    """Image by image: black or flat images, headers that name a person, grey images stored as colour."""
    for one in seen.cases:
        facts = one.facts
        if facts.lowest == facts.highest:
            yield seen.about(
                "warning", "flat image", one, f"all its values are {facts.lowest:g}",
                "Nothing can be learned from it.", "Export it again, or leave the case out.",
            )  # fmt: skip
        if facts.personal:
            own = one.case.image.is_relative_to(seen.federation.sites[one.site].folder)
            where = "where it lies: --fix does not change what is outside the site's folder."
            yield seen.about(
                "warning", "names a person", one, f"its DICOM header holds {', '.join(facts.personal)}",
                "Training does not use it; whoever gets the file can.",
                "De-identify it; --fix empties these." if own else f"De-identify it {where}",
            )  # fmt: skip
        if facts.grey:
            yield seen.about(
                "note", "grey as colour", one, "its channels are all the same",
                "A colour network learns grey images from this site.", "Set channels = 1 if all images are grey.",
            )  # fmt: skip


def of_masks(seen: SeenFederation) -> Iterator[DataFinding]:
    """Mask by mask: empty, inverted, tiny, in another place than the image."""
    usual = _usual_sizes(seen)
    inside = [one.facts.border for one in seen.cases if one.facts.mask_digest]
    normal = bool(inside) and median(inside) < BORDER / 2
    for one in seen.cases:
        facts = one.facts
        if not facts.mask_digest:
            continue
        if not facts.labels:
            yield seen.about(
                "warning", "empty mask", one, "it shows no label",
                "The network learns that there is nothing; a test score of it is 1 or left out.",
                "Draw the mask, or leave the case out if nothing was drawn.", mask=True,
            )  # fmt: skip
        if normal and facts.border >= BORDER:
            yield seen.about(
                "warning", "inverted mask", one, f"a label covers {100 * facts.border:.0f} % of the picture's edge",
                "Background and label are perhaps exchanged, and the network learns the opposite.",
                "Look at it, and exchange the values.", mask=True,
            )  # fmt: skip
        for value, found in facts.labels.items():
            if value in usual and found.voxels < TINY * usual[value]:
                label = _label(seen.federation, value)
                yield seen.about(
                    "warning", "tiny mask", one,
                    f"{label} has {counted(found.voxels, 'voxel')}, and {usual[value]:.0f} in the middle of all cases",
                    "A stray click counts as a whole organ.", "Look at it; remove the label or draw it.", mask=True,
                )  # fmt: skip
        if not facts.placed:
            yield seen.about(
                "warning", "misplaced mask", one, "its header puts it in another place than the image",
                "It is taken voxel by voxel; if the header is right, labels and image do not fit.",
                "Resample the mask to the image, or correct its header.", mask=True,
            )  # fmt: skip


def _usual_sizes(seen: SeenFederation) -> dict[int, float]:
    sizes: dict[int, list[int]] = {}
    for one in seen.cases:
        for value, found in one.facts.labels.items():
            sizes.setdefault(value, []).append(found.voxels)
    return {value: median(found) for value, found in sizes.items() if len(found) >= ENOUGH}


def of_islands(seen: SeenFederation) -> Iterator[DataFinding]:
    """Labels with specks, or in more parts than usual; one finding per site and label."""
    for value, label in enumerate(seen.federation.labels, start=1):
        having = [one for one in seen.cases if value in one.facts.labels]
        usual = median(one.facts.labels[value].islands for one in having) if having else 0
        for site in seen.federation.sites:
            odd = [
                one
                for one in having
                if one.site == site
                and (one.facts.labels[value].specks or one.facts.labels[value].islands > max(3, 3 * usual))
            ]
            if odd:
                parts = f"{label!r} in specks or many parts"
                many = f"{counted(len(odd), 'mask')} of site {site!r} have {parts}: {some_cases(odd)}"
                yield seen.about(
                    "note", "islands", odd[0], many if len(odd) > 1 else f"it has {parts}",
                    "Specks are learned, and distances between surfaces become large.",
                    "Look at them; remove parts that are not the organ.", mask=True,
                )  # fmt: skip


def of_sides(seen: SeenFederation) -> Iterator[DataFinding]:
    """Volumes in which a one-sided label (a liver, a spleen) lies on the other side of the body."""
    for value, label in enumerate(seen.federation.labels, start=1):
        placed = [
            (one, found.right)
            for one in seen.cases
            if (found := one.facts.labels.get(value)) is not None and found.right is not None
        ]
        clear = [(one, right) for one, right in placed if abs(right) > OFF_CENTRE]
        rights = sum(right > 0 for _, right in clear)
        most = max(rights, len(clear) - rights)
        if len(clear) < ENOUGH or most < ONE_SIDED * len(placed) or most == len(clear):
            continue
        usual = rights * 2 > len(clear)
        for one, right in clear:
            if (right > 0) != usual:
                side = "right" if right > 0 else "left"
                yield seen.about(
                    "warning", "other side", one,
                    f"{label!r} lies on the {side}; in {most} of {len(clear)} cases it lies on the other side",
                    "The volume is perhaps mirrored; a network without mirroring learns both.",
                    "Compare the header's orientation with the scanner's; correct the header.",
                )  # fmt: skip


# ---------------------------------------------------------------------------------------------- sites


def of_tables(seen: SeenFederation) -> Iterator[DataFinding]:
    """Splits that are missing, cases without masks, sites that are small."""
    for site in seen.federation.sites.values():
        number = Counter(case.split for case in site.cases)
        if number[""]:
            yield of_site(
                "note", "no split", site, f"site {site.name!r} has {counted(number[''], 'case')} without a split",
                "They are not used.", "`consilium check --split` draws them.",
            )  # fmt: skip
        else:
            for split in SPLITS:
                if not number[split]:
                    yield of_site(
                        "note", "no split", site, f"site {site.name!r} has no {split} cases",
                        {"train": "It cannot train.", "valid": "It does not help to choose the best round.",
                         "test": "It has no score."}[split], "Give it some, or leave it as it is.",
                    )  # fmt: skip
        if bare := sum(case.label is None for case in site.cases):
            yield of_site(
                "note", "no mask", site, f"site {site.name!r} has {counted(bare, 'case')} without a mask",
                "Methods with teachers learn from them, others do not.", "",
            )  # fmt: skip
        if seen.batch and 0 < number["train"] < seen.batch:
            yield of_site(
                "warning", "small site", site,
                f"site {site.name!r} has {counted(number['train'], 'training case')}, the study's batch {seen.batch}",
                "Its batches are smaller, so its batch statistics are rougher.",
                f"Set [local] batch_size to {number['train']} or less, or use a network without batch normalisation.",
            )  # fmt: skip


def of_labels(seen: SeenFederation) -> Iterator[DataFinding]:
    """Labels that a site says it draws and does not, or draws and does not say."""
    if seen.federation.task != "segmentation":
        return
    for site in seen.federation.sites.values():
        found = {value for one in seen.of(site.name) for value in one.facts.labels}
        for value, label in enumerate(seen.federation.labels, start=1):
            if label in site.annotated and value not in found:
                yield of_site(
                    "warning", "absent label", site,
                    f"site {site.name!r} says it draws {label!r}, but none of its masks has the value {value}",
                    "The network learns that the label is never there.",
                    "Leave it out of `annotated` in site.toml, or draw it.",
                )  # fmt: skip
            if label not in site.annotated and value in found:
                yield of_site(
                    "note", "hidden label", site,
                    f"site {site.name!r} has {label!r} in its masks, which site.toml does not list; it is hidden",
                    "It is not trained on here.", "List it in `annotated` if it is drawn in every case.",
                )  # fmt: skip


def of_classes(seen: SeenFederation) -> Iterator[DataFinding]:
    """Classes that are missing, rare, or nearly all of a site."""
    federation = seen.federation
    if federation.task != "classification":
        return
    everywhere = Counter(case.label for site in federation.sites.values() for case in site.cases)
    for label in federation.labels:
        if 0 < everywhere[label] < RARE * sum(everywhere.values()):
            yield DataFinding(
                "note", "class balance", "", "", "",
                f"the class {label!r} is {everywhere[label]} of {sum(everywhere.values())} cases",
                "A network that never says it is right in almost all cases.", "Look at sensitivity, not at accuracy.",
            )  # fmt: skip
    for site in federation.sites.values():
        number = Counter(str(case.label) for case in site.cases)
        trained = Counter(str(case.label) for case in site.cases if case.split == "train")
        missing = [label for label in federation.labels if not number[label]]
        if missing:
            yield of_site(
                "note", "class balance", site, f"site {site.name!r} has no case of the class {some_names(missing)}",
                "Its model forgets what it does not see.", "Personal methods and FedSM are made for this.",
            )  # fmt: skip
        untrained = {str(c.label) for c in site.cases if c.split == "test"}
        untrained -= {str(c.label) for c in site.cases if c.split != "test"}
        if untrained:
            strange = [label for label in federation.labels if label in untrained]
            yield of_site(
                "note", "class balance", site,
                f"site {site.name!r} tests the class {some_names(strange)}, of which it has no case to train on",
                "Its own model is wrong in each of these.", "Draw the splits anew by `consilium check --split`.",
            )  # fmt: skip
        label, most = trained.most_common(1)[0] if trained else ("", 0)
        if len(trained) > 1 and most > LOPSIDED * sum(trained.values()):
            yield of_site(
                "note", "class balance", site,
                f"{most} of {sum(trained.values())} training cases of site {site.name!r} are {label!r}",
                "A network that always says so is right in almost all cases.", "Look at sensitivity, not at accuracy.",
            )  # fmt: skip


def _label(federation: Federation, value: int) -> str:
    return repr(federation.labels[value - 1])


RULES: tuple[Rule, ...] = (
    of_tables, of_labels, of_classes, of_geometry, of_values, of_cases, of_masks, of_islands, of_sides,
)  # fmt: skip
