"""How the once-for-all repository (mit-han-lab/once-for-all, ``OFAMobileNetV3``) names the weights of our MobileNetV3 supernet."""

from __future__ import annotations

import re
from typing import Any

from fedloom.spaces.mobilenetv3 import BLOCKS, MobileNetV3Settings
from fedloom.supernets.base import Supernet
from fedloom.supernets.foreign.base import IMAGENET, PublicNetwork

LAYERS = {"expand": "inverted_bottleneck", "depth": "depth_conv", "squeeze": "depth_conv.se.fc", "project": "point_linear"}
ENDS = {"stem": "first_conv", "head": "final_expand_layer", "features": "feature_mix_layer"}
PARTS = {"conv": "conv", "norm": "bn", "to_five": "conv.7to5_matrix", "to_three": "conv.5to3_matrix", "restore": "expand"}


def table(supernet: Supernet[Any]) -> dict[str, str]:
    """Our name -> theirs, for every parameter and, under batch normalisation, every running statistic."""
    names = list(supernet.shapes)
    if supernet.space.settings.norm == "batch":
        norms = [name.removesuffix(".weight") for name in names if name.endswith(".norm.weight")]
        names += [f"{norm}.{moment}" for norm in norms for moment in ("running_mean", "running_var")]
    return {name: _theirs(name) for name in names}


def _theirs(name: str) -> str:
    place, *path = name.split(".")
    if place == "classifier":
        return f"classifier.linear.{path[0]}"
    if place in ENDS:
        return ".".join([ENDS[place], PARTS[path[0]], *path[1:]])
    if place == "first":
        layer, part, *rest = path
        return ".".join(["blocks.0.conv", LAYERS[layer], PARTS[part], *rest])
    block, layer, part, *rest = path
    number = (int(place.removeprefix("stage")) - 1) * BLOCKS + int(block.removeprefix("block"))
    if part in ("conv", "norm"):  # elastic layers wrap an ordinary one of the same name
        rest = [PARTS[part], *rest]
    return ".".join([f"blocks.{number}.conv", LAYERS[layer], PARTS.get(part, part), *rest])


def fold(key: str) -> str:
    """One spelling for the names that earlier and later versions of the repository give the same tensor.

    Older checkpoints, the released ones among them, call a block's ``conv`` ``mobile_inverted_conv``; static and elastic layers
    differ in whether ``conv``, ``bn`` and ``linear`` are written twice.
    """
    key = key.replace(".mobile_inverted_conv.", ".conv.")
    return re.sub(r"\.(bn|linear)\.\1\.|\.(conv)\.conv\.(?=weight$)", lambda twice: f".{twice[1] or twice[2]}.", key)


NETWORK = PublicNetwork(
    source="once-for-all MobileNetV3, ofa_mbv3_d234_e346_k357_w{width} (mit-han-lab/once-for-all)",
    settings=MobileNetV3Settings(width=1.0, stem_stride=2, strides=(2, 2, 2, 1, 2), norm="batch"),
    table=table,
    expected_leftovers=lambda supernet: r"\.num_batches_tracked$",  # counters of batches; running averages need them, we do not
    size=224,
    mean=IMAGENET[0],
    std=IMAGENET[1],
    fold=fold,
    fixed=("norm",),
)
