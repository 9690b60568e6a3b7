"""What a model sees in image files; its own description says how images are resized and normalised and what classes are called."""

from __future__ import annotations

import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from fedloom.core.errors import DamagedRun, InvalidData, UnusableFormat, one_line
from fedloom.core.reading import parse_json
from fedloom.data.augment import normalise
from fedloom.data.images import MODES, opened, pixels
from fedloom.files import open_plain, read_plain
from fedloom.models.export import BESIDE
from fedloom.models.onnx_files import PIXELS, onnx_session, run_pixels
from fedloom.models.personal import KEY, MODEL, image_of, load_model, network_of
from fedloom.models.supernet_weights import WEIGHTS, header

BATCH, USUAL_SIDE = 32, 224  # images at a time, of at most so many pixels a side; of larger ones fewer
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # those that pillow reads by itself
DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)  # what reading one may raise
FLOAT32 = 7  # in the weight table of a .pt2 file


@dataclass(frozen=True)
class Model:
    """A network and what it must be fed with."""

    file: Path
    classes: tuple[str, ...]
    channels: int
    size: int  # side in pixels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    logits: Callable[[Tensor], Tensor]
    temperature: float = 1.0  # that logits are divided by; fitted to its client's validation images
    threshold: float = 0.0  # probability of the likeliest class below which the model is unsure

    def probabilities(self, images: npt.NDArray[np.uint8]) -> Tensor:
        """(n, classes) from (n, channels, size, size)."""
        return (self.all_logits(images) / self.temperature).softmax(1)

    @torch.no_grad()
    def all_logits(self, images: npt.NDArray[np.uint8]) -> Tensor:
        """The same before temperature and softmax."""
        batch = max(1, BATCH * USUAL_SIDE**2 // max(self.size, USUAL_SIDE) ** 2)
        parts = [torch.from_numpy(images[start : start + batch]) for start in range(0, len(images), batch)]
        logits = torch.cat([self.logits(normalise(part, self.mean, self.std)) for part in parts])
        if not logits.isfinite().all():
            what = "the logits are not finite numbers, so that its weights or statistics cannot be those of a trained network"
            raise InvalidData(f"{self.file} has no prediction: {what}", file=str(self.file))
        return logits


# -- models ------------------------------------------------------------------------------
def read_model(path: str | Path) -> Model:
    """A file written by ``fedloom export`` in any format, or a client's model inside a run. Nothing in it is executed."""
    path = Path(path)
    try:
        with open_plain(path) as file:
            start = file.read(9)
    except OSError as error:
        raise InvalidData(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    try:
        return _described(path, *_reader(start)(path))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OSError, ArithmeticError, *DAMAGED_ZIP) as error:
        cure = "Write it again with `fedloom export`"
        raise InvalidData(f"{path} is no model of Fedloom, or damaged: {one_line(error)}. {cure}", file=str(path)) from error


def _reader(start: bytes) -> Callable[[Path], tuple[Mapping[str, Any], Callable[[Tensor], Tensor]]]:
    """By a file's first nine bytes: a length (any eight bytes) and JSON, an archive, or the version number that ONNX begins with."""
    if start[8:] == b"{":
        return _read_safetensors
    if start.startswith(b"PK"):
        return _read_torch
    if start.startswith(b"\x08"):
        return _read_onnx
    raise ValueError("it begins like no format that models are written in")


@torch.no_grad()
def _described(path: Path, facts: Mapping[str, Any], logits: Callable[[Tensor], Tensor]) -> Model:
    """The model if its description is whole and true."""
    image, classes = image_of(facts), tuple(map(str, facts["classes"]))
    mean, std = (tuple(map(float, facts[name])) for name in ("mean", "std"))
    if image.channels not in MODES:
        raise ValueError(f"it takes images of {image.channels} channels, and image files have 1 or 3")
    if not len(mean) == len(std) == image.channels or len(classes) != image.classes or not all(math.isfinite(x) and x for x in std):
        raise ValueError("its description contradicts itself")
    try:
        blank = logits(torch.zeros(1, image.channels, image.size, image.size))
    except Exception as error:  # onnxruntime's exceptions have no ancestor of their own
        raise ValueError(one_line(error)) from error
    if tuple(blank.shape) != (1, image.classes):
        raise ValueError(f"it has {tuple(blank.shape)[1:]} outputs for {image.classes} classes")
    temperature, threshold = (float(facts.get(name, usual)) for name, usual in (("temperature", 1.0), ("threshold", 0.0)))
    if not (0 < temperature < math.inf and 0 <= threshold <= 1):
        raise ValueError(f"its temperature is {temperature} and its threshold {threshold}")
    return Model(path, classes, image.channels, image.size, mean, std, logits, temperature, threshold)


def _read_safetensors(path: Path) -> tuple[Mapping[str, Any], Callable[[Tensor], Tensor]]:
    kind = (header(path) or {}).get("format")
    if kind == WEIGHTS:
        cure = "Take one network out of it with `fedloom export FILE --architecture NAME`"
        raise InvalidData(f"{path} holds a whole supernet. {cure}", file=str(path))
    if kind != MODEL:
        raise ValueError("it does not describe itself")
    try:
        network, facts = load_model(path)
    except DamagedRun as error:  # outside a run its cure is none
        raise ValueError(error.__cause__ or error) from error
    return facts, network


def _read_torch(path: Path) -> tuple[Mapping[str, Any], Callable[[Tensor], Tensor]]:
    """The numbers and the description of a .pt2 file; the network is built from them, so that the program inside, which could be
    anybody's, is never run."""
    with open_plain(path) as file, zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > os.fstat(file.fileno()).st_size:
            raise ValueError("its archive is compressed or overlaps itself, and torch writes none like that")
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if f"extra/{BESIDE}" not in names:
            raise ValueError("it does not describe itself")
        facts = parse_json(archive.read(names[f"extra/{BESIDE}"]))
        table = parse_json(archive.read(names["data/weights/model_weights_config.json"]))["config"]
        tensors = {}
        for name, entry in table.items():
            meta = entry["tensor_meta"]
            if meta["dtype"] == FLOAT32:
                numbers = np.frombuffer(archive.read(names[f"data/weights/{entry['path_name']}"]), np.float32)
                shape, strides = ([one["as_int"] for one in meta[key]] for key in ("sizes", "strides"))
                rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]  # strides of numbers stored row by row
                there, expected = ([step for size, step in zip(shape, steps, strict=False) if size > 1] for steps in (strides, rows))
                if there != expected or meta["storage_offset"]["as_int"] or entry.get("use_pickle"):
                    raise ValueError(f"the numbers of {name} do not lie in order from the beginning of their file")
                tensors[name] = torch.from_numpy(numbers[: math.prod(shape)].reshape(shape).copy())
    return facts, network_of(facts, tensors)


