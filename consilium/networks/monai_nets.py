"""Networks of MONAI that studies can name: DynUNet, SegResNet and SwinUNETR segment, DenseNet and ResNet classify."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from torch import nn

from consilium.errors import StudyError
from consilium.networks.nested_unet import MONAI_NORMS
from consilium.networks.unet import AnySize


def _refuse_norm(norm: str) -> None:
    if norm not in MONAI_NORMS:
        raise StudyError(f"[task] norm = {norm!r}: it must be one of {', '.join(MONAI_NORMS)}.")


def _refuse_widths(key: str, values: tuple[int, ...], least: int) -> None:
    if len(values) < least or min(values) < 1:
        raise StudyError(f"[task] {key} = {list(values)}: at least {least} positive numbers are needed.")


@dataclass(frozen=True)
class DynUNet:
    """nnU-Net's U-Net: two convolutions per level; the first levels may keep the slices of thick-slice volumes."""

    widths: tuple[int, ...] = (32, 64, 128, 256, 320)  # channels per level; each level halves the image
    flat_levels: int = 0  # the number of first levels that do not halve the slice axis
    residual: bool = False
    norm: str = "instance"  # "batch", "group"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _refuse_widths("widths", self.widths, 2)
        _refuse_norm(self.norm)
        if not 0 <= self.flat_levels < len(self.widths):
            raise StudyError(f"[task] flat_levels = {self.flat_levels}: it is 0 to {len(self.widths) - 1}.")

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        from monai.networks.nets import DynUNet as MonaiDynUNet

        if self.flat_levels and dimensions == 2:
            raise StudyError("[task] flat_levels is for volumes; leave it out for pictures.")
        levels = range(len(self.widths))
        kernels = [(1 if dimensions == 3 and i < self.flat_levels else 3, *(3,) * (dimensions - 1)) for i in levels]
        strides = [
            (1,) * dimensions if i == 0 else (1 if i <= self.flat_levels else 2, *(2,) * (dimensions - 1))
            for i in levels
        ]
        network = MonaiDynUNet(
            spatial_dims=dimensions,
            in_channels=channels,
            out_channels=outputs,
            kernel_size=kernels,
            strides=strides,
            upsample_kernel_size=strides[1:],
            filters=self.widths,
            norm_name=MONAI_NORMS[self.norm],
            dropout=self.dropout or None,
            res_block=self.residual,
        )
        return AnySize(network, 1 << (len(self.widths) - 1))


@dataclass(frozen=True)
class SegResNet:
    """The residual encoder and light decoder that won BraTS 2018, without its autoencoder branch."""

    width: int = 16  # channels of the first level, a multiple of 8; each level doubles them
    blocks: tuple[int, ...] = (1, 2, 2, 4)  # residual blocks per level of the encoder
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _refuse_widths("blocks", self.blocks, 2)
        if self.width < 8 or self.width % 8:
            raise StudyError(f"[task] width = {self.width}: it must be a multiple of 8.")

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        from monai.networks.nets import SegResNet as MonaiSegResNet

        network = MonaiSegResNet(
            spatial_dims=dimensions,
            init_filters=self.width,
            in_channels=channels,
            out_channels=outputs,
            dropout_prob=self.dropout or None,
            blocks_down=self.blocks,
            blocks_up=(1,) * (len(self.blocks) - 1),
        )
        return AnySize(network, 1 << (len(self.blocks) - 1))


@dataclass(frozen=True)
class SwinUNETR:
    """A Swin transformer as the encoder of a U-Net; large, and slow without a GPU."""

    width: int = 24  # features, a multiple of 12
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width < 12 or self.width % 12:
            raise StudyError(f"[task] width = {self.width}: it must be a multiple of 12.")

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        from monai.networks.nets import SwinUNETR as MonaiSwinUNETR

        if find_spec("einops") is None:
            raise StudyError("network = 'swin-unetr' needs the package einops: pip install 'consilium[swin]'.")
        network = MonaiSwinUNETR(
            spatial_dims=dimensions,
            in_channels=channels,
            out_channels=outputs,
            feature_size=self.width,
            drop_rate=self.dropout,
        )
        return AnySize(network, 32)


@dataclass(frozen=True)
class DenseNet:
    """DenseNet; the defaults are DenseNet-121, images of 32 pixels and more."""

    width: int = 64  # of the first convolution
    growth: int = 32  # channels that each layer adds
    blocks: tuple[int, ...] = (6, 12, 24, 16)  # layers per block; each block but the last halves the image
    norm: str = "batch"  # "instance", "group"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _refuse_widths("blocks", self.blocks, 1)
        _refuse_norm(self.norm)

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        from monai.networks.nets import DenseNet as MonaiDenseNet

        network: nn.Module = MonaiDenseNet(
            spatial_dims=dimensions,
            in_channels=channels,
            out_channels=outputs,
            init_features=self.width,
            growth_rate=self.growth,
            block_config=self.blocks,
            norm=MONAI_NORMS[self.norm],
            dropout_prob=self.dropout,
        )
        return network


@dataclass(frozen=True)
class ResNet:
    """ResNet of basic blocks; the defaults are ResNet-18."""

    widths: tuple[int, ...] = (64, 128, 256, 512)  # channels per stage; four stages
    blocks: tuple[int, ...] = (2, 2, 2, 2)  # per stage
    norm: str = "batch"  # "instance", "group"

    def __post_init__(self) -> None:
        for key, values in (("widths", self.widths), ("blocks", self.blocks)):
            if len(values) != 4 or min(values) < 1:
                raise StudyError(f"[task] {key} = {list(values)}: a resnet takes four positive numbers.")
        _refuse_norm(self.norm)

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        from monai.networks.nets import ResNet as MonaiResNet

        network: nn.Module = MonaiResNet(
            block="basic",
            layers=list(self.blocks),
            block_inplanes=list(self.widths),
            spatial_dims=dimensions,
            n_input_channels=channels,
            num_classes=outputs,
            conv1_t_stride=2,
            norm=MONAI_NORMS[self.norm],
        )
        return network
