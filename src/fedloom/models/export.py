"""A network as a file for others: safetensors (numbers), torch (a program that torch runs without us), ONNX.

Every file takes normalised images, (n, channels, size, size) with ``(pixel / 255 - mean) / std``, gives logits, and carries its
description as JSON: classes, mean, std, image, architecture.
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
from fedloom.files import write_arrays, write_file
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
    """ONNX for onnxruntime and whatever else reads it."""
    need("onnx", "onnxscript", "onnxruntime")
    with _quiet():
        exported = torch.onnx.export(_program(network, facts), dynamo=True, input_names=["images"], output_names=["logits"], verbose=False)
    assert exported is not None
    model = exported.model_proto
    for part in (model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]  # where in the source each operation came from
    model.metadata_props.add(key=KEY, value=json.dumps(dict(facts), sort_keys=True))
    data = model.SerializeToString()
    session = onnx_session(data)
    difference = _compared(network, facts, lambda images: session.run(None, {"images": images.numpy()})[0])
    write_file(path, data)
    return difference


def onnx_session(data: bytes) -> Any:
    need("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its complaints come as exceptions
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


FORMATS: Mapping[str, tuple[str, Write]] = {  # name -> ending of its files, function
    "safetensors": ("safetensors", to_safetensors),
    "torch": ("pt2", to_torch),
    "onnx": ("onnx", to_onnx),
}


def need(*modules: str) -> None:
    """Refuse with the cure when a module of the extra ``export`` is not installed."""
    for name in modules:
        try:
            __import__(name)
        except ImportError as error:
            cure = "Install it with: pip install 'fedloom[export]'"
            raise UnusableFormat(f"ONNX needs the package {name}, which is not installed here. {cure}", package=name) from error


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
def _compared(network: nn.Module, facts: Facts, run: Callable[[Tensor], npt.NDArray[np.float32]]) -> float:
    """The largest difference to the network's own logits, on random images."""
    images = _images(facts, CHECKED)
    expected = network(images).numpy()
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
