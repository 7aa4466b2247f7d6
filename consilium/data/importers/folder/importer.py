"""A person's own folder: images and masks by patterns or by a table, or a folder of pictures for each class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from consilium.data.dicom import is_dicom
from consilium.data.formats import IMAGE_SUFFIXES, suffix_of
from consilium.data.images import holds_dicom, read_stored
from consilium.data.importers.folder.table import cases_of_table
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions, label_number, pairs
from consilium.data.importers.patterns import Match, literals, matches, split_of
from consilium.data.importers.rules import AtLeast, ByValue, Foreground, Rule
from consilium.data.importers.sources import SourceFiles, files_under, only_folder
from consilium.errors import DataError, StudyError
from consilium.fields import nearest

OPTIONS = ("images", "masks", "table", "labels", "values", "threshold", "channels", "dimensions", "contains", "site")
SITE = "site1"
_MASK_FOLDERS = ("masks", "mask", "labels", "label", "labelsTr", "gt", "GT", "segmentations")
_IMAGE_FOLDERS = ("images", "image", "img", "imagesTr")


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """What the patterns or the table pair; without either, a usual layout is looked for."""
    tree = files_under(only_folder(sources, "a dataset"))
    contains = _contains(options)
    if options.table is not None:
        if options.images or options.masks:
            raise StudyError("--table says where images and masks are; leave out --images and --masks.")
        listed = cases_of_table(options.table, tree.root, options.site or SITE, lambda label: rule(options, label))
        cases, doubts, classes = listed.cases, listed.doubts, listed.classes
    else:
        images, masks = (options.images, options.masks) if options.images else _guessed(tree)
        cases, doubts, classes = _by_patterns(tree, images, masks, options)
    doubts += tree.doubts()
    if not cases:
        raise DataError(f"no image was paired in {tree.root}, so nothing was written.{_listed(doubts)}")
    task = "classification" if classes else "segmentation"
    dimensions, channels = _form(cases, options)
    labels = tuple(options.labels or classes)
    bare = {case.site: labels for case in cases if task == "segmentation" and not case.raters}
    return Found(
        task, labels, dimensions, channels, tuple(cases), (), tuple(doubts), contains, bare, root=tree.root,
        published_splits=True,
    )  # fmt: skip


def _contains(options: ImportOptions) -> dict[str, tuple[str, ...]]:
    """Labels inside a label; refuses names before any image is read."""
    if twice := [label for label in options.labels if options.labels.count(label) > 1]:
        raise StudyError(f"--labels has {twice[0]!r} twice; give each label its own name.")
    contains: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for text in options.contains:
        for outer, inner in pairs("contains", [text]).items():
            for name in (outer, inner):
                if name not in options.labels:
                    raise StudyError(
                        f"--contains names {name!r}, which is not a label; {nearest(name, options.labels)}"
                    )
            contains[outer] += (inner,)
    return contains


def rule(options: ImportOptions, label: str) -> Rule:
    """How a mask is read: by --values, by --threshold, as two values if it shows one label, else as numbers."""
    if not options.labels:
        raise StudyError("masks need --labels: the names of mask values 1, 2, … in this order.")
    number = label_number(label, options.labels, "masks") if label else 0
    if options.values:
        table = {}
        for stored, word in pairs("values", options.values).items():
            if not stored.lstrip("-").isdecimal():
                raise StudyError(f"--values {stored}={word}: write a stored whole number, '=' and a label.")
            table[int(stored)] = label_number(word, options.labels, "values")
        return ByValue(table)
    if options.threshold is not None:
        if not label and len(options.labels) > 1:
            raise StudyError("--threshold with several labels needs a mask file for each: --masks LABEL=PATTERN.")
        return AtLeast(options.threshold, number or 1)
    if label:
        return Foreground(number)
    return ByValue({value: value for value in range(1, len(options.labels) + 1)})


def _by_patterns(
    tree: SourceFiles, images: str, masks: Sequence[str], options: ImportOptions
) -> tuple[list[RawCase], list[str], tuple[str, ...]]:
    found = matches(images, _candidates(tree))
    drawn_on = {
        one.path for pattern in masks if literals(plain := _pattern(pattern, options)[1]) > literals(images)
        for one in matches(plain, _candidates(tree), options.labels)
    }  # fmt: skip
    found = [one for one in found if one.path not in drawn_on]  # a.png and a_mask.png: the longer pattern has it
    if not found:
        raise DataError(f"no file in {tree.root} fits --images {images!r}; its first is {_first(tree)}.")
    if any("class" in one.about for one in found):
        if masks:
            raise StudyError("{class} in --images makes a classification; leave out --masks.")
        classes = options.labels or tuple(sorted({one.about["class"] for one in found}))
        cases = [_raw(tree, one, options, label=one.about["class"]) for one in found if one.about["class"] in classes]
        strange = [f"{tree.root / one.path}: its class {one.about['class']!r} is not in --labels." for one in found
                   if one.about["class"] not in classes]  # fmt: skip
        return cases, strange, tuple(classes)
    if not masks and not options.labels:
        raise StudyError(
            "--images needs --masks and --labels, or {class} in the pattern (a folder per class), or --labels alone "
            "(images without masks)."
        )
    if not masks:
        return [_raw(tree, one, options) for one in found], [], ()
    drawn, doubts = _masks_by_case(tree, masks, found, options)
    own = {one.case for one in found}
    cases = []
    for one in found:
        raters = drawn.get((one.case, one.about.get("site", ""))) or drawn.get((one.case, ""))
        if not raters:
            doubts.append(f"{tree.root / one.path}: no mask fits it.")
        else:
            cases.append(_raw(tree, one, options, raters=raters))
    for (case, _), raters in drawn.items():
        if case not in own:
            doubts.append(f"{next(iter(raters.values()))[0].path}: no image fits it.")
    return cases, doubts, ()


def _masks_by_case(
    tree: SourceFiles, patterns: Sequence[str], images: Sequence[Match], options: ImportOptions
) -> tuple[dict[tuple[object, str], dict[str, tuple[Layer, ...]]], list[str]]:
    """By case and site: every rater's layers, in the order of the labels."""
    pictures = {one.path for one in images}
    layers: dict[tuple[object, str], dict[str, list[tuple[int, Layer]]]] = defaultdict(lambda: defaultdict(list))
    for pattern in patterns:
        label, plain = _pattern(pattern, options)
        fitting = matches(plain, _candidates(tree), options.labels)
        if not fitting:
            raise DataError(f"no file in {tree.root} fits --masks {pattern!r}; its first is {_first(tree)}.")
        for one in fitting:
            if one.path in pictures:
                continue  # the pattern of the masks is wide enough for the images
            if [key for key, _ in one.case] != [key for key, _ in images[0].case]:
                raise StudyError(f"--images and --masks {pattern!r} must have the same fields, so that they pair.")
            shows = label or one.about.get("label", "")
            order = options.labels.index(shows) if shows else 0
            layer = Layer(tree.root / one.path, rule(options, shows))
            layers[one.case, one.about.get("site", "")][one.about.get("rater", "")].append((order, layer))
    doubts = []
    ordered = {}
    most = max((len(files) for raters in layers.values() for files in raters.values()), default=0)
    for key, raters in layers.items():
        for files in raters.values():
            if len(files) < most:
                doubts.append(f"{files[0][1].path}: {most} masks make a case, here are {len(files)}.")
        sound = {
            name: [layer for _, layer in sorted(files, key=lambda f: f[0])] for name, files in sorted(raters.items())
        }
        ordered[key] = {name: tuple(files) for name, files in sound.items() if len(files) == most}
    return {key: raters for key, raters in ordered.items() if raters}, doubts


