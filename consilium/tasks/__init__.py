"""Builds a Task from `[task]` of a study and the facts of a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from consilium.errors import StudyError
from consilium.extensions import is_code, load
from consilium.fields import check_below_one, check_choices
from consilium.learning import augment
from consilium.networks import SEGMENTS, Network
from consilium.networks.vgg import SmallVGG
from consilium.task import Task
from consilium.tasks.classification import Classification
from consilium.tasks.segmentation import UNANNOTATED, Segmentation


@dataclass(frozen=True)
class Facts:
    """The content of federation.toml; a hospital gets it with the job."""

    task: str
    labels: tuple[str, ...]
    dimensions: int
    channels: int
    contains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskFields:
    """`[task]` of a study, beside the fields of its network."""

    network: str = ""  # unet2d, unet3d, dynunet, …, see `networks`; empty: one that fits the federation
    loss: str = "dice"  # "dice+ce", or your own: "file.py:function"
    selector: str = "vgg-small"  # "vgg11": the network that routes images to models
    selector_widths: tuple[int, ...] = (8, 16, 32)  # of "vgg-small"
    dice_background: bool = False  # Dice also of background, where labels exclude each other
    augment: tuple[str, ...] = ()  # flip, flip-plane, rotate, turn, scale, affine, distort, cutout, brightness, noise;
    # with a strength as in "rotate*2"; or your own
    patch: tuple[int, ...] = ()  # train and predict in windows of this size
    # every second training patch lies around a voxel of the site's labels; a number: around an intensity above it
    patch_around: float | str = "labels"
    overlap: float = 0.5  # of the windows when predicting
    unannotated: str = "unknown"  # labels a site does not annotate; "background", "ignored": see the page on studies
    scores: tuple[str, ...] = ()  # your own, "file.py:function", beside the task's
    initial: str = ""  # a finished run or a .safetensors file whose weights the model starts from
    decides: str = "slice"  # volumes trained as slices: which score decides, slice_dice or, by "volume", dice
    clean_up: bool = False  # fill holes and drop small pieces of predicted masks; scored beside the others

    def __post_init__(self) -> None:
        if self.loss not in ("dice", "dice+ce") and not is_code(self.loss):
            raise StudyError(f"[task] loss = {self.loss!r}: it must be one of dice, dice+ce, or your own file.py:name.")
        for name in self.scores:
            if not is_code(name):
                raise StudyError(f"[task] scores: '{name}' names no function; write it as file.py:name.")
        check_choices(self, "task", selector=("vgg-small", "vgg11"))
        check_below_one(self, "task", "overlap")
        if self.patch and min(self.patch) < 1:
            raise StudyError(f"[task] patch = {list(self.patch)}: sizes are positive.")
        if isinstance(self.patch_around, str) and self.patch_around != "labels":
            raise StudyError(
                f"[task] patch_around = {self.patch_around!r}: write 'labels', or an intensity after preprocessing."
            )
        check_choices(self, "task", decides=("slice", "volume"), unannotated=UNANNOTATED)
        augment.check(self.augment)


def default_network(facts: Facts) -> str:
    if facts.task == "classification":
        return "cnn" if facts.dimensions == 2 else "vgg-small"
    return f"unet{facts.dimensions}d"


def build_task(fields: TaskFields, network: Network, facts: Facts, seed: int) -> Task:
    """The task of a study on a federation."""
    from consilium.networks.vgg import VGG11

    selector: Network = VGG11() if fields.selector == "vgg11" else SmallVGG(fields.selector_widths)
    name = fields.network or default_network(facts)
    if name.startswith("unet") and name != f"unet{facts.dimensions}d":
        raise StudyError(f"[task] network = '{name}': this federation has {facts.dimensions}-D images.")
    loss = function(fields.loss, "task") if is_code(fields.loss) else None
    scores = {name.rpartition(":")[2]: function(name, "task") for name in fields.scores}
    if facts.task == "classification":
        if fields.patch:
            raise StudyError("[task] patch is for segmentation; a class belongs to the whole image.")
        if fields.clean_up:
            raise StudyError("[task] clean_up is for masks; a class has no holes.")
        if fields.unannotated != "unknown":
            raise StudyError("[task] unannotated is for masks; every case has its class.")
        if name in SEGMENTS:  # a user's own network may do both
            raise StudyError(
                f"[task] network = '{name}' segments, but this federation's task is classification; take 'cnn'."
            )
        return Classification(
            facts.labels, facts.dimensions, facts.channels, network, selector, loss, scores, seed, start=fields.initial
        )
    if name not in SEGMENTS and ":" not in name:
        raise StudyError(f"[task] network = '{name}' classifies; take 'unet{facts.dimensions}d' for segmentation.")
    if fields.patch and len(fields.patch) != facts.dimensions:
        raise StudyError(f"[task] patch = {list(fields.patch)}: this federation has {facts.dimensions}-D images.")
    return Segmentation(
        labels=facts.labels,
        dimensions=facts.dimensions,
        channels=facts.channels,
        model=network,
        selector=selector,
        contains=facts.contains,
        loss_name="dice" if loss else fields.loss,
        dice_background=fields.dice_background,
        own_loss=loss,
        own_scores=scores,
        patch=fields.patch,
        overlap=fields.overlap,
        unannotated=fields.unannotated,
        clean_up=fields.clean_up,
        seed=seed,
        start=fields.initial,
        decides=fields.decides,
    )


def function(name: str, section: str) -> Callable[..., Any]:
    """The function that `file.py:name` names; StudyError if it is not a function."""
    found = load(name, section)
    if not callable(found):
        raise StudyError(f"[{section}] {name} is not a function.")
    return found  # type: ignore[no-any-return]
