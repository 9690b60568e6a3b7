"""What a method works with: a space, its supernet, and functions to train, score and personalise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientData, ClientSite, Diary, Examples, PersonalModel
from fedloom.core.errors import BadReport, ClientFailed, InvalidConfig, InvalidData
from fedloom.core.messages import Array, Arrays, frozen
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.server_site import ServerImages
from fedloom.core.sharing import once
from fedloom.maths.averaging import Rule
from fedloom.spaces.base import SearchSpace
from fedloom.spaces.budget import Bounded, training_memory_mb
from fedloom.supernets.base import Supernet, Weights
from fedloom.supernets.elastic import sent
from fedloom.supernets.normalisation import Statistics
from fedloom.supernets.reach import Reach
from fedloom.training.finetuning import Finalist, Finetuning
from fedloom.training.fleet import Fleet, Tier
from fedloom.training.holds import Part, Pull
from fedloom.training.local import Trained, Trainer
from fedloom.training.packed import Packed
from fedloom.training.pixels import Pixels
from fedloom.training.racing import first_images, race, rough_calibration
from fedloom.training.recipe import TrainingSettings, optimiser_of, rate_of
from fedloom.training.scoring import NetworkRequest, Request, Scored, Scorer
from fedloom.training.server import AveragingSettings, ServerSteps


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
    start_network: tuple[str, Weights] = ("", {})  # likewise for one network, that of this architecture
    server: ServerImages | None = None
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    clients: int = 0  # of the federation, drawn in a round or not
    tiers: int = 1  # of hardware and budgets
    fleet: Fleet | None = None  # where budgets differ from tier to tier
    tier: Tier | None = None  # of the client whose tools these are, in such a fleet
    _sent: dict[str, tuple[Arrays, Weights]] = field(default_factory=dict, repr=False, compare=False)  # the last arrays, on the device
    _cut: dict[int, tuple[Arrays, Arrays]] = field(default_factory=dict, repr=False, compare=False)  # the last ones, by part; 0: placed
    _of: dict[int, Tools] = field(default_factory=dict, repr=False, compare=False)  # tools of clients, by their tier

    @cached_property
    def trainer(self) -> Trainer:
        return once(lambda: Trainer(self.supernet, self.training, self.pixels), "trainer", self.supernet, self.training, self.pixels)

    @cached_property
    def scorer(self) -> Scorer:
        return once(lambda: Scorer(self.supernet, self.training, self.pixels), "scorer", self.supernet, self.training, self.pixels)

    @cached_property
    def finetuning(self) -> Finetuning:
        return Finetuning(self.trainer, self.scorer, self.training)

    @cached_property
    def server_steps(self) -> ServerSteps:
        return ServerSteps(self.averaging, self.rounds)

    # -- what a client may have -------------------------------------------------
    def of(self, client: str) -> Tools:
        """The tools of one client: all that it draws is within its own budget."""
        if self.fleet is None:
            return self
        tier = self.fleet.of(client)
        if id(tier) not in self._of:
            own = replace(self, space=tier.space, tier=tier, _sent={}, _cut={})
            own.__dict__.update(trainer=self.trainer, scorer=self.scorer)  # which are all clients': what they ask for is done together
            self._of[id(tier)] = own
        return self._of[id(tier)]

    def space_of(self, client: str) -> SearchSpace:
        """What a client may have, for a server that chooses for it."""
        return self.space if self.fleet is None else self.fleet.of(client).space

    @property
    def reach(self) -> Reach | None:
        """The part of the supernet that the client whose tools these are receives and returns; nothing: all of it."""
        return self.tier.reach if self.tier else None

    @property
    def limited(self) -> bool:
        """Whether some client has a budget."""
        return isinstance(self.space, Bounded) or self.fleet is not None

    def one_for_all(self, text: str, rng: np.random.Generator) -> Architecture:
        """An architecture by name or id that every client may have; refused if one may not."""
        found = self.space.find(text, rng)
        for tier in self.fleet.tiers if self.fleet else ():
            tier.space.find(found.id, rng)
        return found

    # -- messages and tensors --------------------------------------------------
    def tensors(self, arrays: Arrays) -> Weights:
        """On the device. All clients of a round receive the same arrays, which are frozen: they are sent there once."""
        known = self._sent.get("arrays")
        if known is None or known[0] is not arrays:
            known = self._sent["arrays"] = (arrays, self.own(arrays))
        return known[1]

    def own(self, arrays: Arrays) -> Weights:
        """A client's own, such as those that it remembers, on the device."""
        tensors: Weights = {name: torch.tensor(array) for name, array in arrays.items()}
        if self.device.type == "cpu":
            return tensors
        packed = Packed.of(tensors)  # travels in one piece
        return Packed(sent(packed.flat, self.device), packed.shapes)

    @staticmethod
    def arrays(weights: Weights) -> dict[str, Any]:
        if isinstance(weights, Packed):  # leaves the device in one piece
            weights = weights.on_host()
        return {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}

    def update(self, trained: Weights, received: Weights) -> dict[str, Any]:
        """What training changed."""
        if isinstance(trained, Packed) and isinstance(received, Packed) and trained.layout == received.layout:
            return self.arrays(Packed(trained.flat - received.flat, trained.shapes))
        changed = {name: tensor - received[name] for name, tensor in trained.items()}
        return self.arrays(changed if self.device.type == "cpu" else Packed.of(changed))

    def initial_supernet(self, seed: int) -> dict[str, Any]:
        return self.arrays(self._initial(seed))

    def initial_network(self, seed: int, architecture: Architecture) -> dict[str, Any]:
        return self.arrays(self.supernet.plain(self._initial(seed), architecture))

    def first_network(self, seed: int, architecture: Architecture) -> dict[str, Any]:
        """What rounds on one network begin with: those of another run, if there are any, and random weights for what it lacks."""
        known, weights = self.start_network
        if known and known != architecture.id:
            what = f"weights has a network {known[:60]}, and this run trains {architecture.id[:60]}"
            raise InvalidConfig(f"{what}. Give both the same architecture", key="weights")
        return {**self.initial_network(seed, architecture), **self.arrays(weights)}

    def with_random_classifier(self, weights: Arrays, seed: int) -> dict[str, Array]:
        """The same with its classifier's weights drawn as a framework draws a linear layer's: uniform within 1/√inputs. A space may start
        them much smaller, which suits no body that has to learn under them while they stay (FedBABU). Those that the run was given stay."""
        draw, drawn = rng(seed, "classifier"), dict(weights)
        for name, array in weights.items():
            given = name in self.start or name in self.start_network[1]
            if self.supernet.in_head(name) and array.ndim > 1 and not given:
                bound = 1 / math.sqrt(math.prod(array.shape[1:]))
                drawn[name] = draw.uniform(-bound, bound, array.shape).astype(array.dtype)
        return drawn

    def _initial(self, seed: int) -> Weights:
        return {**self.supernet.initial(derive_seed(seed, "weights")), **self.start}

    # -- parts of a supernet in messages ------------------------------------------
    def within_reach(self, weights: Arrays, client: str) -> Arrays:
        """What a client receives of a supernet; clients of a tier the same arrays."""
        reach = self.fleet.of(client).reach if self.fleet else None
        if reach is None:
            return weights
        known = self._cut.get(id(reach))
        if known is None or known[0] is not weights:
            known = self._cut[id(reach)] = (weights, frozen(reach.cut(weights)))
        return known[1]

    def received(self, arrays: Arrays) -> Weights:
        """A supernet on the device, from what a client received of it; where it received nothing there are zeros, which nothing reads."""
        if self.reach is None:
            return self.tensors(arrays)
        known = self._cut.get(0)
        if known is None or known[0] is not arrays:
            known = self._cut[0] = (arrays, frozen(self.reach.placed(arrays)))
        return self.tensors(known[1])

    def check_reach(self, trained: Iterable[Architecture]) -> None:
        """Refuses to go on if training used weights that the client has not received."""
        if self.reach and (odd := next((one for one in trained if not self.reach.holds(self.supernet.regions(one))), None)):
            raise ClientFailed(f"{odd.id} lies outside the part of the supernet that its client received", architecture=odd.id)

    def returned(self, arrays: Arrays) -> Arrays:
        """What leaves a client of arrays of the supernet: its part."""
        return arrays if self.reach is None else self.reach.cut(arrays)

    def merged(self, arrays: Arrays, client: str) -> Arrays:
        """What a client returned, as arrays of the whole supernet."""
        reach = self.fleet.of(client).reach if self.fleet else None
        return arrays if reach is None else reach.placed(arrays)

    def part_of(self, weights: Arrays, architecture: Architecture) -> Arrays:
        """The entries of a supernet that an architecture uses."""
        return frozen({name: weights[name][region] for name, region in self.supernet.regions(architecture).items()})

    def network_of(self, weights: Arrays, architecture: Architecture) -> Arrays:
        """The stand-alone network of an architecture, with its weights from a supernet."""
        return frozen(self.arrays(self.supernet.plain(self.tensors(weights), architecture)))

    def change(
        self, weights: Arrays, updates: Sequence[tuple[Architecture, Arrays]], examples: Sequence[float], rule: Rule
    ) -> dict[str, Array]:
        """What updates of parts of a supernet come to by an averaging rule; zero for entries that are in no part."""
        padded = [self.padded(part, architecture, weights) for architecture, part in updates]
        coverage = [self.arrays(self.supernet.coverage({architecture: 1})) for architecture, _ in updates]
        return rule(padded, coverage, examples)

    def spread(self, architecture: Architecture, part: Arrays) -> dict[str, Arrays]:
        """The update of a part as one of the whole supernet, and its coverage: what can be summed without saying whose it is."""
        whole = {name: np.zeros(shape, np.float32) for name, shape in self.supernet.shapes.items()}
        return {"update": self.padded(part, architecture, whole), "coverage": self.arrays(self.supernet.coverage({architecture: 1}))}

    def padded(self, part: Arrays, architecture: Architecture, weights: Arrays) -> dict[str, Array]:
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
        return [rate_of(self.training, round * epochs + epoch, total, start) for epoch in range(epochs)]

    # -- what selects -------------------------------------------------------------
    def selecting(self, data: ClientData) -> Examples:
        """The examples that score, reward and select."""
        return data.test if self.protocol == "paper" else data.validation

    def score(self, site: ClientSite, weights: Weights, architectures: Sequence[Architecture], racing: float = 1.0) -> list[Scored]:
        """Subnets of a supernet on the selecting examples, in the given order. racing: the share of these on which all are scored first,
        then the better third on all of them."""
        train, selecting = site.data.train, self.selecting(site.data)
        if racing == 1:
            self.count_scoring(site, architectures, len(selecting))
            return self.scorer.score_subnets(weights, architectures, selecting, train)
        (raced,) = race(self.scorer, [Request(weights, architectures, selecting, train)], racing)
        self.count_scoring(site, architectures, len(first_images(selecting, racing)), rough_calibration(self.scorer, racing))
        self.count_scoring(site, [one.architecture for one in raced if not one.score.rough], len(selecting))
        return raced

    # -- cost ---------------------------------------------------------------------
    def training_memory_mb(self, architecture: Architecture, stored: int, examples: int) -> float:
        """Weights and momenta as stored, gradients of the network, activations of a batch."""
        batch, moments = min(self.training.batch, examples), optimiser_of(self.training).moments
        return training_memory_mb(self.space.cost(architecture), stored, batch, moments)

    def count_scoring(self, site: ClientSite, architectures: Iterable[Architecture], examples: int, calibration: int | None = None) -> None:
        """Write down what scoring architectures on so many examples takes: each of them alone, after its statistics were measured.
        calibration: images for these, where they are fewer than ``training.calibration``."""
        measured = min(self.training.calibration if calibration is None else calibration, len(site.data.train))
        site.work.scored_macs += (examples + measured) * sum(self.space.cost(architecture).macs for architecture in architectures)

    # -- the final participation ----------------------------------------------------
    def personalise(
        self,
        site: ClientSite,
        architecture: Architecture,
        plain: Weights,
        seed: int,
        others: Sequence[Finalist] = (),
        part: Part = "whole",
        pull: Pull | None = None,
    ) -> tuple[PersonalModel, Diary]:
        """Fine-tune a network on its client's data at each rate, keep what ``training.choice`` says of the selecting examples (untuned is
        among the candidates), test that once.

        others: further finalists, tuned at the rate that was chosen. The network comes first: by evidence, a client leaves it only for
        one that is clearly better. What became of the finalists is then in the diary's notes. part, pull: see ``NetworkJob``.
        """
        finetuning, finalists = self.finetuning, [Finalist(architecture, plain, part, pull), *others]
        with site.clock("finetune"):
            choice = finetuning.choose(finalists, site.data.train, self.selecting(site.data), seed)
        chosen, rate = finalists[choice.winner.finalist], choice.winner.rate

        def again(examples: Examples) -> Trained:
            return self.trainer.train_networks([finetuning.job(chosen, rate, examples, seed)])[0]

        model, diary = self.keep(site, chosen.architecture, choice.winner.weights, choice.macs, again if rate else None)
        peak = max(diary.peak_memory_mb, *(self._peak_mb(finalist, site.data.train) for finalist in finalists))
        noted = len(finalists) > 1 or self.training.choice != "accuracy"
        return model, replace(diary, peak_memory_mb=peak, notes=choice.notes if noted else {})

    def keep(
        self, site: ClientSite, architecture: Architecture, plain: Weights, macs: int, again: Callable[[Examples], Trained] | None = None
    ) -> tuple[PersonalModel, Diary]:
        """A trained network as the client's personal model, with its accuracies.

        again: trains it anew, from where its training began, on other examples. ``training.rejoin`` needs it; nothing for a network
        that was not trained on the client's data.
        """
        self._check_finite(site, plain)
        self._check_budget(site, architecture)
        if not (self.training.rejoin and again):
            return self._kept(site, architecture, plain, macs, site.data.train)
        joined = self.rejoined(site)
        with site.clock("test"):  # by a network that has not seen these images
            (measured,) = self.scorer.score_networks([NetworkRequest(plain, architecture, site.data.train, (site.data.validation,))])
        with site.clock("rejoin"):
            trained = again(joined)
        self._check_finite(site, trained.weights)
        model, diary = self._kept(site, architecture, trained.weights, macs + trained.macs, joined)
        return model, replace(diary, validation_accuracy=measured.scores[0].accuracy)

    def rejoined(self, site: ClientSite) -> Examples:
        """``joined``, for ``training.rejoin``, which needs something to join."""
        if not len(site.data.validation):
            what = f"{site.name} has no validation images, which training.rejoin adds to training"
            raise InvalidData(f"{what}. Raise split.validation, or set training.rejoin=false", client=site.name)
        return self.joined(site)

    @staticmethod
    def joined(site: ClientSite) -> Examples:
        """A client's training and validation images together."""
        train, validation = site.data.train, site.data.validation
        return Examples(torch.cat([train.images, validation.images]), torch.cat([train.labels, validation.labels]))

    def _check_budget(self, site: ClientSite, architecture: Architecture) -> None:
        """Measured limits aside, which change from time to time."""
        counted = self.space.repeatable if isinstance(self.space, Bounded) else None
        if broken := counted and counted.broken(architecture):
            what = f"its network needs {broken.needed(architecture)}, and {broken} is its limit"
            raise ClientFailed(f"{site.name}: {what}. The method does not keep budgets; choose another", client=site.name)

    @staticmethod
    def _check_finite(site: ClientSite, plain: Weights) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in plain.values()):
            raise ClientFailed(f"{site.name}: training diverged. Lower training.rate", client=site.name)

    def _kept(
        self, site: ClientSite, architecture: Architecture, plain: Weights, macs: int, train: Examples
    ) -> tuple[PersonalModel, Diary]:
        diary, statistics = self.test(site, architecture, plain, macs, train)
        arrays = self.arrays(plain)
        for name, (mean, variance) in statistics.items():
            arrays |= self.arrays({f"{name}.running_mean": mean, f"{name}.running_var": variance})
        return PersonalModel(architecture.id, arrays), diary

    def test(
        self, site: ClientSite, architecture: Architecture, plain: Weights, macs: int, train: Examples | None = None
    ) -> tuple[Diary, Statistics]:
        """What a network achieves at its client, for the client's diary, and the statistics it was tested with. train: what it was
        trained on, and measures its statistics; default: the client's training images."""
        data, train = site.data, train or site.data.train
        with site.clock("test"):
            (measured,) = self.scorer.score_networks([NetworkRequest(plain, architecture, train, (data.validation, data.test))])
            validation, test = measured.scores
        diary = Diary(
            architecture=architecture.id,
            validation_accuracy=validation.accuracy,
            test_accuracy=test.accuracy,
            trained_macs=macs,
            peak_memory_mb=self._peak_mb(Finalist(architecture, plain), train),
        )
        return diary, measured.statistics

    def _peak_mb(self, network: Finalist, train: Examples) -> float:
        stored = sum(tensor.numel() for tensor in network.plain.values())
        return self.training_memory_mb(network.architecture, stored, len(train))
