"""State dicts in the public naming, with random numbers, of small instances of every space."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import Supernet, make_supernet
from fedloom.supernets.foreign import PUBLIC
from fedloom.testing.nets import weights_of
from support.checks import Fedloom

IMAGE = ImageShape(channels=3, size=8, classes=5)
MERGED = ("7to5_matrix", "relative_position_bias_table")  # public tensors whose first axis is two of ours


def tiny(space: str, image: ImageShape = IMAGE) -> Supernet[Any]:
    return make_supernet(space, SPACES[space].settings.tiny(), image)


def overrides(space: str) -> list[str]:
    return [f"{space}.{key}={json.dumps(value)}" for key, value in asdict(SPACES[space].settings.tiny()).items()]


def public_state(space: str, supernet: Supernet[Any], seed: int = 0) -> dict[str, Tensor]:
    """A state dict in the public naming with random weights, kernel matrices and running statistics."""
    generator = torch.Generator().manual_seed(seed)
    weights, state, sizes = weights_of(supernet, seed), {}, _norm_sizes(supernet)
    for ours, theirs in PUBLIC[space].make.table(supernet).items():
        if ours.endswith(".running_mean"):
            state[theirs] = 0.3 * torch.randn(sizes[ours], generator=generator)
        elif ours.endswith(".running_var"):
            state[theirs] = 0.5 + torch.rand(sizes[ours], generator=generator)
            state[theirs.replace("running_var", "num_batches_tracked")] = torch.tensor(7)
        elif "#" in theirs:  # NASViT keeps the scales of all depths and token counts in one tensor
            whole, row = theirs.split("#")
            depth, tokens = map(int, row.split(","))
            state.setdefault(whole, torch.zeros(10, 8, len(weights[ours])))[depth, tokens] = weights[ours]
        else:
            state[theirs] = weights[ours].flatten(0, 1) if theirs.endswith(MERGED) else weights[ours]
    return state


def _norm_sizes(supernet: Supernet[Any]) -> dict[str, tuple[int, ...]]:
    """From networks that together use every choice, at its largest width."""
    found: dict[str, tuple[int, ...]] = {}
    sizes = supernet.space.sizes
    for choice in range(sizes.max()):
        with torch.device("meta"):
            network = supernet.network(supernet.space.canonical(np.minimum(choice, sizes - 1)))
        found |= {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return found


def older(key: str) -> str:
    """The spelling of the released once-for-all checkpoints."""
    place, number, *rest = key.split(".")
    return ".".join([place, number, "mobile_inverted_conv", *rest[1:]]) if place == "blocks" else key


def import_(fedloom_: Fedloom, path: Path | str, *arguments: object) -> Any:
    return fedloom_("import-weights", "mobilenetv3", path, *overrides("mobilenetv3"), "--size", 8, *arguments)
