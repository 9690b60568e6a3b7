"""The one builder of tools and method, for a simulation, a server and a site alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

import fedloom
from fedloom.config import Settings, tier_of_each
from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.core.hardware import tiers
from fedloom.core.method import Method
from fedloom.core.privacy import PrivacySettings
from fedloom.core.sharing import once
from fedloom.data.readers import Dataset
from fedloom.data.splits import client_names, server_images
from fedloom.engine.protection import check_private
from fedloom.engine.sums import check_secure
from fedloom.methods.base import METHODS, AveragingMethod, mean_of, trains_parts
from fedloom.methods.fixed import FixedNetwork
from fedloom.models.beginnings import Beginning, beginning, is_of_run
from fedloom.models.personal import MODEL
from fedloom.models.supernet_weights import starting_weights
from fedloom.spaces.base import ImageShape
from fedloom.spaces.budget import BudgetSettings, Limit, limits_of, narrowed, tier_count
from fedloom.supernets.base import Supernet, Weights, make_supernet
from fedloom.training.fleet import Fleet, Tier
from fedloom.training.latency import measure_latency
from fedloom.training.latency_table import read_table
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import optimiser_of
from fedloom.training.tools import Tools


@dataclass(frozen=True)
class Built:
    tools: Tools
    method: Method[Any]
    model_facts: dict[str, Any]  # what a personal model's file says of itself: enough to build the network and feed it images
    start_remark: str  # on the weights that training starts from; empty for random ones
    beginning: Beginning | None = None  # the weights of another run, where training starts from those


def build(
    settings: Settings,
    dataset: Dataset,
    device: torch.device,
    weights: Path | None = None,
    start: Weights | None = None,
    clients: Sequence[str] = (),
    private: BudgetSettings | None = None,
) -> Built:
    """Tools and method. weights: where the file that ``settings.weights`` names lies now; start: weights that were read before; clients:
    their names, if the data set does not say; private: limits that only the one client has which is built for, and that stay with it."""
    tools, remark, begun = make_tools(settings, dataset, device, clients, private), "", None
    if start is not None:
        tools = replace(tools, start=start)
    elif weights is not None and settings.weights:
        if str(weights) != settings.weights and not weights.exists():
            raise DamagedRun(f"{weights} is missing; the run folder is incomplete", path=str(weights))
        if is_of_run(weights):
            begun = beginning(weights, tools.supernet, dataset.classes)
            tools = replace(tools, start=begun.supernet, start_network=(begun.architecture, begun.network))
            remark = f"the weights in {settings.weights}{begun.remark}"
        else:
            begin, remarks = starting_weights(weights, tools.supernet, tools.pixels.mean, tools.pixels.std)
            tools, remark = replace(tools, start=begin), f"the weights in {settings.weights}{remarks}"
    make: Callable[..., Method[Any]] = METHODS[settings.method].make
    method = make(settings.components[settings.method], tools)
    whole = "" if method.sums_parts else mean_of(method)  # noise in parts would be less than it seems to be
    if begun and begun.architecture and not isinstance(method, FixedNetwork):
        what = f"{settings.weights} holds one network, and {settings.method} begins with a supernet"
        raise InvalidConfig(f"{what}. Go on with a method that trains one network, such as fedavg", key="weights")
    check_private(settings.privacy, settings.method, method.uploads, whole, settings.participants)
    check_secure(settings.privacy, settings.method, method, mean_of(method), trains_parts(method), settings.participants)
    if tools.fleet and isinstance(method, AveragingMethod) and method.in_parts:
        _check_parts(settings.privacy)
    return Built(tools, method, _model_facts(settings, dataset), remark, begun)


def _check_parts(privacy: PrivacySettings) -> None:
    """Refuses protection that needs updates of one shape, where clients return parts of different shapes."""
    why = {
        "secure": "privacy.secure adds up reports of one shape",
        "noise": "privacy.noise counts on every participant's share of the noise in every entry",
    }
    for name, what in why.items():
        if getattr(privacy, name):
            parts = "and with a budget for each tier clients return parts of different shapes"
            off = "false" if name == "secure" else "0"
            raise InvalidConfig(f"{what}, {parts}. Set one limit for all, or privacy.{name}={off}", key=f"privacy.{name}")


def make_tools(
    settings: Settings, dataset: Dataset, device: torch.device, clients: Sequence[str] = (), private: BudgetSettings | None = None
) -> Tools:
    image, training = _image_shape(dataset), settings.training
    if settings.engine == "inline" and settings.components["inline"].reference:
        training = replace(training, execution="reference")
    for name in ("crop", "cutout"):
        pixels = getattr(settings.training, name)
        if pixels >= image.size:
            raise InvalidConfig(f"training.{name} is {pixels}, but {dataset.name} has images of {image.size} pixels. Lower it; 0 is off")
    what = settings.space, settings.components[settings.space], image
    supernet = once(lambda: make_supernet(*what), "supernet", *what)
    budgets = Budgets(supernet, settings, device)
    own = budgets.limits(private) if private else ()
    names = clients or client_names(dataset, settings.clients)
    return Tools(
        space=narrowed(supernet.space, (*budgets.limits(settings.budget.of_all()), *own)),
        supernet=supernet,
        training=training,
        pixels=Pixels(dataset.mean, dataset.std),
        participants=settings.participants,
        clients=settings.clients,
        rounds=settings.rounds,
        protocol=settings.protocol,
        device=device,
        averaging=settings.averaging,
        tiers=len(tiers(settings.hardware, tier_count(settings.budget))),
        fleet=budgets.fleet(names, own),
        server=server_images(settings.split, dataset, settings.seed, device),
    )


class Budgets:
    """The lines of budgets, for one supernet and one machine."""

    def __init__(self, supernet: Supernet[Any], settings: Settings, device: torch.device) -> None:
        self._supernet, self._settings = supernet, settings
        self._measured = cache(lambda architecture: measure_latency(supernet, architecture, device))

    def limits(self, budget: BudgetSettings, tier: str = "") -> tuple[Limit, ...]:
        """budget: without lists."""
        training, file = self._settings.training, str(budget.latency_table)
        latency_ms = read_table(Path(file), self._supernet.space) if file and budget.latency_ms else self._measured
        return limits_of(self._supernet.space, budget, training.batch, latency_ms, optimiser_of(training).moments, tier)

    def fleet(self, clients: Sequence[str], private: tuple[Limit, ...]) -> Fleet | None:
        """Nothing where all clients have the same budget."""
        settings, budget = self._settings, self._settings.budget
        if not budget.in_tiers:
            return None
        known = tier_of_each(settings, clients)
        count = len(tiers(settings.hardware, tier_count(budget)))
        made: list[Tier] = []
        for number in range(count):
            own, place = budget.of_tier(number), f"[{number}]" if budget.lists else ""
            made.append(Tier(self._supernet, self.limits(own, place), private, cast(float, own.supernet), place))
            _ = made[-1].space  # refuses a budget that nothing fits
        return Fleet(tuple(made), {client: own.tier for client, own in known.items()})


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
