"""Many networks in training side by side, a row each of packed weights: one step moves all of them, and a GPU replays it.

Rows differ in weights, images, rates and, masked, in their architectures. What a row computes does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.maths.distillation import soft_cross_entropy
from fedloom.supernets.base import Region, Supernet, Weights, resized
from fedloom.supernets.elastic import sent, zero
from fedloom.training.adaptation import Adaptation, adapted, pieces
from fedloom.training.graphs import WeightsInTraining
from fedloom.training.holds import Part, Pull, kind_of, moving
from fedloom.training.objectives import PLAIN, Lesson
from fedloom.training.packed import Packed, flattened
from fedloom.training.peak import allowed_bytes
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings, computing, optimiser_of

Loss = Callable[..., Tensor]  # (n, classes) logits, (n,) labels, label_smoothing=… -> their loss
NetworkStep = tuple[Tensor, Tensor, float]  # images, labels, rate of one step of one row
Inputs = tuple[Tensor, ...]  # of one step of all rows
Step = Callable[..., None]


class SubnetStep(NamedTuple):
    """One step of a row whose steps train subnets. mask: which entries they train; teacher: learns from the labels, and the subnets from
    what it says, whose losses count ``taught``; both are the same in all steps of a row. Without a teacher the subnets learn from the
    labels."""

    images: Tensor
    labels: Tensor
    rate: float
    subnets: Sequence[Architecture]
    mask: Tensor
    teacher: Architecture | None = None
    taught: float = 0.0
    region: Tensor | None = None  # (entries,) those of its only subnet, also where they do not train


class Start(NamedTuple):
    """Where a row starts, and where it ends. momenta: packed, of the optimiser; none: zero. pull: of one kind in all rows."""

    weights: Weights
    momenta: Tensor | None = None
    pull: Pull | None = None


KEPT = 3  # kinds of stacks whose captured steps are kept
CPU_BYTES = 2e9  # for one stack
GPU_SHARE = 0.25  # of a GPU's memory
ROWS = 32  # at most; more were not tried
MANY = 8  # networks of one architecture that are worth a captured step of their own; a masked network costs as much as the largest


def stacked(settings: TrainingSettings, device: torch.device) -> bool:
    """Whether networks train in stacks: on a GPU. On a CPU one after the other is faster."""
    return settings.execution == "masked" or (settings.execution == "auto" and device.type == "cuda")


def trains_masked(supernet: Supernet[Any], settings: TrainingSettings, device: torch.device) -> bool:
    """Whether supernets train masked; ``auto`` slices on a CPU."""
    return settings.execution == "masked" or (settings.execution == "auto" and device.type == "cuda" and supernet.masks_pay)


class Stacks:
    def __init__(self, supernet: Supernet[Any], settings: TrainingSettings, pixels: Pixels, loss: Loss) -> None:
        self.supernet, self.settings, self.pixels, self.loss = supernet, settings, pixels, loss
        self._places: dict[Hashable, WeightsInTraining] = {}

    # -- fixed networks ---------------------------------------------------------
    def networks(
        self,
        networks: Sequence[tuple[Architecture, Weights]],
        courses: Sequence[Iterator[NetworkStep]],
        part: Part = "whole",
        pulls: Sequence[Pull | None] = (),
        lesson: Lesson = PLAIN,
    ) -> list[Weights]:
        """The trained weights of plain networks. Many of one architecture run as they are. Of architectures with few networks all run
        together, masked, where the supernet can hold a plain network: one captured step serves all of them. part: what moves; pulls: of
        one kind."""
        pulls = pulls or [None] * len(networks)
        rows_of: dict[Architecture, list[int]] = {}
        for row, (architecture, _) in enumerate(networks):
            rows_of.setdefault(architecture, []).append(row)
        results: dict[int, Weights] = {}
        embeds = len(rows_of) > 1 and self.supernet.masks_pay and lesson == PLAIN
        few = [row for rows in rows_of.values() if len(rows) < MANY for row in rows] if embeds else []
        if few:
            trained = self._embedded([networks[row] for row in few], [courses[row] for row in few], part, [pulls[row] for row in few])
            results |= dict(zip(few, trained, strict=True))
        for architecture, rows in rows_of.items():
            if rows[0] in results:
                continue
            ends = self._in_lockstep(
                ("network", architecture, part, lesson),
                [Start(networks[row][1], pull=pulls[row]) for row in rows],
                [courses[row] for row in rows],
                _stack,
                lambda _, architecture=architecture: partial(self._network_step, architecture, lesson),  # type: ignore[misc]
                self._most(architecture, networks[rows[0]][1]),
                moving(self.supernet, part, networks[rows[0]][1], lesson.still),
            )
            results |= {row: end.weights for row, end in zip(rows, ends, strict=True)}
        return [results[row] for row in range(len(networks))]

    def _network_step(
        self,
        architecture: Architecture,
        lesson: Lesson,
        place: WeightsInTraining,
        images: Tensor,
        labels: Tensor,
        rate: Tensor,
    ) -> None:
        def forward(own: Weights, pixels: Tensor) -> Tensor:
            return self.supernet.forward(pixels, own, architecture)[None]

        def objective(own: Weights, pixels: Tensor, labels: Tensor) -> Tensor:
            assert lesson.objective is not None
            return lesson.objective(self.supernet, architecture, self._loss, own, pixels, labels)

        own = objective if lesson.objective else None
        self._move(place, forward, (images,), labels, rate, place.mask, 0.0, lesson.adaptation, own)

    def _embedded(
        self,
        networks: Sequence[tuple[Architecture, Weights]],
        courses: Sequence[Iterator[NetworkStep]],
        part: Part,
        pulls: Sequence[Pull | None],
    ) -> list[Weights]:
        """Plain networks in their places in a supernet. Only their entries move, so zeros around them stay zero."""
        shapes, device = self.supernet.shapes, next(iter(networks[0][1].values())).device
        places = [self._places_of(architecture, own) for architecture, own in networks]
        placed = [pull and _pull_placed(pull, place, shapes) for pull, (place, _) in zip(pulls, places, strict=True)]
        rows = zip(networks, places, placed, strict=True)
        starts = [Start(_placed(plain, place, shapes), pull=pull) for (_, plain), (place, _), pull in rows]
        moves = moving(self.supernet, part, {name for place, _ in places for name in place})
        trained_places = [{name: place[name] for name in place if moves is None or name in moves} for place, _ in places]
        masks = [_marks(place, shapes, device) for place in trained_places]

        apart = moves is not None and self.supernet.likes_zeros
        regions = [_marks(place, shapes, device) for place, _ in places] if apart else masks

        def course(steps: Iterator[NetworkStep], run_as: Architecture, mask: Tensor, region: Tensor) -> Iterator[SubnetStep]:
            for images, labels, rate in steps:
                yield SubnetStep(images, labels, rate, [run_as], mask, region=region)

        running = [replace(architecture, choices=choices) for (architecture, _), (_, choices) in zip(networks, places, strict=True)]
        trained = self.supernets(starts, [course(*row) for row in zip(courses, running, masks, regions, strict=True)])
        return [
            {name: weights[name][place[name]].clone() for name in plain}
            for (weights, *_), (_, plain), (place, _) in zip(trained, networks, places, strict=True)
        ]

    def _places_of(self, architecture: Architecture, own: Weights) -> tuple[Mapping[str, Region], tuple[int, ...]]:
        """Of a plain network; or of a part of the supernet, which has other names."""
        place, choices = self.supernet.embedding(architecture)
        return (place, choices) if place.keys() == own.keys() else (self.supernet.regions(architecture), architecture.choices)

    # -- supernets -----------------------------------------------------------------
    def supernets(self, starts: Sequence[Start], courses: Sequence[Iterator[SubnetStep]]) -> list[Start]:
        """The trained weights of supernets whose steps train regions only. Architectures are inputs: one captured step serves them all.
        In a space with several input sizes rows whose subnets see images at other sizes rest meanwhile."""
        most = self._most(self.supernet.space.named["largest"], starts[0].weights)
        step_of = lambda key: partial(self._subnet_step, *key)  # noqa: E731
        return self._in_lockstep("supernet", starts, courses, self._stack_subnets, step_of, most)

    def _stack_subnets(self, steps: Sequence[SubnetStep], device: torch.device) -> tuple[Hashable, Inputs]:
        """Known by the subnets' input sizes, and by the teacher."""
        choices = [[subnet.choices for subnet in self._by_size(step)] for step in steps]
        genes = sent(torch.tensor(choices, dtype=torch.long), device)  # (rows, subnets, genes)
        _, inputs = _stack([step[:3] for step in steps], device)
        masks = [torch.stack([step.mask for step in steps])]
        if self.supernet.likes_zeros and all(step.region is not None for step in steps):
            masks.append(torch.stack([step.region for step in steps if step.region is not None]))
        return (self._sizes(steps[0]), steps[0].teacher, steps[0].taught), (*inputs, genes, *masks)

    def _by_size(self, step: SubnetStep) -> list[Architecture]:
        """Its subnets in the order of input sizes, so that few different steps need capturing."""
        return sorted(step.subnets, key=lambda subnet: self.supernet.space.input_sizes([subnet.choices]))

    def _sizes(self, step: SubnetStep) -> tuple[int, ...]:
        return tuple(self.supernet.space.input_sizes([subnet.choices for subnet in self._by_size(step)]))

    def _subnet_step(
        self,
        sizes: Sequence[int],
        teacher: Architecture | None,
        taught: float,
        place: WeightsInTraining,
        images: Tensor,
        labels: Tensor,
        rate: Tensor,
        genes: Tensor,
        mask: Tensor,
        region: Tensor | None = None,
    ) -> None:
        if region is not None:

            def among_zeros(own: Weights, pixels: Tensor, genes: Tensor) -> Tensor:
                return self.supernet.among_zeros(resized(pixels, sizes[0]), own, genes[0])[None]

            self._move(place, among_zeros, (images, genes), labels, rate, mask, region=region)
            return

        def forward(own: Weights, pixels: Tensor, genes: Tensor) -> Tensor:
            # The teacher is the same in every step, so it needs no masks.
            first = [] if teacher is None else [self.supernet.forward(pixels, self.supernet.take(own, teacher), teacher)[None]]
            return torch.cat([*first, *([self.supernet.forward_many(pixels, own, genes, sizes=sizes)] if sizes else [])])

        self._move(place, forward, (images, genes), labels, rate, mask, taught)

    # -- one step -----------------------------------------------------------
    def _move(
        self,
        place: WeightsInTraining,
        forward: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        rate: Tensor,
        mask: Tensor | None,
        taught: float = 0.0,
        adaptation: Adaptation | None = None,
        objective: Callable[[Weights, Tensor, Tensor], Tensor] | None = None,
        region: Tensor | None = None,
    ) -> None:
        """forward: (subnets, n, classes) logits of one row. inputs: (rows, …), the first are images; rate: (rows, 1). taught: if not 0,
        the others learn from the first, and count this much. objective: of one row, in place of the loss of its logits. region: (rows,
        entries) outside of which forward gets zeros."""
        cut = pieces(adaptation, labels.shape[1])

        def gradient(flat: Tensor, number: int) -> Tensor:
            """At these weights, on a piece of the batch."""
            some = (inputs[0][:, cut[number]], *inputs[1:])
            at = place.at(flat if region is None else torch.where(region, flat, zero(flat)))
            return self._gradient(place, at, forward, some, labels[:, cut[number]], taught, objective)

        found = place.pulled(adapted(gradient, place.weights.flat, adaptation))
        place.move(found, rate, mask)

    def _gradient(
        self,
        place: WeightsInTraining,
        weights: Packed,
        forward: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        taught: float,
        objective: Callable[[Weights, Tensor, Tensor], Tensor] | None,
    ) -> Tensor:
        """(rows, entries) of the loss at these weights."""
        kept = weights.flat.dtype
        dtype, rows = computing(self.settings, weights.flat), len(labels)
        moves = place.weights.shapes if place.moves is None else place.moves
        weights = weights.to(dtype)
        weights = Packed(weights.flat[0], weights.shapes) if rows == 1 else weights
        leaves = {name: view.detach().requires_grad_(name in moves) for name, view in weights.items()}
        pixels = self.pixels.normalise(inputs[0])
        inputs = (pixels if dtype == kept else pixels.to(dtype), *inputs[1:])
        of_rows, given = (objective, (*inputs, labels)) if objective else (forward, inputs)
        if rows == 1:  # the same without the cost of vmap
            results = of_rows(leaves, *(one[0] for one in given))[None]
        else:
            results = torch.vmap(of_rows)(leaves, *given)
        total = results.sum() if objective else self._losses(results.to(kept), labels, taught)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        found = iter(torch.autograd.grad(total, wanted, materialize_grads=True))
        every = (next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves.values())
        return flattened(every, stacked=rows > 1).reshape(rows, -1).to(kept)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss(logits, labels, label_smoothing=self.settings.label_smoothing)

    def _losses(self, logits: Tensor, labels: Tensor, taught: float) -> Tensor:
        """The sum over all subnets. logits: (rows, subnets, n, classes), labels: (rows, n)."""
        own, others = (logits[:, :1], logits[:, 1:]) if taught else (logits, logits[:, :0])
        every = labels[:, None].expand(-1, own.shape[1], -1)  # (rows, subnets, n)
        # Each subnet's own: a loss may count the labels of its batch.
        total = torch.vmap(self._loss)(own.flatten(0, 1), every.flatten(0, 1)).sum()
        if not others.shape[1]:
            return total
        return total + taught * torch.vmap(soft_cross_entropy)(others.flatten(0, 1), own.detach().expand_as(others).flatten(0, 1)).sum()

    # -- all steps ------------------------------------------------------------
    def _in_lockstep(
        self,
        kind: Hashable,
        starts: Sequence[Start],
        courses: Sequence[Iterator[Any]],
        stack: Callable[[Sequence[Any], torch.device], tuple[Hashable, Inputs]],
        step_of: Callable[[Any], Step],
        most: int,
        moves: frozenset[str] | None = None,
    ) -> list[Start]:
        """Each row takes the steps of its course; rows with batches of equal size and one teacher make a stack. stack: what a step is
        known by, and its inputs; most: rows of a stack. Rows take a step together if their subnets have the same input sizes; those
        with others rest: they compute what a row beside them does, and do not move."""
        firsts = [next(course, None) for course in courses]
        results: dict[int, Start] = {}
        for row, first in enumerate(firsts):
            if first is None:
                results[row] = Start(Packed.of(starts[row].weights), starts[row].momenta)
        alike: dict[Hashable, list[int]] = {}
        for row, first in enumerate(firsts):
            if first is not None:
                alike.setdefault((len(first[1]), first[5:7] if isinstance(first, SubnetStep) else None), []).append(row)
        for waiting in alike.values():
            size = ceil(len(waiting) / ceil(len(waiting) / most))  # stacks of equal size: a step is captured for one size
            for begin in range(0, len(waiting), size):
                rows = waiting[begin : begin + size]
                extra = size - len(rows)  # copies of the first row fill the last stack
                place = self._place(kind, [starts[row] for row in [*rows, *rows[:1] * extra]], moves)
                now, alive = [firsts[row] for row in rows], dict(enumerate(rows))
                while alive:
                    some = self._at_once({index: now[index] for index in alive})
                    rest = _at_rest(now[some[0]]) if extra or len(some) < len(now) else None
                    steps = [now[index] if index in some else rest for index in range(len(now))]
                    key, inputs = stack([*steps, *[rest] * extra], place.weights.flat.device)
                    place.run(step_of(key), (inputs[1].shape, key), *inputs)
                    for index in some:
                        row = alive[index]
                        following = next(courses[row], None)
                        if following is None:  # it stays in the stack until all are over, and nobody reads it
                            results[row] = Start(place.weights.row(index), place.momenta[index].clone())
                            del alive[index]
                        else:
                            now[index] = following
        return [results[row] for row in range(len(starts))]

    def _at_once(self, steps: Mapping[int, Any]) -> list[int]:
        """The rows that take their next step together: as many as possible, of several equal choices those with the first row."""
        alike: dict[Hashable, list[int]] = {}
        for index, step in steps.items():
            alike.setdefault(self._sizes(step) if isinstance(step, SubnetStep) else None, []).append(index)
        return max(alike.values(), key=len)

    def _place(self, kind: Hashable, starts: Sequence[Start], moves: frozenset[str] | None) -> WeightsInTraining:
        """The last packed weights of this kind and number, if there were any: their captured steps can be used again."""
        weights = Packed.stack([start.weights for start in starts])
        pulls = [start.pull for start in starts if start.pull is not None]
        key = (kind, kind_of(starts[0].pull), len(starts), str(weights.flat.device), weights.flat.dtype)
        place = self._places.pop(key, None)
        if place is None or place.weights.layout != weights.layout:
            while len(self._places) >= KEPT:
                del self._places[next(iter(self._places))]  # frees its memory before the next one
            place = WeightsInTraining(weights, self.settings, moves=moves)
        momenta = None
        if any(start.momenta is not None for start in starts):
            nothing = optimiser_of(self.settings).start(weights.flat[0])
            momenta = torch.stack([nothing if start.momenta is None else start.momenta for start in starts])
        place.load(weights, momenta)
        if pulls:
            sides = [[pull.towards for pull in pulls], [pull.slope for pull in pulls if pull.slope is not None]]
            ordered = ([{name: own[name] for name in weights.shapes} for own in side] for side in sides if side)
            towards, *slope = (Packed.stack(side).flat for side in ordered)
            strengths = torch.tensor([[pull.strength] for pull in pulls], dtype=towards.dtype)
            place.pull(towards, sent(strengths, towards.device), *slope)
        self._places[key] = place  # as the last one used
        return place

    def _most(self, architecture: Architecture, weights: Weights) -> int:
        """How many of these train at once without taking too much memory."""
        one = next(iter(weights.values()))
        each = computing(self.settings, one).itemsize * self.settings.batch * 2 * self.supernet.space.cost(architecture).activations
        room = GPU_SHARE * allowed_bytes(one.device) if one.is_cuda else CPU_BYTES
        return min(ROWS, max(1, int(room // each)))


def _at_rest(step: Any) -> Any:
    """The same for a row that must not move; a plain network's has ended, and nobody reads it."""
    return step._replace(mask=torch.zeros_like(step.mask)) if isinstance(step, SubnetStep) else step


def _stack(steps: Sequence[NetworkStep], device: torch.device) -> tuple[Hashable, Inputs]:
    images, labels, rates = zip(*steps, strict=True)
    return (), (torch.stack(images), torch.stack(labels), sent(torch.tensor(rates)[:, None], device))


def _placed(plain: Weights, place: Mapping[str, Region], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Plain weights where they lie in a supernet, zeros elsewhere."""
    some = next(iter(plain.values()))
    weights = {name: some.new_zeros(shape) for name, shape in shapes.items()}
    for name, tensor in plain.items():
        weights[name][place[name]] = tensor
    return weights


def _pull_placed(pull: Pull, place: Mapping[str, Region], shapes: Mapping[str, tuple[int, ...]]) -> Pull:
    slope = None if pull.slope is None else _placed(pull.slope, place, shapes)
    return Pull(_placed(pull.towards, place, shapes), pull.strength, slope)


def _marks(place: Mapping[str, Region], shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> Tensor:
    """(entries,) which of them a plain network has, packed."""
    marks = Packed.zeros(shapes, torch.bool, torch.device("cpu"))
    for name, region in place.items():
        marks[name][region] = True
    return marks.flat.to(device)
