"""ONNX that needs nothing of ours: raw pixels of any size in, probabilities out; and the same with weights and activations in int8.

Resizing, normalisation and softmax are part of the graph. Resizing of uint8 pixels by onnxruntime is that of Pillow, which training
images are resized with, up to one grey level in a pixel of thousands.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import InvalidData, UnusableFormat
from fedloom.models.personal import KEY, Facts

PIXELS, IMAGES, LOGITS, PROBABILITIES = "pixels", "images", "logits", "probabilities"  # tensors of the graph, in their order
OPSET = 18  # the first whose Resize smooths as Pillow's does
CALIBRATED = 256  # images at most that say how large activations are
BATCH = 32
Pixels = npt.NDArray[np.uint8]  # (n, channels, height, width)


def need(*modules: str) -> None:
    """Refuse with the cure when a module of the extra ``export`` is not installed."""
    for name in modules:
        try:
            __import__(name)
        except ImportError as error:
            cure = "Install it with: pip install 'fedloom[export]'"
            raise UnusableFormat(f"ONNX needs the package {name}, which is not installed here. {cure}", package=name) from error


def onnx_session(data: bytes) -> Any:
    need("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its complaints come as exceptions
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def logits_of(data: bytes) -> Callable[[Pixels], npt.NDArray[np.float32]]:
    """What a file that takes pixels says to images, (n, channels, height, width)."""
    session = onnx_session(data)
    return lambda images: run_pixels(session, images)


def run_pixels(session: Any, images: Pixels) -> npt.NDArray[np.float32]:
    logits: npt.NDArray[np.float32] = session.run([LOGITS], {PIXELS: np.ascontiguousarray(images.transpose(0, 2, 3, 1))})[0]
    return logits


# -- the graph ---------------------------------------------------------------------------
def tidy(model: Any) -> Any:
    """Without paths of the machine it was made on, and without notes on the shapes of weights: those confuse onnxruntime's quantisation."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.value_info, *graph.input, *graph.output):
        del part.metadata_props[:]
    weights = {one.name for one in graph.initializer}
    kept = [one for one in graph.value_info if one.name not in weights]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return model


