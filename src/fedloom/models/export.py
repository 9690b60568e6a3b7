"""A network as a file for others: safetensors (numbers), torch (a program that torch runs without us), ONNX.

Every file carries its description as JSON: classes, mean, std, image, architecture. A torch program takes normalised images,
(n, channels, size, size) with ``(pixel / 255 - mean) / std``, and gives logits; ONNX takes pixels and gives probabilities.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedloom.core.errors import UnusableFormat
from fedloom.data.augment import normalise
from fedloom.files import write_arrays, write_file
from fedloom.models.onnx_files import IMAGES, LOGITS, Pixels, Quantised, in_int8, logits_of, measured, need, tidy, with_pixels
from fedloom.models.personal import KEY, Facts

TOLERANCE = 1e-4  # of the largest logit, or of 1 where that is smaller
BESIDE = f"{KEY}.json"  # the description's name inside a .pt2 file
CHECKED = 5  # random images; not the number it is traced with, so that a fixed batch size would show

Write = Callable[[Path, nn.Module, Facts], float | None]  # the largest difference to the network's own logits, where one is possible


def to_safetensors(path: str | Path, network: nn.Module, facts: Facts) -> None:
    """Weights and running statistics; ``fedloom.models.load_model`` builds the network again."""
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith(".num_batches_tracked")}
    write_arrays(path, {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}, facts)


def to_torch(path: str | Path, network: nn.Module, facts: Facts) -> float:
    """An exported program: ``torch.export.load(FILE).module()`` is the network."""
    buffer = io.BytesIO()
    program = _program(network, facts)
    with _quiet():
        torch.export.save(program, buffer, extra_files={BESIDE: json.dumps(dict(facts), sort_keys=True)})
        run = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    difference = _compared(network, facts, lambda images: run(images).detach().numpy())
    write_file(path, buffer.getvalue())
    return difference


def to_onnx(path: str | Path, network: nn.Module, facts: Facts) -> float:
    """ONNX for onnxruntime and whatever else reads it: uint8 ``pixels`` (n, height, width, channels) of any size in, ``probabilities`` and
    ``logits`` out."""
    data = with_pixels(_onnx(network, facts), facts)
    run = logits_of(data)
    difference = _compared(network, facts, lambda images: run(images.numpy()), pixels=True)
    write_file(path, data)
    return difference


def to_int8(path: str | Path, network: nn.Module, facts: Facts, images: Pixels, tests: Pixels, labels: npt.NDArray[np.int64]) -> Quantised:
    """The same with weights and activations in 8 bits, and what that costs on test images. images: (n, channels, size, size), from which
    it learns how large activations are; training images, never the tests."""
    model = _onnx(network, facts)
    data = in_int8(model, facts, images)
    found = measured(with_pixels(model, facts), data, tests, labels)
    write_file(path, data)
    return found


def _onnx(network: nn.Module, facts: Facts) -> Any:
    """From normalised images to logits."""
    need("onnx", "onnxscript", "onnxruntime")
    with _quiet():
        exported = torch.onnx.export(_program(network, facts), dynamo=True, input_names=[IMAGES], output_names=[LOGITS], verbose=False)
    assert exported is not None
    return tidy(exported.model_proto)


INT8 = "onnx-int8"  # which needs images as well
FORMATS: Mapping[str, tuple[str, Write]] = {  # name -> ending of its files, function
    "safetensors": ("safetensors", to_safetensors),
    "torch": ("pt2", to_torch),
    "onnx": ("onnx", to_onnx),
}


# -- how ------------------------------------------------------------------------------------
@torch.no_grad()
def _program(network: nn.Module, facts: Facts) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    with _quiet():
        program = torch.export.export(network.eval(), (_images(facts, 2),), dynamic_shapes=({0: batch},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths on this machine are nobody's business
    return program


def _images(facts: Facts, count: int) -> Tensor:
    image = facts["image"]
    return torch.randn(count, image["channels"], image["size"], image["size"], generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _compared(network: nn.Module, facts: Facts, run: Callable[[Tensor], npt.NDArray[np.float32]], pixels: bool = False) -> float:
    """The largest difference to the network's own logits, on random images. pixels: ``run`` normalises them itself."""
    images = _images(facts, CHECKED)
    if pixels:
        images = (128 + 64 * images).clamp(0, 255).to(torch.uint8)
    expected = network(normalise(images, facts["mean"], facts["std"]) if pixels else images).numpy()
    difference = float(np.abs(run(images) - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise UnusableFormat(f"The exported network's logits differ from the original's by {difference:.2g}, more than {TOLERANCE:g}")
    return difference


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch's exporters warn about packages that we do not use and about their own insides."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