def _read_onnx(path: Path) -> tuple[Mapping[str, Any], Callable[[Tensor], Tensor]]:
    try:
        session = onnx_session(read_plain(path))
    except UnusableFormat:
        raise
    except Exception as error:  # see above
        raise ValueError(one_line(error)) from error
    described = session.get_modelmeta().custom_metadata_map
    if KEY not in described:
        raise ValueError("it does not describe itself")
    facts = parse_json(described[KEY])
    if [one.name for one in session.get_inputs()] != [PIXELS]:  # as version 0.1.0 wrote them at first
        return facts, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    mean, std = (torch.tensor(facts[name], dtype=torch.float32).view(1, -1, 1, 1) for name in ("mean", "std"))
    return facts, lambda images: torch.from_numpy(
        run_pixels(session, ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).numpy())
    )


# -- images --------------------------------------------------------------------------------
def read_image(path: str | Path, channels: int, size: int) -> npt.NDArray[np.uint8]:
    """(channels, size, size), resized as images of a folder data set are."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_plain(path) as file, opened(file, FORMATS) as image:
                return pixels(image, channels, size)
    except OSError as error:
        raise InvalidData(error.strerror or one_line(error), file=str(path)) from error
    except Exception as error:  # damaged bytes can raise anything
        raise InvalidData(one_line(error), file=str(path)) from error


ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")  # that are looked for in folders


def image_files(places: Sequence[str | Path]) -> list[str | Path]:
    """Files as they are named, and of a folder all images in it and below, by name; hidden ones are passed over."""
    found: list[str | Path] = []
    for place in places:
        if not Path(place).is_dir():
            found.append(place)
            continue
        inside = [path for path in sorted(Path(place).rglob("*")) if path.suffix.lower() in ENDINGS]
        inside = [path for path in inside if not any(part.startswith(".") for part in path.relative_to(place).parts)]
        if not inside:
            raise InvalidData(f"{place} holds no image ({', '.join(ENDINGS)})", folder=str(place))
        found += inside
    return found


def read_images(model: Model, paths: Sequence[str | Path]) -> tuple[list[str], npt.NDArray[np.uint8], dict[str, str]]:
    """Names of the images that can be read, these (n, channels, size, size), and why the others could not be read."""
    names, images, unreadable = [], [], {}
    for path in paths:
        try:
            images.append(read_image(path, model.channels, model.size))
            names.append(str(path))
        except InvalidData as error:
            unreadable[str(path)] = str(error)
    return names, np.stack(images) if images else np.empty((0, model.channels, model.size, model.size), np.uint8), unreadable


@dataclass(frozen=True)
class Seen:
    """The likeliest classes of one image with their probabilities, likeliest first. unsure: the first is below the model's threshold."""

    image: str
    classes: tuple[tuple[str, float], ...]
    unsure: bool = False


def predict(model: Model, paths: Sequence[str | Path], top: int) -> tuple[list[Seen], dict[str, str]]:
    """What the model sees in each readable image, and why the others could not be read. All files are opened before any is judged."""
    names, images, unreadable = read_images(model, paths)
    if not names:
        return [], unreadable
    best = model.probabilities(images).topk(min(top, len(model.classes)))
    seen = []
    for name, ps, ks in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
        classes = tuple((model.classes[k], p) for p, k in zip(ps, ks, strict=True))
        seen.append(Seen(name, classes, unsure=ps[0] < model.threshold))
    return seen, unreadable