def _pattern(text: str, options: ImportOptions) -> tuple[str, str]:
    """The label and the pattern of LABEL=PATTERN; no label where none is named."""
    label, sign, rest = text.partition("=")
    return (label, rest) if sign and label in options.labels else ("", text)


def _raw(
    tree: SourceFiles,
    one: Match,
    options: ImportOptions,
    raters: Mapping[str, tuple[Layer, ...]] | None = None,
    label: str = "",
) -> RawCase:
    captured = dict(one.case)
    name = f"{label}-{one.name}" if label else one.name
    for suffix in IMAGE_SUFFIXES:  # a star at the end of a pattern
        name = name.removesuffix(suffix)
    patient = captured.get("patient") or name
    site = one.about.get("site") or options.site or SITE
    split = split_of(one.about.get("split", ""))
    return RawCase(site, name, patient, (tree.root / one.path,), raters or {}, label, split)


def _candidates(tree: SourceFiles) -> list[Path]:
    """What patterns are compared with: files that may be images, and folders of DICOM series as one."""
    files = [path for path in tree.files if suffix_of(path) and not holds_dicom(tree.root / path)]
    folders = {path.parent for path in tree.files if holds_dicom(tree.root / path) or _bare_dicom(tree.root / path)}
    singles = [path for path in tree.files if path.parent in folders]
    return sorted({*files, *folders, *singles} - {Path()})


