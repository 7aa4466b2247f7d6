"""What is learned: `[task]` of a study and the facts of a federation make a Task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from consilium.errors import StudyError
from consilium.learning import augment
from consilium.networks import SEGMENTS, Network
from consilium.networks.vgg import SmallVGG
from consilium.site import Task
from consilium.tasks.classification import Classification
from consilium.tasks.segmentation import UNANNOTATED, Segmentation


@dataclass(frozen=True)
class Facts:
    """What federation.toml says; a hospital gets it with the job."""

    task: str
    labels: tuple[str, ...]
    dimensions: int
    channels: int
    contains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskFields:
    """`[task]` of a study, beside the fields of its network."""

    network: str = ""  # unet2d, unet3d, plain-unet, cnn, vgg11, vgg-small; empty: what fits the federation
    loss: str = "dice"  # "dice+ce"
    selector: str = "vgg-small"  # "vgg11": the network that routes images to models
    selector_widths: tuple[int, ...] = (8, 16, 32)  # of "vgg-small"
    augment: tuple[str, ...] = ()  # flip, rotate, scale, brightness, noise
    patch: tuple[int, ...] = ()  # train and predict in windows of this size
    overlap: float = 0.5  # of the windows when predicting
    unannotated: str = "unknown"  # labels a site does not annotate; "background", "ignored": see the page on studies
    clean_up: bool = False  # fill holes and drop small pieces of masks that are delivered; scored beside the others

    def __post_init__(self) -> None:
        if self.loss not in ("dice", "dice+ce"):
            raise StudyError(f"[task] loss = {self.loss!r}: it must be one of dice, dice+ce.")
        if self.selector not in ("vgg-small", "vgg11"):
            raise StudyError(f"[task] selector = {self.selector!r}: it must be one of vgg-small, vgg11.")
        if not 0 <= self.overlap < 1:
            raise StudyError(f"[task] overlap = {self.overlap}: it must be in [0, 1).")
        if self.patch and min(self.patch) < 1:
            raise StudyError(f"[task] patch = {list(self.patch)}: sizes are positive.")
        if self.unannotated not in UNANNOTATED:
            raise StudyError(f"[task] unannotated = {self.unannotated!r}: it must be one of {', '.join(UNANNOTATED)}.")
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
    if facts.task == "classification":
        if fields.patch:
            raise StudyError("[task] patch is for segmentation; a class belongs to the whole image.")
        if fields.clean_up:
            raise StudyError("[task] clean_up is for masks; a class has no holes.")
        if fields.unannotated != "unknown":
            raise StudyError("[task] unannotated is for masks; every case has its class.")
        if name in SEGMENTS:
            raise StudyError(
                f"[task] network = '{name}' segments, but this federation's task is classification; take 'cnn'."
            )
        return Classification(facts.labels, facts.dimensions, facts.channels, network, selector, seed)
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
        loss_name=fields.loss,
        patch=fields.patch,
        overlap=fields.overlap,
        unannotated=fields.unannotated,
        clean_up=fields.clean_up,
        seed=seed,
    )
