"""The one scoring function: accuracy and loss of networks on examples, normalisation calibrated per network."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.server_site import ServerImages
from fedloom.maths.distillation import ensemble
from fedloom.supernets.base import Supernet, Weights
from fedloom.supernets.elastic import in_float64
from fedloom.supernets.normalisation import Statistics
from fedloom.training.local import Teacher
from fedloom.training.many import groups
from fedloom.training.packed import Packed
from fedloom.training.pixels import Pixels
from fedloom.training.prefixes import Network, one_by_one
from fedloom.training.recipe import TrainingSettings, computing
from fedloom.training.stacked import stacked
from fedloom.training.together import together

CHUNK = 1000  # images per forward pass when statistics are known
# Bounds of a masked pass over several architectures; they change memory and speed, not results.
MASKED_BYTES = 4e9
ENOUGH_FOR_MASKS = 8  # that fit at once; on an H200 masked passes over 25 took a third of the time of sliced ones, over 4 twice as long
ALIVE = 1 / 8  # share of a network's activations that are held at once when nothing is kept for a backward pass


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float
    rough: bool = False  # measured on a part of the images; see training/racing.py

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better: by accuracy, ties by loss."""
        return (-self.accuracy, self.loss)


@dataclass(frozen=True)
class Scored:
    architecture: Architecture
    score: Score


@dataclass(frozen=True)
class Request:
    """Architectures to score with one client's weights: on its examples, with statistics of its training images."""

    weights: Weights
    architectures: Sequence[Architecture]
    examples: Examples
    train: Examples


class NetworkRequest(NamedTuple):
    """A plain network to score on several parts of a client's data, with statistics of its training images."""

    plain: Weights
    architecture: Architecture
    train: Examples
    parts: Sequence[Examples]
    each: bool = False  # the loss on each image as well


@dataclass(frozen=True)
class Measured:
    statistics: Statistics
    scores: tuple[Score, ...]  # one per part
    losses: tuple[Tensor, ...] = ()  # (n,) per part: on each image, of a request that wants them


def best_first(candidates: Sequence[Scored]) -> list[Scored]:
    """By accuracy, then loss, then choices: a total order, so that equal scores never depend on the order of arrival.

    Rough scores come after all others.
    """
    return sorted(candidates, key=lambda c: (c.score.rough, *c.score.rank, c.architecture.choices))


def spread(examples: Examples | ServerImages, count: int) -> Tensor:
    """(count,) places of so many examples, or of all, evenly spread over them."""
    return torch.linspace(0, len(examples) - 1, min(count, len(examples)), device=examples.images.device).round().long()