def with_pixels(model: Any, facts: Facts) -> bytes:
    """A network from normalised images to logits, made one from pixels to probabilities and logits, with its description."""
    from onnx import TensorProto, helper

    image, graph = facts["image"], model.graph
    side, channels = image["size"], image["channels"]
    scale, shift = _normalisation(facts)
    constants = {
        "fedloom.side": (TensorProto.INT64, [2], [side, side]),
        "fedloom.scale": (TensorProto.FLOAT, [1, channels, 1, 1], scale),
        "fedloom.shift": (TensorProto.FLOAT, [1, channels, 1, 1], shift),
        "fedloom.temperature": (TensorProto.FLOAT, [], [facts.get("temperature", 1.0)]),
    }
    smooth: dict[str, Any] = {
        "mode": "cubic",
        "antialias": 1,
        "cubic_coeff_a": -0.5,
        "exclude_outside": 1,
        "coordinate_transformation_mode": "half_pixel",
    }
    before = [
        helper.make_node("Transpose", [PIXELS], ["fedloom.upright"], perm=[0, 3, 1, 2]),
        helper.make_node("Shape", ["fedloom.upright"], ["fedloom.first"], start=0, end=2),  # how many, channels
        helper.make_node("Concat", ["fedloom.first", "fedloom.side"], ["fedloom.sizes"], axis=0),
        helper.make_node("Resize", ["fedloom.upright", "", "", "fedloom.sizes"], ["fedloom.resized"], **smooth),
        helper.make_node("Cast", ["fedloom.resized"], ["fedloom.numbers"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["fedloom.numbers", "fedloom.scale"], ["fedloom.scaled"]),
        helper.make_node("Add", ["fedloom.scaled", "fedloom.shift"], [IMAGES]),
    ]
    after = [
        helper.make_node("Div", [LOGITS, "fedloom.temperature"], ["fedloom.tempered"]),
        helper.make_node("Softmax", ["fedloom.tempered"], [PROBABILITIES], axis=1),
    ]
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend([helper.make_tensor_value_info(PIXELS, TensorProto.UINT8, ["n", "height", "width", channels])])
    graph.initializer.extend([helper.make_tensor(name, *what) for name, what in constants.items()])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", image["classes"]]) for name in (PROBABILITIES, LOGITS)]
    del graph.output[:]
    graph.output.extend(outputs)
    if model.opset_import[0].version < OPSET:
        raise UnusableFormat(f"torch's exporter wrote ONNX operations of version {model.opset_import[0].version}, and {OPSET} is needed")
    model.metadata_props.add(key=KEY, value=json.dumps(dict(facts), sort_keys=True))
    data: bytes = model.SerializeToString()
    return data


# -- int8 ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Quantised:
    """What int8 costs and saves. Accuracies are of the float file and of this one, on the same test images."""

    float_bytes: int
    bytes: int
    float_accuracy: float
    accuracy: float
    images: int

    @property
    def loss(self) -> float:
        """Share of the test images, 0 to 1; negative where int8 is better."""
        return self.float_accuracy - self.accuracy


def in_int8(model: Any, facts: Facts, images: Pixels) -> bytes:
    """Weights and activations in 8 bits, by onnxruntime (static, a scale for each output channel). images: from which it learns how large
    activations are."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    if not len(images):
        raise InvalidData("int8 needs images, to see how large activations are, and there are none")
    scale, shift = (np.array(values, np.float32).reshape(1, -1, 1, 1) for values in _normalisation(facts))
    some = images[:: max(1, len(images) // CALIBRATED)][:CALIBRATED].astype(np.float32) * scale + shift

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._parts = iter([{IMAGES: some[start : start + BATCH]} for start in range(0, len(some), BATCH)])

        def get_next(self) -> Any:
            return next(self._parts, None)

    with TemporaryDirectory() as folder, _silent():
        target, source = Path(folder) / "int8.onnx", Path(folder) / "float.onnx"
        source.write_bytes(model.SerializeToString())
        kinds = ["Conv", "Gemm", "MatMul"]
        quantize_static(source, target, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, op_types_to_quantize=kinds)
        return with_pixels(_short(onnx.load(str(target))), facts)


def _normalisation(facts: Facts) -> tuple[list[float], list[float]]:
    """What a pixel is multiplied by and what is added then, for each channel: as ``data.augment.normalise`` does it."""
    both = list(zip(facts["mean"], facts["std"], strict=True))
    return [1 / (255 * spread) for _, spread in both], [-centre / spread for centre, spread in both]


def _short(model: Any) -> Any:
    """In a small network the names of thousands of tensors are as large as its weights; and zero points that are 0 need not be said."""
    from onnx import numpy_helper

    graph = model.graph
    zeros = {one.name for one in graph.initializer if not numpy_helper.to_array(one).any()}
    names = {one.name: one.name for one in (*graph.input, *graph.output)}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and len(node.input) == 3 and node.input[2] in zeros:
            del node.input[2]
        for tensors in (node.input, node.output):
            tensors[:] = [name and names.setdefault(name, f"{len(names):x}") for name in tensors]
        node.name = node.doc_string = ""
    kept = [one for one in graph.initializer if one.name in names]
    del graph.initializer[:], graph.value_info[:]
    for one in kept:
        one.name = names[one.name]
    graph.initializer.extend(kept)
    return tidy(model)


def measured(float_data: bytes, data: bytes, images: Pixels, labels: npt.NDArray[np.int64]) -> Quantised:
    """Both files on test images."""
    before, after = (_accuracy(logits_of(one), images, labels) for one in (float_data, data))
    return Quantised(len(float_data), len(data), before, after, len(labels))


def _accuracy(logits: Callable[[Pixels], npt.NDArray[np.float32]], images: Pixels, labels: npt.NDArray[np.int64]) -> float:
    parts = range(0, len(labels), BATCH)
    right = [(logits(images[at : at + BATCH]).argmax(1) == labels[at : at + BATCH]).sum() for at in parts]
    return float(np.sum(right) / len(labels))


@contextmanager
def _silent() -> Iterator[None]:
    """onnxruntime recommends a preparation that a network without it does not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
