"""The one local training loop: steps of an optimiser on a fixed network, or on subnets of a supernet drawn step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.server_site import ServerImages
from fedloom.data.augment import Augmentation, augment
from fedloom.maths.distillation import soft_cross_entropy
from fedloom.spaces.base import SearchSpace
from fedloom.supernets.base import Piece, Supernet, Weights
from fedloom.supernets.elastic import sent
from fedloom.training.adaptation import Adaptation, adapted, images_run, pieces
from fedloom.training.graphs import WeightsInTraining
from fedloom.training.holds import Part, Pull, kind_of, moving
from fedloom.training.objectives import Lesson, Objective
from fedloom.training.packed import Packed, flattened
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings
from fedloom.training.stacked import Loss, Stacks, Start, SubnetStep, stacked, trains_masked
from fedloom.training.together import together

LESSON = 1000  # images that a teacher sees at once
KEPT_MARKS = 5e8  # bytes for what pieces of architectures train, a byte for each entry


@dataclass(frozen=True)
class Trained:
    """New weights, how many steps trained each architecture, and the forward multiply-accumulates spent. momenta: packed, of the
    optimiser of a supernet, with which training can go on."""

    weights: Weights
    steps: Counter[Architecture]
    macs: int
    momenta: Tensor | None = None


Draw = Callable[[np.random.Generator], Sequence[Architecture]]  # the subnets that one step trains together

Teacher = Callable[[Tensor], Tensor]  # normalised images -> (n, classes) logits to learn from


@dataclass(frozen=True)
class NetworkJob:
    """Train a plain network; one learning rate per epoch. part: what moves; the rest stays as it is, momentum and decay included."""

    plain: Weights
    architecture: Architecture
    examples: Examples
    rates: Sequence[float]
    rng: np.random.Generator
    part: Part = "whole"
    pull: Pull | None = None
    adaptation: Adaptation | None = None  # none: the plain gradient
    objective: Objective | None = None  # none: of the loss; ``plain`` may hold more than the network where it does

    @property
    def lesson(self) -> Lesson:
        return Lesson(self.adaptation, self.objective)


@dataclass(frozen=True)
class SupernetJob:
    """Train a supernet: each step draws subnets, sums their gradients on one batch and moves their regions only.

    taught: if not 0, the first learns from the labels, the others from what it says before the step (in-place distillation, Yu et al.,
    ECCV 2020), and their losses count this much; else all learn from the labels. momenta: those to go on with; without them, zero.
    slope: added to every gradient, like the weights; none: zero. part: what moves of the subnets.
    """

    weights: Weights
    draw: Draw
    examples: Examples
    rates: Sequence[float]
    rng: np.random.Generator
    taught: float = 0.0
    momenta: Tensor | None = None
    slope: Weights | None = None
    part: Part = "whole"


def one_of(archive: Sequence[Architecture]) -> Draw:
    """One subnet per step, drawn evenly from the archive."""
    return lambda rng: [archive[int(rng.integers(len(archive)))]]


def beside(anchor: Architecture, draw: Draw | None = None) -> Draw:
    """The anchor in every step, and after it what is drawn; alone without a draw."""
    return lambda rng: [anchor, *(draw(rng) if draw else ())]


def sandwich(space: SearchSpace, random: int) -> Draw:
    """The largest subnet, which a teacher teaches, then the smallest and random ones, which learn from it (Yu and Huang, ICCV 2019)."""
    return lambda rng: [space.named["largest"], space.named["smallest"], *(space.sample(rng) for _ in range(random))]


def gradients(weights: Weights, loss: Callable[[Weights], Tensor], moves: Container[str] | None = None) -> list[Tensor]:
    """One per weight; zero where the loss does not depend on it, and for what does not move."""
    leaves = {name: tensor.detach().requires_grad_(moves is None or name in moves) for name, tensor in weights.items()}
    # ``backward`` and not ``grad``, which first looks for the ways to its inputs: with hundreds of small weights that takes time.
    loss(leaves).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]


class Trainer:
    """Trains weights on examples. ``train_network`` moves a plain network, ``train_supernet`` the regions of drawn subnets, ``distil``
    the same on images without labels. What several clients ask for together trains in stacks (``training/stacked.py``)."""

    def __init__(self, supernet: Supernet[Any], settings: TrainingSettings, pixels: Pixels, loss: Loss = F.cross_entropy) -> None:
        self.supernet, self.settings, self.pixels, self.loss = supernet, settings, pixels, loss
        self.augmentation = Augmentation(settings.crop, settings.flip, settings.cutout)
        self._in_training: dict[str, tuple[Hashable, WeightsInTraining]] = {}  # the last one of each kind of network, and for the supernet
        self._marks: dict[Hashable, tuple[int, Tensor]] = {}  # of pieces, and where they begin
        self._nothings: dict[torch.device, Tensor] = {}
        self._parts_marked: dict[Hashable, Tensor] = {}

    @cached_property
    def stacks(self) -> Stacks:
        return Stacks(self.supernet, self.settings, self.pixels, self.loss)

    def train_network(
        self, plain: Weights, architecture: Architecture, examples: Examples, rates: Sequence[float], rng: np.random.Generator
    ) -> Trained:
        """One learning rate per epoch. Every entry of ``plain`` is trained."""
        return self.train_networks([NetworkJob(plain, architecture, examples, rates, rng)])[0]

    def train_networks(self, jobs: Sequence[NetworkJob]) -> list[Trained]:
        """Several networks of one client, and those that other clients ask for together with it."""
        return together(self._train_networks, jobs)

    def train_supernet(
        self,
        weights: Weights,
        draw: Draw,
        examples: Examples,
        rates: Sequence[float],
        rng: np.random.Generator,
        taught: float = 0.0,
        momenta: Tensor | None = None,
        slope: Weights | None = None,
        part: Part = "whole",
    ) -> Trained:
        """Each step draws subnets, sums their gradients on one batch and moves their regions only: momentum and decay do not
        touch other entries. taught, momenta, slope, part: see ``SupernetJob``."""
        return together(self._train_supernets, [SupernetJob(weights, draw, examples, rates, rng, taught, momenta, slope, part)])[0]

    # -- fixed networks ---------------------------------------------------------
    def _train_networks(self, jobs: Sequence[NetworkJob]) -> list[Trained]:
        if not jobs or not stacked(self.settings, jobs[0].examples.labels.device):
            return [self.watch_network(job) for job in jobs]
        alike: dict[tuple[Part, Lesson, str], list[int]] = {}  # which of them can be in a stack
        for number, job in enumerate(jobs):
            alike.setdefault((job.part, job.lesson, kind_of(job.pull)), []).append(number)
        trained: dict[int, Trained] = {}
        for (part, lesson, _), numbers in alike.items():
            some = [jobs[number] for number in numbers]
            courses, networks = (
                [self.batches(job.examples, job.rates, job.rng) for job in some],
                [(job.architecture, job.plain) for job in some],
            )
            weights = self.stacks.networks(networks, courses, part, [job.pull for job in some], lesson)
            trained |= {number: self._trained_network(jobs[number], own) for number, own in zip(numbers, weights, strict=True)}
        return [trained[number] for number in range(len(jobs))]

    def watch_network(self, job: NetworkJob, after_epoch: Callable[[Weights], None] | None = None) -> Trained:
        """Train a network alone. after_epoch: sees the weights, which move on afterwards."""
        kind, moves = f"network {job.part} {kind_of(job.pull)} {job.lesson}", moving(self.supernet, job.part, job.plain, job.lesson.still)
        place = self._weights_in_training(kind, job.plain, job.architecture, moves=moves)
        self._pull(place, job.pull)
        step, batch = partial(self._network_step, job.architecture, job.lesson), self._batch(job.examples)
        for number, (images, labels, rate) in enumerate(self.batches(job.examples, job.rates, job.rng), 1):
            place.run(step, batch, images, labels, rate)
            if after_epoch and number % self.steps(job.examples) == 0:
                after_epoch(place.weights)
        return self._trained_network(job, place.weights.copy())

    @staticmethod
    def _pull(place: WeightsInTraining, pull: Pull | None) -> None:
        if pull is not None:
            towards, *slope = (Packed.of(_in_order(own, place.weights)).flat for own in (pull.towards, pull.slope) if own is not None)
            place.pull(towards, torch.full((), pull.strength, dtype=towards.dtype, device=towards.device), *slope)

    def _trained_network(self, job: NetworkJob, weights: Weights) -> Trained:
        steps = len(job.rates) * self.steps(job.examples)
        return self._trained(weights, Counter({job.architecture: steps}), images_run(job.adaptation, self._batch(job.examples)))

    def _network_step(
        self,
        architecture: Architecture,
        lesson: Lesson,
        place: WeightsInTraining,
        images: Tensor,
        labels: Tensor,
        rate: Tensor | float,
    ) -> None:
        cut = pieces(lesson.adaptation, len(labels))

        def gradient(flat: Tensor, number: int) -> Tensor:
            """At these weights, on a piece of the batch."""
            weights, pixels, own = place.at(flat), self.pixels.normalise(images[cut[number]]), labels[cut[number]]
            if lesson.objective is None:
                return flattened(self._gradients(weights, architecture, pixels, partial(self._loss, labels=own), place.moves)[1])
            loss = partial(lesson.objective, self.supernet, architecture, self._loss, images=pixels, labels=own)
            return flattened(gradients(weights, lambda leaves: loss(weights=leaves), place.moves))

        found = place.pulled(adapted(gradient, place.weights.flat, lesson.adaptation))
        place.move(found, rate, place.mask)

    # -- supernets -----------------------------------------------------------------
    def _train_supernets(self, jobs: Sequence[SupernetJob]) -> list[Trained]:
        drawn: list[Counter[Architecture]] = [Counter() for _ in jobs]

        def course(job: SupernetJob, steps: Counter[Architecture]) -> Iterator[SubnetStep]:
            for images, labels, rate in self.batches(job.examples, job.rates, job.rng):
                subnets = job.draw(job.rng)
                steps.update(subnets)
                teacher, others = (subnets[0], subnets[1:]) if job.taught else (None, subnets)
                region = self._mask(subnets, labels.device)
                mask = region if job.part == "whole" else region & self._marks_of(job.part, labels.device)
                yield SubnetStep(images, labels, rate, others, mask, teacher, float(job.taught), region if len(subnets) == 1 else None)

        courses = [course(job, steps) for job, steps in zip(jobs, drawn, strict=True)]
        starts = [self._start(job) for job in jobs]
        if jobs and trains_masked(self.supernet, self.settings, jobs[0].examples.labels.device):
            ends = self.stacks.supernets(starts, courses)
        else:
            ends = [self._train_sliced(start, steps) for start, steps in zip(starts, courses, strict=True)]
        trained = [self._trained(end.weights, steps, self._batch(job.examples)) for job, end, steps in zip(jobs, ends, drawn, strict=True)]
        return [replace(one, momenta=end.momenta) for one, end in zip(trained, ends, strict=True)]

    def _start(self, job: SupernetJob) -> Start:
        weights, slope = (own and _in_order(own, self.supernet.shapes) for own in (job.weights, job.slope))
        assert weights
        return Start(weights, job.momenta, Pull(weights, 0.0, slope) if slope else None)

    def _train_sliced(self, start: Start, course: Iterator[SubnetStep]) -> Start:
        place = self._weights_in_training(f"supernet {kind_of(start.pull)}", start.weights, momenta=start.momenta)
        self._pull(place, start.pull)
        for images, labels, rate, subnets, mask, teacher, taught, _ in course:
            drawn = subnets if teacher is None else [teacher, *subnets]
            self._subnet_step(place, self.pixels.normalise(images), partial(self._loss, labels=labels), drawn, taught, rate, mask)
        return Start(place.weights.copy(), place.momenta.clone())

    def distil(
        self, weights: Weights, teacher: Teacher, draw: Draw, images: ServerImages, rates: Sequence[float], rng: np.random.Generator
    ) -> Weights:
        """Supernet weights from a teacher's logits alone. Of the subnets that a step draws the first learns from the teacher, the others
        from the first, as in ``SupernetJob.taught``."""
        place = self._weights_in_training("supernet", _in_order(weights, self.supernet.shapes))
        for seen, _, rate in self._epochs(images.images, rates, rng):
            lessons = torch.cat([teacher(self.pixels.normalise(some)) for some in seen.split(LESSON)])
            for part in self._parts(images):
                learn, drawn, pixels = partial(soft_cross_entropy, teacher=lessons[part]), draw(rng), self.pixels.normalise(seen[part])
                self._subnet_step(place, pixels, learn, drawn, 1.0, rate, self._mask(drawn, images.images.device))
        return place.weights.copy()

    def _subnet_step(
        self,
        place: WeightsInTraining,
        pixels: Tensor,
        learn: Callable[[Tensor], Tensor],
        drawn: Sequence[Architecture],
        taught: float,
        rate: float,
        mask: Tensor,
    ) -> None:
        """One step on the sum of the drawn subnets' gradients. learn: the loss of the first subnet's logits, or of everyone's if the
        first one does not teach the others. taught: how much these then count."""
        take = self.supernet.take
        place.total.flat.zero_()
        for number, architecture in enumerate(drawn):
            logits, found = self._gradients(take(place.weights, architecture), architecture, pixels, learn)
            torch._foreach_add_(list(take(place.total, architecture).values()), found, alpha=taught if taught and number else 1)
            if taught and number == 0:
                learn = partial(soft_cross_entropy, teacher=logits)
        place.move(place.pulled(place.total.flat), rate, mask)

    # -- one step -----------------------------------------------------------
    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss(logits, labels, label_smoothing=self.settings.label_smoothing)

    def _gradients(
        self,
        weights: Weights,
        architecture: Architecture,
        pixels: Tensor,
        learn: Callable[[Tensor], Tensor],
        moves: Container[str] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The logits, and a gradient per weight; zero where an architecture lets a weight go to waste (DARTS: an input whose every edge
        is ``none``)."""
        said: list[Tensor] = []

        def loss(leaves: Weights) -> Tensor:
            logits = self.supernet.forward(pixels, leaves, architecture)
            said.append(logits.detach())
            return learn(logits)

        found = gradients(weights, loss, moves)
        return said[0], found

    def _mask(self, drawn: Sequence[Architecture], device: torch.device) -> Tensor:
        """(entries,) which of them these architectures train, packed."""
        masks = [self._mask_of(architecture, device) for architecture in drawn]
        return masks[0] if len(masks) == 1 else torch.stack(masks).any(0)

    def _mask_of(self, architecture: Architecture, device: torch.device) -> Tensor:
        """The marks of its pieces one after the other, nothing in between; those of pieces that share parameters one over the other."""
        nothing, parts, over, end = self._nothing(device), [], [], 0
        for start, marks in sorted((self._marked(piece, device) for piece in self.supernet.pieces(architecture)), key=itemgetter(0)):
            if start < end:
                over.append((start, marks))
            else:
                parts += [nothing[end:start], marks]
                end = start + len(marks)
        mask = torch.cat([*parts, nothing[end:]])
        for start, marks in over:
            mask[start : start + len(marks)].logical_or_(marks)
        return mask

    def _marks_of(self, part: Part, device: torch.device) -> Tensor:
        """(entries,) of the supernet, packed: those of a part."""
        key = (part, device)
        if key not in self._parts_marked:
            moves, shapes = moving(self.supernet, part, self.supernet.shapes) or (), self.supernet.shapes
            self._parts_marked[key] = flattened(torch.full(shape, name in moves) for name, shape in shapes.items()).to(device)
        return self._parts_marked[key]

    def _nothing(self, device: torch.device) -> Tensor:
        """(entries,) of the supernet, packed: none of them."""
        if device not in self._nothings:
            self._nothings[device] = self._room.flat.to(device, copy=True)
        return self._nothings[device]

    def _marked(self, piece: Piece, device: torch.device) -> tuple[int, Tensor]:
        """A piece's part of a mask, and where it begins. Few pieces occur, however many the architectures."""
        key = (piece, device)
        if key not in self._marks:
            while sum(len(marks) for _, marks in self._marks.values()) > KEPT_MARKS:
                self._marks.pop(next(iter(self._marks)))
            regions, room = self.supernet.piece_regions(piece), self._room
            whole = [(int(room[name].storage_offset()), room[name].numel()) for name in regions]
            start, end = min((first for first, _ in whole), default=0), max((first + size for first, size in whole), default=0)
            for name, region in regions.items():
                room[name][region] = True
            self._marks[key] = start, sent(room.flat[start:end].clone(), device)
            room.flat[start:end] = False
        return self._marks[key]

    @cached_property
    def _room(self) -> Packed:
        """For the marks of a piece; nothing is marked before and after."""
        return Packed.zeros(self.supernet.shapes, torch.bool, torch.device("cpu"))

    # -- batches --------------------------------------------------------------
    def _batch(self, examples: Sized) -> int:
        return min(self.settings.batch, len(examples))

    def steps(self, examples: Sized) -> int:
        """In an epoch."""
        return len(examples) // self._batch(examples)

    def batches(self, examples: Examples, rates: Iterable[float], rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Equal batches in a new order each epoch, one epoch per rate; the few examples that do not fill a batch sit that epoch out."""
        for images, order, rate in self._epochs(examples.images, rates, rng):
            labels = examples.labels[order]
            for part in self._parts(examples):
                yield images[part], labels[part], rate

    def _epochs(self, images: Tensor, rates: Iterable[float], rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
        """All images in a new order each epoch, augmented; which they are, and the epoch's rate."""
        for rate in rates:
            order = torch.as_tensor(rng.permutation(len(images)), device=images.device)
            yield augment(images[order], self.augmentation, rng, self.pixels.mean), order, rate

    def _parts(self, examples: Sized) -> list[slice]:
        batch = self._batch(examples)
        return [slice(start, start + batch) for start in range(0, self.steps(examples) * batch, batch)]

    def _trained(self, weights: Weights, steps: Counter[Architecture], batch: int) -> Trained:
        macs = sum(self.supernet.space.cost(architecture).macs * times * batch for architecture, times in steps.items())
        return Trained(weights, steps, macs)

    def _weights_in_training(
        self, kind: str, weights: Weights, *what: Hashable, momenta: Tensor | None = None, moves: frozenset[str] | None = None
    ) -> WeightsInTraining:
        """The last packed weights of this kind if they were for the same network: their captured steps can be used again."""
        key = (*what, *((name, tuple(tensor.shape), str(tensor.device)) for name, tensor in weights.items()))
        known = self._in_training.get(kind)
        if known is None or known[0] != key:
            self._in_training.pop(kind, None)  # frees its memory before the next one
            captures = self.settings.execution != "reference"
            self._in_training[kind] = (key, WeightsInTraining(Packed.of(weights), self.settings, captures, moves))
        place = self._in_training[kind][1]
        place.load(weights, momenta)
        return place


def _in_order(weights: Weights, names: Iterable[str]) -> Weights:
    """The same in the order of masks; packed weights that have it stay packed."""
    return weights if list(weights) == list(names) else {name: weights[name] for name in names}