def _bare_dicom(path: Path) -> bool:
    return not path.suffix and is_dicom(path)


def _guessed(tree: SourceFiles) -> tuple[str, tuple[str, ...]]:
    """images/ beside masks/ or labels/; a folder for each class is not guessed, it may be anything."""
    tops = sorted({path.parts[0] for path in tree.files if len(path.parts) > 1})
    pictures = next((name for name in _IMAGE_FOLDERS if name in tops), "")
    drawn = next((name for name in _MASK_FOLDERS if name in tops and name != pictures), "")
    if pictures and drawn:
        return f"{pictures}/{{case}}.{_ending(tree, pictures)}", (f"{drawn}/{{case}}.{_ending(tree, drawn)}",)
    raise StudyError(
        f"say which files of {tree.root} are images and which are masks: --images 'images/{{case}}.png' "
        "--masks 'masks/{case}.png' --labels NAME, or --images '{class}/*.png' for a folder per class."
    )


def _ending(tree: SourceFiles, folder: str) -> str:
    endings = {suffix_of(path).lstrip(".") for path in tree.files if path.parts[0] == folder} - {""}
    if len(endings) != 1:
        raise StudyError(
            f"{tree.root / folder} has files of {len(endings)} formats; say which with --images and --masks."
        )
    (ending,) = endings
    return next(p.name[-len(ending) :] for p in tree.files if p.parts[0] == folder and suffix_of(p).endswith(ending))


def _form(cases: Sequence[RawCase], options: ImportOptions) -> tuple[int, int]:
    """Dimensions and channels: those asked for, else those of the first image that can be read."""
    if options.dimensions and options.channels:
        return options.dimensions, options.channels
    wrong: DataError | None = None
    for case in cases:
        try:
            dimensions = options.dimensions or _dimensions(case)
            channels = len(read_stored(case.images[0], dimensions, 3).array)
            return dimensions, options.channels or channels
        except DataError as error:
            wrong = wrong or error
    raise wrong or DataError("there is no image to read.")


def _dimensions(case: RawCase) -> int:
    """2 or 3, by what the image is."""
    path = case.images[0]
    if path.is_dir():
        return 3
    try:
        read_stored(path, 2, 3)
    except DataError:
        return 3
    return 2


def _first(tree: SourceFiles) -> str:
    return tree.files[0].as_posix() if tree.files else "not there: the folder is empty"


def _listed(doubts: Sequence[str]) -> str:
    return "".join(f"\n  {doubt}" for doubt in doubts[:10])
