"""The study's [preprocess] and decisions as MONAI transforms, and in words where MONAI does otherwise."""

from __future__ import annotations

from typing import Any

from consilium.data.preprocess import MARGIN, Preprocess, by_type
from consilium.errors import StudyError
from consilium.study import Study
from consilium.tasks.segmentation import Segmentation

Transform = dict[str, Any]

# MONAI widens 16-bit pixels to int32; a NIfTI header still tells them (512) from stored int32
_BY_TYPE = (
    "$lambda x: x.float() / 255 if x.dtype == torch.uint8 else x.float() / 65535 "
    "if x.dtype in (torch.uint16, torch.int32) and x.meta.get('datatype', 512) == 512 "
    "else monai.transforms.ScaleIntensity()(x.float())"
)
_ABOVE_MINIMUM = "$lambda x: x > x.amin(tuple(range(1, x.ndim)), keepdim=True)"
_ABOVE_ZERO = "$lambda x: x > 0"


def preprocessing(study: Study, divisor: int) -> list[Transform]:
    """From a file to the array (channels, *spatial) that the network was trained on."""
    how, axes = study.preprocess, study.facts.dimensions
    if how.steps:
        raise StudyError("[preprocess] steps of your own cannot be written into a MONAI bundle; predict with the run.")
    backwards = [0, *range(axes, 0, -1)]
    steps = [
        _step("LoadImaged", dtype=None, image_only=True),
        _step("EnsureChannelFirstd"),
        _step("Lambdad", func=_BY_TYPE) if by_type(how) else _step("EnsureTyped", dtype="$torch.float32"),
    ]
    if how.orientation:
        # MONAI's readers give affines in RAS; to leave the letters out is deprecated
        steps.append(_step("Orientationd", axcodes=how.orientation, labels=[["L", "R"], ["P", "A"], ["I", "S"]]))
    if how.spacing:
        steps.append(_step("Spacingd", pixdim=list(reversed(how.spacing)), mode="bilinear"))
    # MONAI's readers give (x, y, z), consilium's (z, y, x)
    steps.append(_step("Transposed", indices=backwards))
    if how.crop != "none":
        positive = how.crop == "positive"
        function, margin = (_ABOVE_ZERO, 0) if positive else (_ABOVE_MINIMUM, MARGIN)
        crop: Transform = {"select_fn": function, "margin": margin, "allow_smaller": True}
        steps.append(_step("CropForegroundd", source_key="image", **crop))
    steps += _intensities(how)
    if how.size:
        mode = "bilinear" if axes == 2 else "trilinear"
        size = [*[-1] * (axes - len(how.size)), *how.size]  # -1: the number of slices stays as it is
        steps.append(_step("Resized", spatial_size=size, mode=mode, align_corners=False, anti_aliasing=True))
    if divisor > 1 and not study.task_fields.patch:
        sides = [*[1] * (axes - study.task.dimensions), *[divisor] * study.task.dimensions]
        steps.append(_step("DivisiblePadd", k=sides, method="end", mode="edge"))
    return steps


def _intensities(how: Preprocess) -> list[Transform]:
    steps = []
    ends = {"unit": (0.0, 1.0), "signed": (-1.0, 1.0)}.get(how.normalise)
    if how.window:
        low, high = how.window
        to = ends or (low, high)
        steps.append(_step("ScaleIntensityRanged", a_min=low, a_max=high, b_min=to[0], b_max=to[1], clip=True))
    if how.percentiles:
        lower, upper = how.percentiles
        to_ends: Transform = {"b_min": ends[0] if ends else None, "b_max": ends[1] if ends else None}
        scale = _step(
            "ScaleIntensityRangePercentilesd", lower=lower, upper=upper, clip=True, channel_wise=True, **to_ends
        )
        steps.append(scale if ends else _step("ClipIntensityPercentilesd", lower=lower, upper=upper, channel_wise=True))
    if by_type(how) and how.normalise == "signed":
        steps.append(_step("Lambdad", func="$lambda x: 2 * x - 1"))
    if how.normalise == "zscore":
        steps.append(_step("NormalizeIntensityd", channel_wise=True))
    return steps


def postprocessing(study: Study) -> list[Transform]:
    """From logits to a mask on the image's own grid, or to a class."""
    task = study.task
    if not isinstance(task, Segmentation):
        return [_step("AsDiscreted", "pred", argmax=True)]
    if task.unannotated == "ignored":
        raise StudyError("[task] unannotated = 'ignored' is a baseline that learns no background; it is not exported.")
    back = _step("Invertd", "pred", transform="@preprocessing", orig_keys="image", nearest_interp=False, to_tensor=True)
    if task.overlapping:
        inside = [len(task.contains.get(label, ())) for label in task.labels]
        values = [i + 1 for i in sorted(range(len(inside)), key=lambda i: -inside[i])]
        # outer structures first, so that inner ones overwrite them
        nested = (
            f"$lambda x: functools.reduce(lambda mask, v: torch.where(x[v - 1 : v] > 0, v, mask), {values}, "
            "torch.zeros_like(x[:1]))"
        )
        decide = _step("Lambdad", "pred", func=nested)
    else:
        decide = _step("AsDiscreted", "pred", argmax=True)
    save = _step(
        "SaveImaged", "pred", output_dir="@output_dir", output_postfix="mask", separate_folder=False, resample=False,
        output_ext=".png" if study.facts.dimensions == 2 else ".nii.gz", output_dtype="$torch.uint8",
    )  # fmt: skip
    return [back, decide, save]


def inferer(study: Study, divisor: int) -> Transform:
    """Whole images, sliding windows, or a volume slice by slice."""
    fields = study.task_fields
    window = [side + -side % divisor for side in fields.patch]
    sliding = {"sw_batch_size": 4, "overlap": fields.overlap}
    if study.preprocess.slices:
        return {"_target_": "SliceInferer", "spatial_dim": 0, "roi_size": window or [-1, -1], **sliding}
    return (
        {"_target_": "SlidingWindowInferer", "roi_size": window, **sliding} if window else {"_target_": "SimpleInferer"}
    )


def differences(study: Study, divisor: int) -> list[str]:
    """Where the bundle's transforms are not consilium's own, to the last digit."""
    how, found = study.preprocess, []
    if how.size:
        found.append(
            "Where an image shrinks, MONAI smooths with a Gaussian and interpolates; where a prediction shrinks on its "
            "way back, it only interpolates. The training averaged with a triangle. Enlarging is the same."
        )
    if how.spacing:
        found.append(
            "MONAI resamples from the first voxel's centre, the training kept the image's outer edges: the grids may "
            "differ by up to half a voxel and one voxel in size."
        )
    if how.orientation:
        found.append(
            "A volume whose file does not say its orientation was used as stored; MONAI takes the axes of its header."
        )
    if by_type(how) and (how.spacing or how.crop != "none"):
        found.append(
            "Intensities of other types than 8 and 16 bits are scaled before resampling and cropping, not after."
        )
    if any(side % divisor for side in study.task_fields.patch):
        found.append(f"Windows are rounded up to multiples of {divisor}; the training padded each window instead.")
    return found


def _step(target: str, keys: str = "image", **arguments: Any) -> Transform:
    return {"_target_": target, "keys": keys, **arguments}
