"""The networks a study can name, each a dataclass of its fields with `build`."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from consilium.networks.cnn import CNN
from consilium.networks.monai_nets import DenseNet, DynUNet, ResNet, SegResNet, SwinUNETR
from consilium.networks.plain_unet import PlainUNet
from consilium.networks.unet import UNet
from consilium.networks.vgg import VGG11, SmallVGG


class Network(Protocol):
    """A network's fields, and `build` for given numbers of inputs and outputs."""

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module: ...


SEGMENTS = ("unet2d", "unet3d", "plain-unet", "dynunet", "segresnet", "swin-unetr")  # the others classify
NETWORKS: dict[str, type[Network]] = {
    "unet2d": UNet,
    "unet3d": UNet,
    "plain-unet": PlainUNet,
    "cnn": CNN,
    "vgg11": VGG11,
    "vgg-small": SmallVGG,
    "dynunet": DynUNet,
    "segresnet": SegResNet,
    "swin-unetr": SwinUNETR,
    "densenet": DenseNet,
    "resnet": ResNet,
}
