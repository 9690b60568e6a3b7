"""The one builder of tools and method, for a simulation, a server and a site alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fedloom
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.core.hardware import tiers
from fedloom.core.method import Method
from fedloom.core.sharing import once
from fedloom.data.readers import Dataset
from fedloom.data.splits import server_images
from fedloom.engine.protection import check_private
from fedloom.engine.sums import check_secure
from fedloom.methods.base import METHODS, mean_of, trains_parts
from fedloom.models.personal import MODEL
from fedloom.models.supernet_weights import starting_weights
from fedloom.spaces.base import ImageShape
from fedloom.spaces.budget import bounded
from fedloom.supernets.base import Weights, make_supernet
from fedloom.training.latency import measure_latency
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import optimiser_of
from fedloom.training.tools import Tools


@dataclass(frozen=True)
class Built:
    tools: Tools
    method: Method[Any]
    model_facts: dict[str, Any]  # what a personal model's file says of itself: enough to build the network and feed it images
    start_remark: str  # on the weights that training starts from; empty for random ones


def build(settings: Settings, dataset: Dataset, device: torch.device, weights: Path | None = None, start: Weights | None = None) -> Built:
    """Tools and method. weights: where the file that ``settings.weights`` names lies now; start: weights that were read before."""
    tools, remark = make_tools(settings, dataset, device), ""
    if start is not None:
        tools = replace(tools, start=start)
    elif weights is not None and settings.weights:
        if str(weights) != settings.weights and not weights.exists():
            raise DamagedRun(f"{weights} is missing; the run folder is incomplete", path=str(weights))
        begin, remarks = starting_weights(weights, tools.supernet, tools.pixels.mean, tools.pixels.std)
        tools, remark = replace(tools, start=begin), f"the weights in {settings.weights}{remarks}"
    make: Callable[..., Method[Any]] = METHODS[settings.method].make
    method = make(settings.components[settings.method], tools)
    whole = "" if method.sums_parts else mean_of(method)  # noise in parts would be less than it seems to be
    check_private(settings.privacy, settings.method, method.uploads, whole, settings.participants)
    check_secure(settings.privacy, settings.method, method, mean_of(method), trains_parts(method), settings.participants)
    return Built(tools, method, _model_facts(settings, dataset), remark)


def make_tools(settings: Settings, dataset: Dataset, device: torch.device) -> Tools:
    image, training = _image_shape(dataset), settings.training
    if settings.engine == "inline" and settings.components["inline"].reference:
        training = replace(training, execution="reference")
    for name in ("crop", "cutout"):
        pixels = getattr(settings.training, name)
        if pixels >= image.size:
            raise InvalidConfig(f"training.{name} is {pixels}, but {dataset.name} has images of {image.size} pixels. Lower it; 0 is off")
    what = settings.space, settings.components[settings.space], image
    supernet = once(lambda: make_supernet(*what), "supernet", *what)
    latency_ms = cache(lambda architecture: measure_latency(supernet, architecture, device))
    return Tools(
        space=bounded(supernet.space, settings.budget, training.batch, latency_ms, optimiser_of(training).moments),
        supernet=supernet,
        training=training,
        pixels=Pixels(dataset.mean, dataset.std),
        participants=settings.participants,
        clients=settings.clients,
        rounds=settings.rounds,
        protocol=settings.protocol,
        device=device,
        averaging=settings.averaging,
        tiers=len(tiers(settings.hardware)),
        server=server_images(settings.split, dataset, settings.seed, device),
    )


def _image_shape(dataset: Dataset) -> ImageShape:
    _, channels, height, _ = dataset.train.images.shape
    return ImageShape(channels, height, len(dataset.classes))


def _model_facts(settings: Settings, dataset: Dataset) -> dict[str, Any]:
    return {
        "format": MODEL,
        "space": settings.space,
        "settings": asdict(settings.components[settings.space]),
        "image": asdict(_image_shape(dataset)),
        "classes": list(dataset.classes),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "fedloom": fedloom.__version__,
    }