class Scorer:
    def __init__(self, supernet: Supernet[Any], settings: TrainingSettings, pixels: Pixels) -> None:
        self.supernet, self.settings, self.pixels = supernet, settings, pixels
        self._quick: dict[int, Scorer] = {}

    def calibration_images(self, examples: Examples | ServerImages) -> Tensor:
        """Up to ``calibration`` training images, spread evenly over them (examples may lie sorted by class)."""
        return self.pixels.normalise(examples.images[spread(examples, self.settings.calibration)])

    def score_subnets(self, weights: Weights, architectures: Sequence[Architecture], examples: Examples, train: Examples) -> list[Scored]:
        """Score subnets of a supernet: one pass measures the statistics on training images and the logits on examples."""
        return together(self.score_many, [Request(weights, architectures, examples, train)])[0]

    def quick(self, calibration: int) -> Scorer:
        """One that measures statistics on fewer images; the same one when asked again, so that clients can ask together."""
        if calibration not in self._quick:
            self._quick[calibration] = Scorer(self.supernet, replace(self.settings, calibration=calibration), self.pixels)
        return self._quick[calibration]

    @torch.no_grad()
    def score_many(self, requests: Sequence[Request]) -> list[list[Scored]]:
        """What ``score_subnets`` gives for each request. In groups, requests with equally many images run together."""
        results: dict[tuple[int, int], Tensor] = {}  # (2,) accuracy and loss by request and place in it
        for alike in self._alike(requests):
            for network, result in self._results(alike):
                results[network.client, network.place] = result
        if not results:
            return [[] for _ in requests]
        # One transfer for all of them: (architectures, 2) accuracy and loss.
        numbers = dict(zip(results, torch.stack(list(results.values())).tolist(), strict=True))
        return [
            [Scored(one, Score(*numbers[client, place])) for place, one in enumerate(request.architectures)]
            for client, request in enumerate(requests)
        ]

    def _alike(self, requests: Sequence[Request]) -> Iterable[dict[int, Request]]:
        """Requests by their numbers, those that can run in groups together in one."""
        found: dict[object, dict[int, Request]] = {}
        for client, request in enumerate(requests):
            counts = (len(request.examples), min(self.settings.calibration, len(request.train)))
            in_groups = self.grouped(request.examples.images.device)
            if request.architectures:
                found.setdefault(counts if in_groups else client, {})[client] = request
        return found.values()

    def _results(self, requests: Mapping[int, Request]) -> Iterator[tuple[Network, Tensor]]:
        """(2,) accuracy and loss of every network of requests that run together."""
        networks = [
            Network(client, place, self.supernet.pieces(architecture))
            for client, request in requests.items()
            for place, architecture in enumerate(request.architectures)
        ]
        # of each client the images that measure statistics, and those that are scored
        pixels = {
            client: (self.calibration_images(one.train), self.pixels.normalise(one.examples.images)) for client, one in requests.items()
        }
        calibration, images = next(iter(pixels.values()))
        rows = len(calibration)
        if self.grouped(images.device):
            dtype = computing(self.settings, next(iter(next(iter(requests.values())).weights.values())))
            parts = {client: [part.to(dtype) for part in _in_parts(*both)] for client, both in pixels.items()}
            weights = {client: request.weights for client, request in requests.items()}
            for some, logits in groups(self.supernet, weights, parts, rows).run(networks):
                labels = torch.stack([requests[network.client].examples.labels for network in some])
                yield from zip(some, torch.vmap(_measure)(logits.to(pixels[some[0].client][0].dtype), labels), strict=True)
            return
        (request,) = requests.values()
        labels = request.examples.labels
        if self.masks(rows + min(len(images), CHUNK), images.device) or self.settings.execution == "reference":
            several = self.logits(request.weights, request.architectures, images, calibration)
            yield from zip(networks, (_measure(logits, labels) for part in several for logits in part), strict=True)
            return
        for network, logits in one_by_one(self.supernet, request.weights, networks, torch.cat([calibration, images]), rows):
            yield network, _measure(logits[rows:], labels)

    @torch.no_grad()
    def logits(self, weights: Weights, architectures: Sequence[Architecture], images: Tensor, calibration: Tensor) -> Iterator[Tensor]:
        """Logits of subnets on images, a few architectures at a time, in order: (some architectures, n, classes). What they have in
        common is computed for each of them.

        Each subnet's statistics are measured on the calibration images, which run in front of the first images.
        """
        rows = len(calibration)
        if not self.masks(rows + min(len(images), CHUNK), images.device):
            together = torch.cat([calibration, images])
            for architecture in architectures:
                own = self.supernet.take(weights, architecture)
                yield self.supernet.forward(together, own, architecture, Statistics(rows=rows))[rows:][None]
            return
        first, *others = _in_parts(calibration, images)
        several = self.at_once(len(first))
        for start in range(0, len(architectures), several):
            choices = [architecture.choices for architecture in architectures[start : start + several]]
            genes, sizes = torch.tensor(choices).to(images.device), self.supernet.space.input_sizes(choices)
            statistics = Statistics(rows=rows)
            parts = [self.supernet.forward_many(first, weights, genes, statistics, sizes)[:, rows:]]
            known = Statistics(statistics)
            parts += [self.supernet.forward_many(part, weights, genes, known, sizes) for part in others]
            yield torch.cat(parts, 1)

    def grouped(self, device: torch.device) -> bool:
        """Whether scoring runs in groups what networks have in common."""
        return self.settings.execution == "auto" and device.type == "cuda" and self.supernet.in_groups

    def masks(self, images: int, device: torch.device) -> bool:
        """Whether scoring on this many images runs masked. Masked, a subnet costs what the largest does; sliced, at least the time that
        Python takes to launch its kernels. So ``auto`` masks on a GPU, and only while many small networks fit at once, if it cannot
        run them in groups."""
        pays = device.type == "cuda" and self.supernet.masks_pay and self.at_once(images) >= ENOUGH_FOR_MASKS
        return self.settings.execution == "masked" or (self.settings.execution == "auto" and pays and not self.grouped(device))

    def at_once(self, images: int, architecture: Architecture | None = None) -> int:
        """How many architectures, all as large as this or the largest, fit into ``MASKED_BYTES`` with this many images; at least one."""
        activations = self.supernet.space.cost(architecture or self.supernet.space.named["largest"]).activations
        return max(1, int(MASKED_BYTES // (4 * images * activations * ALIVE)))

    # -- plain networks ----------------------------------------------------------
    def score_networks(self, requests: Sequence[NetworkRequest]) -> list[Measured]:
        """Of several plain networks, and of those that other clients ask for together with them."""
        return together(self._score_networks, requests)

    @torch.no_grad()
    def _score_networks(self, requests: Sequence[NetworkRequest]) -> list[Measured]:
        alike: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            if not stacked(self.settings, request.train.labels.device):
                alike[number] = [number]
                continue
            counts = tuple(len(part) for part in request.parts)
            alike.setdefault((request.architecture, min(self.settings.calibration, len(request.train)), counts), []).append(number)
        results: dict[int, Measured] = {}
        for numbers in alike.values():
            first = requests[numbers[0]]
            if not stacked(self.settings, first.train.labels.device):
                statistics = self.calibrate(first.plain, first.architecture, first.train)
                logits = [self._network_logits(first.plain, first.architecture, statistics, part) for part in first.parts]
                scores = [Score(*_measure(own, part.labels).tolist()) for own, part in zip(logits, first.parts, strict=True)]
                results[numbers[0]] = Measured(statistics, tuple(scores), _losses(logits, first))
                continue
            several = self.at_once(self.settings.calibration + sum(map(len, first.parts)), first.architecture)
            for start in range(0, len(numbers), several):
                some = numbers[start : start + several]
                results |= dict(zip(some, self._score_stack([requests[number] for number in some]), strict=True))
        return [results[number] for number in range(len(requests))]

    def _score_stack(self, requests: Sequence[NetworkRequest]) -> list[Measured]:
        """Networks of one architecture with equally many images, in one pass that measures their statistics as well."""
        architecture, counts = requests[0].architecture, [len(part) for part in requests[0].parts]
        calibration = [self.calibration_images(request.train) for request in requests]
        images = [self.pixels.normalise(torch.cat([part.images for part in request.parts])) for request in requests]
        rows, pixels = len(calibration[0]), torch.stack([torch.cat(both) for both in zip(calibration, images, strict=True)])

        def one(own: Weights, pixels: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
            statistics = Statistics(rows=rows)
            return self.supernet.forward(pixels, own, architecture, statistics)[rows:], dict(statistics)

        if len(requests) == 1:  # the same without the cost of vmap
            alone, own = one(requests[0].plain, pixels[0])
            logits, measured = alone[None], {name: (mean[None], variance[None]) for name, (mean, variance) in own.items()}
        else:
            weights = Packed.stack([request.plain for request in requests])
            logits, measured = torch.vmap(one)(weights.views, pixels)  # (networks, n, classes)
        found = [
            torch.stack([_measure(own, part.labels) for own, part in zip(row.split(counts), request.parts, strict=True)])
            for row, request in zip(logits, requests, strict=True)
        ]
        numbers = torch.stack(found).tolist()  # (networks, parts, 2)
        return [
            Measured(
                Statistics({name: (mean[row], variance[row]) for name, (mean, variance) in measured.items()}),
                tuple(Score(*one) for one in numbers[row]),
                _losses(logits[row].split(counts), request),
            )
            for row, request in enumerate(requests)
        ]

    @torch.no_grad()
    def calibrate(self, plain: Weights, architecture: Architecture, train: Examples | ServerImages) -> Statistics:
        """Normalisation statistics of a plain network on its client's training images, or on the server's."""
        images = self.calibration_images(train)
        statistics = Statistics(rows=len(images))
        self.supernet.forward(images, plain, architecture, statistics)
        return Statistics(statistics)

    @torch.no_grad()
    def score_network(self, plain: Weights, architecture: Architecture, statistics: Statistics, examples: Examples) -> Score:
        accuracy, loss = _measure(self._network_logits(plain, architecture, statistics, examples), examples.labels).tolist()
        return Score(accuracy, loss)

    def _network_logits(self, plain: Weights, architecture: Architecture, statistics: Statistics, examples: Examples) -> Tensor:
        parts = [self.pixels.normalise(images) for images in examples.images.split(CHUNK)]
        return torch.cat([self.supernet.forward(part, plain, architecture, statistics) for part in parts])

    @torch.no_grad()
    def features(self, plain: Weights, architecture: Architecture, statistics: Statistics, examples: Examples) -> Tensor:
        """(n, features): what a plain network's classifier sees."""
        parts = [self.pixels.normalise(images) for images in examples.images.split(CHUNK)]
        return torch.cat([self.supernet.features(part, plain, architecture, statistics) for part in parts])

    def ensemble(self, members: Sequence[Weights], architecture: Architecture, images: ServerImages, examples: Sequence[float]) -> Teacher:
        """The mean logits of networks of one architecture, weighted by examples; their statistics are those of the images."""
        statistics = [self.calibrate(member, architecture, images) for member in members]

        @torch.no_grad()
        def teach(images: Tensor) -> Tensor:
            known = zip(members, statistics, strict=True)
            return ensemble([self.supernet.forward(images, member, architecture, own) for member, own in known], examples)

        return teach


def _in_parts(calibration: Tensor, images: Tensor) -> list[Tensor]:
    """Images a chunk at a time, those that measure statistics in front of the first."""
    first, *others = images.split(CHUNK)
    return [torch.cat([calibration, first]), *others]


def _measure(logits: Tensor, labels: Tensor) -> Tensor:
    """(2,) accuracy and cross-entropy, in float64 so that shares of small sets compare exactly.

    A network that diverged scores 0 and infinity: its argmax would be the first class, which may well be the client's commonest.
    """
    loss = in_float64(F.cross_entropy(logits, labels))
    alive = loss.isfinite()
    hits = in_float64(logits.argmax(1) == labels).mean()
    return torch.stack([torch.where(alive, hits, 0.0), torch.where(alive, loss, torch.inf)])


def score_of(logits: Tensor, labels: Tensor) -> Score:
    """Of what a network, or whatever gives logits, says of these examples."""
    return Score(*_measure(logits, labels).tolist())


def _losses(logits: Sequence[Tensor], request: NetworkRequest) -> tuple[Tensor, ...]:
    """(n,) cross-entropy of each image of each part, in float64; nothing if the request does not want them."""
    pairs = zip(logits, request.parts, strict=True) if request.each else ()
    return tuple(in_float64(F.cross_entropy(own, part.labels, reduction="none")) for own, part in pairs)
