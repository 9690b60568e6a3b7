"""What a method works with: a space, its supernet, and functions to train, score and personalise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientData, ClientSite, Diary, Examples, PersonalModel
from fedloom.core.errors import BadReport, ClientFailed
from fedloom.core.messages import Array, Arrays, frozen
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.server_site import ServerImages
from fedloom.core.sharing import once
from fedloom.maths.averaging import Rule, moved
from fedloom.spaces.base import SearchSpace
from fedloom.spaces.budget import training_memory_mb
from fedloom.supernets.base import Supernet, Weights
from fedloom.supernets.elastic import sent
from fedloom.supernets.normalisation import Statistics
from fedloom.training.local import NetworkJob, Trainer
from fedloom.training.packed import Packed
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings, falling
from fedloom.training.scoring import NetworkRequest, Scorer


@dataclass(frozen=True)
class Tools:
    """What all methods share. Holds no weights, and no data but the server's images without labels."""

    space: SearchSpace
    supernet: Supernet[Any]
    training: TrainingSettings
    pixels: Pixels
    participants: int
    rounds: int
    protocol: str  # clean: validation data select; paper: test data select, as the papers did
    device: torch.device
    start: Weights = field(default_factory=dict)  # what takes the place of random initial weights, by name
    server: ServerImages | None = None
    _sent: dict[str, tuple[Arrays, Weights]] = field(default_factory=dict, repr=False, compare=False)  # the last arrays, on the device

    @cached_property
    def trainer(self) -> Trainer:
        return once(lambda: Trainer(self.supernet, self.training, self.pixels), "trainer", self.supernet, self.training, self.pixels)

    @cached_property
    def scorer(self) -> Scorer:
        return once(lambda: Scorer(self.supernet, self.training, self.pixels), "scorer", self.supernet, self.training, self.pixels)

    # -- messages and tensors --------------------------------------------------
    def tensors(self, arrays: Arrays) -> Weights:
        """On the device. All clients of a round receive the same arrays, which are frozen: they are sent there once."""
        known = self._sent.get("arrays")
        if known is None or known[0] is not arrays:
            tensors: Weights = {name: torch.tensor(array) for name, array in arrays.items()}
            if self.device.type != "cpu":  # in one piece
                packed = Packed.of(tensors)
                tensors = Packed(sent(packed.flat, self.device), packed.shapes)
            known = self._sent["arrays"] = (arrays, tensors)
        return known[1]

    @staticmethod
    def arrays(weights: Weights) -> dict[str, Any]:
        if isinstance(weights, Packed):  # leaves the device in one piece
            weights = weights.on_host()
        return {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}

    def update(self, trained: Weights, received: Weights) -> dict[str, Any]:
        """What training changed."""
        if isinstance(trained, Packed) and isinstance(received, Packed) and trained.layout == received.layout:
            return self.arrays(Packed(trained.flat - received.flat, trained.shapes))
        return self.arrays({name: tensor - received[name] for name, tensor in trained.items()})

    def initial_supernet(self, seed: int) -> dict[str, Any]:
        return self.arrays(self._initial(seed))

    def initial_network(self, seed: int, architecture: Architecture) -> dict[str, Any]:
        return self.arrays(self.supernet.plain(self._initial(seed), architecture))

    def _initial(self, seed: int) -> Weights:
        return {**self.supernet.initial(derive_seed(seed, "weights")), **self.start}

    # -- parts of a supernet in messages ------------------------------------------
    def part_of(self, weights: Arrays, architecture: Architecture) -> Arrays:
        """The entries of a supernet that an architecture uses."""
        return frozen({name: weights[name][region] for name, region in self.supernet.regions(architecture).items()})

    def network_of(self, weights: Arrays, architecture: Architecture) -> Arrays:
        """The stand-alone network of an architecture, with its weights from a supernet."""
        return frozen(self.arrays(self.supernet.plain(self.tensors(weights), architecture)))

    def combined(
        self, weights: Arrays, updates: Sequence[tuple[Architecture, Arrays]], examples: Sequence[float], rule: Rule
    ) -> dict[str, Array]:
        """A supernet after updates of parts of it, combined by an averaging rule; entries that are in no part stay as they are."""
        padded = [self._padded(part, architecture, weights) for architecture, part in updates]
        coverage = [self.arrays(self.supernet.coverage({architecture: 1})) for architecture, _ in updates]
        return moved(weights, rule(padded, coverage, examples))

    def _padded(self, part: Arrays, architecture: Architecture, weights: Arrays) -> dict[str, Array]:
        """A part in its place in arrays of the supernet's shapes, with zeros around it."""
        regions = self.supernet.regions(architecture)
        padded = {name: np.zeros_like(array) for name, array in weights.items()}
        shapes = {name: padded[name][region].shape for name, region in regions.items()}
        if {name: array.shape for name, array in part.items()} != shapes:
            raise BadReport(f"An update does not have the arrays of its architecture, {architecture.id}", architecture=architecture.id)
        for name, region in regions.items():
            padded[name][region] = part[name]
        return padded

    # -- schedule ----------------------------------------------------------------
    def draw_participants(self, seed: int, round: int, clients: list[str]) -> list[str]:
        count = min(self.participants, len(clients))
        return sorted(rng(seed, round, "participants").choice(clients, count, replace=False).tolist())

    def rates(self, round: int, epochs: int, rounds: int | None = None, start: float | None = None) -> list[float]:
        """One learning rate per epoch of this round. A phase with its own schedule counts its round from 0, gives its number of
        ``rounds`` and may ``start`` at its own rate."""
        total = (self.rounds if rounds is None else rounds) * epochs
        first = self.training.rate if start is None else start
        return [falling(first, (round * epochs + epoch) / total, self.training.schedule) for epoch in range(epochs)]

    # -- what selects -------------------------------------------------------------
    def selecting(self, data: ClientData) -> Examples:
        """The examples that score, reward and select."""
        return data.test if self.protocol == "paper" else data.validation

    # -- cost ---------------------------------------------------------------------
    def training_memory_mb(self, architecture: Architecture, stored: int, examples: int) -> float:
        """Weights and momenta as stored, gradients of the network, activations of a batch."""
        return training_memory_mb(self.space.cost(architecture), stored, min(self.training.batch, examples))

    # -- the final participation ----------------------------------------------------
    def personalise(self, site: ClientSite, architecture: Architecture, plain: Weights, seed: int) -> tuple[PersonalModel, Diary]:
        """Fine-tune a network on its client's data at each rate, keep the best on the selecting examples (also without), test it once."""
        data, settings = site.data, self.training
        with site.clock("finetune"):
            epochs = settings.finetune_epochs
            courses = [
                [falling(rate, epoch / epochs, "cosine") for epoch in range(epochs)] for rate in settings.finetune_rates if rate and epochs
            ]
            jobs = [NetworkJob(plain, architecture, data.train, rates, rng(seed, "finetune")) for rates in courses]
            trained = self.trainer.train_networks(jobs)
            tuned = [plain, *(one.weights for one in trained)]
            scores = self.scorer.score_networks([NetworkRequest(own, architecture, data.train, (self.selecting(data),)) for own in tuned])
        best = min(range(len(tuned)), key=lambda number: scores[number].scores[0].rank)
        return self.keep(site, architecture, tuned[best], sum(one.macs for one in trained))

    def keep(self, site: ClientSite, architecture: Architecture, plain: Weights, macs: int) -> tuple[PersonalModel, Diary]:
        """A trained network as the client's personal model, with its accuracies."""
        if not all(bool(tensor.isfinite().all()) for tensor in plain.values()):
            raise ClientFailed(f"{site.name}: training diverged. Lower training.rate", client=site.name)
        diary, statistics = self.test(site, architecture, plain, macs)
        arrays = self.arrays(plain)
        for name, (mean, variance) in statistics.items():
            arrays |= self.arrays({f"{name}.running_mean": mean, f"{name}.running_var": variance})
        return PersonalModel(architecture.id, arrays), diary

    def test(self, site: ClientSite, architecture: Architecture, plain: Weights, macs: int) -> tuple[Diary, Statistics]:
        """What a network achieves at its client, for the client's diary, and the statistics it was tested with."""
        data = site.data
        with site.clock("test"):
            (measured,) = self.scorer.score_networks([NetworkRequest(plain, architecture, data.train, (data.validation, data.test))])
            validation, test = measured.scores
        stored = sum(tensor.numel() for tensor in plain.values())
        diary = Diary(
            architecture=architecture.id,
            validation_accuracy=validation.accuracy,
            test_accuracy=test.accuracy,
            trained_macs=macs,
            peak_memory_mb=self.training_memory_mb(architecture, stored, len(data.train)),
        )
        return diary, measured.statistics
