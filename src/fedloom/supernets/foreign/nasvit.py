"""How the NASViT repository (facebookresearch/NASViT, ``AttentiveNasDynamicModel``) names the weights of our NASViT supernet.

It keeps the scales of an attention block as one (10, 8, channels) tensor by depth and by tokens modulo 8, and positions for maps of
the whole window. ``split`` cuts them into the parts that our instance can use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedloom.spaces.nasvit import STAGES, NASViTSettings
from fedloom.supernets.base import Supernet
from fedloom.supernets.elastic import centre
from fedloom.supernets.foreign.base import IMAGENET, PublicNetwork

BLOCK = re.compile(r"stage(\d+)\.block(\d+)\.(.+)")
ROW = re.compile(r"(attention|feed)\.scale\.depth(\d+)_tokens(\d+)")
LAYERS = {
    "expand": "mobile_inverted_conv.inverted_bottleneck",
    "depth": "mobile_inverted_conv.depth_conv",
    "project": "mobile_inverted_conv.point_linear",
    "squeeze.reduce": "mobile_inverted_conv.depth_conv.se.fc.reduce",
    "squeeze.restore": "mobile_inverted_conv.depth_conv.se.fc.expand",
    "shortcut": "shortcut.conv.conv",
    "attention.norm": "norm1",
    "attention.query": "attn.q.linear",
    "attention.key": "attn.k.linear",
    "attention.value": "attn.v.linear",
    "attention.local": "attn.vconv",
    "attention.before": "attn.proj_l.linear",
    "attention.after": "attn.proj_w.linear",
    "attention.project": "attn.proj.linear",
    "feed.first.norm": "norm3",  # the second of its two layers runs first
    "feed.first.hidden": "mlp2.linear1.linear",
    "feed.first.output": "mlp2.linear2.linear",
    "feed.second.norm": "norm2",
    "feed.second.hidden": "mlp1.linear1.linear",
    "feed.second.output": "mlp1.linear2.linear",
}
ENDS = {
    "stem": "first_conv",
    "head": "last_conv.final_expand_layer",
    "features": "last_conv.feature_mix_layer",
    "classifier": "classifier.linear.linear",
}
WRAPPED = {"conv": "conv.conv", "norm": "bn.bn"}  # elastic layers wrap an ordinary one of the same name
SCALES = {"attention": "rescale_attn", "feed": "rescale_mlp"}
POSITIONS = "attn.relative_position_bias_table"


def table(supernet: Supernet[Any]) -> dict[str, str]:
    """Our name -> theirs as ``split`` gives them, for every parameter and the running statistics of batch normalisations."""
    names = list(supernet.shapes)
    norms = [name.removesuffix(".conv.weight") + ".norm" for name in names if name.endswith(".conv.weight")]
    names += [f"{norm}.{moment}" for norm in norms if f"{norm}.weight" in supernet.shapes for moment in ("running_mean", "running_var")]
    return {name: _theirs(name) for name in names}


def split(state: Mapping[str, Tensor], supernet: Supernet[Any]) -> dict[str, Tensor]:
    """Their state dict, scales and positions cut into the parts that this instance uses; what does not fit stays as it is."""
    parts = dict(state)
    for name, shape in supernet.shapes.items():
        theirs = _theirs(name)
        whole, _, row = theirs.partition("#")
        if whole not in state:
            continue
        tensor = state[whole]
        if row and tensor.ndim == 3:  # (depths, tokens modulo 8, channels)
            depth, tokens = map(int, row.split(","))
            if depth < tensor.shape[0] and tokens < tensor.shape[1]:
                parts.pop(whole, None)
                parts[theirs] = tensor[depth, tokens]
        elif whole.endswith(POSITIONS) and tensor.ndim == 2:  # (offsets down * offsets right, heads)
            side = math.isqrt(len(tensor))
            if side**2 == len(tensor) and side >= shape[0]:
                offsets = centre(side, shape[0])
                parts[theirs] = tensor.reshape(side, side, -1)[offsets, offsets]
    return parts


def _theirs(name: str) -> str:
    found = BLOCK.fullmatch(name)
    if not found:
        end, _, rest = name.partition(".")
        return f"{ENDS[end]}.{_unwrapped(rest)}"
    stage, block, path = int(found[1]) - 1, int(found[2]) - 1, found[3]
    prefix = f"blocks.{sum(before.depths[-1] for before in STAGES[:stage]) + block}"
    row = ROW.fullmatch(path)
    if row:
        return f"{prefix}.{SCALES[row[1]]}#{row[2]},{row[3]}"
    if path == "attention.positions":
        return f"{prefix}.{POSITIONS}"
    layer = max((layer for layer in LAYERS if path.startswith(f"{layer}.")), key=len)
    return f"{prefix}.{LAYERS[layer]}.{_unwrapped(path.removeprefix(f'{layer}.'))}"


def _unwrapped(path: str) -> str:
    kind, _, rest = path.partition(".")
    return f"{WRAPPED[kind]}.{rest}" if kind in WRAPPED else path


NETWORK = PublicNetwork(
    source="NASViT supernet, attentive_nas_dynamic_model (facebookresearch/NASViT)",
    settings=NASViTSettings.original(),
    table=table,
    # Indices of positions, counters of batches, running averages of two subnets, a frozen vector that nothing reads, and
    # convolutions of shortcuts that never change the number of channels: all blocks but the first of a stage.
    expected_leftovers=lambda supernet: (
        r"relative_position_index$|num_batches_tracked$|\.bn_tracking\.|mobile_inverted_conv\.rescale$|\.shortcut\.conv\.conv\.weight$"
    ),
    size=224,
    mean=IMAGENET[0],
    std=IMAGENET[1],
    split=split,
    cut_for=("stem_stride", "strides", "resolutions", "window"),
)
