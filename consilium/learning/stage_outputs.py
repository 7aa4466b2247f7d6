"""The outputs of a network's inner stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks.parts import decoder_stages, encoder_stages, head


@contextmanager
def stage_outputs(stages: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Inside the context, collect the outputs of these modules in call order, each (batch, channels, *spatial)."""
    outputs: list[Tensor] = []

    def note(_: nn.Module, __: object, output: Tensor) -> None:
        outputs.append(output)

    hooks = [stage.register_forward_hook(note) for stage in stages]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def pooled_bottleneck(network: nn.Module, images: Tensor) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
    """The network's output, and the mean over voxels of its lowest level, (batch, channels)."""
    with stage_outputs(encoder_stages(network)[-1:]) as outputs:
        answer = network(images)
    return answer, outputs[0].flatten(2).mean(2)


def levels(network: nn.Module) -> list[nn.Module]:
    """The stages of encoder and decoder in call order, without the one that outputs the logits."""
    last = head(network)
    up = [stage for stage in decoder_stages(network) if all(module is not last for module in stage.modules())]
    return [*encoder_stages(network), *up]


def check_stages(network: nn.Module, who: str) -> None:
    """Reject a network whose encoder is unknown or has fewer than two stages (StudyError)."""
    if len(encoder_stages(network)) < 2:
        raise StudyError(
            f"{who} looks inside the network, and the stages of this one are not known; take 'unet2d', 'unet3d' or "
            "'plain-unet' as [task] network."
        )
