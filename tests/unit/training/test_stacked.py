"""Networks in one stack train as each of them trains alone, whatever the others in it do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.maths.distillation import balanced_softmax
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.spaces.nasvit import NASViT, NASViTSettings
from fedloom.supernets.base import Weights
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.supernets.nasvit import NASViTSupernet
from fedloom.training import stacked as module
from fedloom.training.graphs import WeightsInTraining
from fedloom.training.local import NetworkJob, SupernetJob, Trainer, one_of
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings
from fedloom.training.stacked import NetworkStep, Stacks, stacked, trains_masked

SLICED = TrainingSettings(batch=8, crop=0, flip=False, cutout=0, momentum=0.9, weight_decay=0.05, label_smoothing=0.1, execution="sliced")
STACKED = replace(SLICED, execution="masked")
PIXELS = Pixels((0.5,), (0.25,))
CLOSE = 1e-5  # of the furthest that a weight moved; in double precision, where no rectifier sits within rounding of its switch
Row = tuple[Architecture, Weights, Sequence[NetworkStep]]


@pytest.fixture(scope="module")
def supernet() -> MobileNetV3Supernet:
    settings = MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1))
    return MobileNetV3Supernet(MobileNetV3(settings, ImageShape(1, 8, 3)))


@pytest.fixture
def stacks(supernet: MobileNetV3Supernet) -> Stacks:
    return Stacks(supernet, STACKED, PIXELS, F.cross_entropy)


def examples_of(count: int, seed: int = 0) -> Examples:
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Examples(images, torch.arange(count) % 3)


def plain_of(supernet: MobileNetV3Supernet, architecture: Architecture, seed: int) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in supernet.plain(supernet.initial(seed), architecture).items()}


def steps_of(steps: int, batch: int = 8, rate: float = 0.05, seed: int = 0) -> list[NetworkStep]:
    return [(*vars(examples_of(batch, seed=100 * seed + step)).values(), rate * (1 + step)) for step in range(steps)]


def row(supernet: MobileNetV3Supernet, seed: int, steps: int = 2, batch: int = 8, name: str = "smallest", rate: float = 0.05) -> Row:
    architecture = supernet.space.named[name]
    return architecture, plain_of(supernet, architecture, seed), steps_of(steps, batch, rate, seed)


def trained(stacks: Stacks, rows: Sequence[Row]) -> list[Weights]:
    return stacks.networks([(architecture, plain) for architecture, plain, _ in rows], [iter(steps) for _, _, steps in rows])


def check(got: Weights, expected: Weights, start: Weights) -> None:
    moved = max(float((tensor - start[name]).abs().max()) for name, tensor in expected.items())
    assert moved > 0 and list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and float((got[name] - tensor).abs().max()) <= CLOSE * moved, name


def same(one: Weights, other: Weights) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(supernet: MobileNetV3Supernet, given: Row) -> dict[str, Tensor]:
    """SGD as torch's, a step at a time."""
    architecture, plain, steps = given
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in plain.items()}
    decays, others = ([leaf for leaf in leaves.values() if (leaf.ndim > 1) == wanted] for wanted in (True, False))
    optimiser = torch.optim.SGD([{"params": decays, "weight_decay": 0.05}, {"params": others}], lr=1.0, momentum=0.9)
    for images, labels, rate in steps:
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad()
        logits = supernet.forward(PIXELS.normalise(images).double(), leaves, architecture)
        F.cross_entropy(logits, labels, label_smoothing=0.1).backward()
        optimiser.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


@pytest.fixture(autouse=True)
def pixels_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    normalise = Pixels.normalise
    monkeypatch.setattr(Pixels, "normalise", lambda self, images: normalise(self, images).double())


# -- rows of one stack -------------------------------------------------------------------
@pytest.mark.parametrize("names", [("smallest", "smallest", "smallest"), ("smallest", "medium", "largest")], ids=["one", "different"])
def test_each_row_is_sgd(supernet: MobileNetV3Supernet, stacks: Stacks, names: tuple[str, ...]) -> None:
    rows = [row(supernet, seed, name=name, rate=0.02 * (1 + seed)) for seed, name in enumerate(names)]
    for got, given in zip(trained(stacks, rows), rows, strict=True):
        check(got, by_hand(supernet, given), given[1])


@pytest.mark.parametrize("names", [("smallest",) * 4, ("smallest", "medium", "smallest", "largest")], ids=["one", "different"])
def test_rows_of_unequal_length_and_batch_size(supernet: MobileNetV3Supernet, stacks: Stacks, names: tuple[str, ...]) -> None:
    shapes = [(3, 8), (1, 8), (2, 5), (4, 8)]  # steps, images of a step
    rows = [row(supernet, seed, *shape, name) for seed, (shape, name) in enumerate(zip(shapes, names, strict=True))]
    for got, given in zip(trained(stacks, rows), rows, strict=True):
        check(got, by_hand(supernet, given), given[1])


@pytest.mark.parametrize("most", [1, 2, 3])
def test_copies_fill_the_last_stack(supernet: MobileNetV3Supernet, stacks: Stacks, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", most)
    sizes: list[int] = []
    move = stacks._move
    monkeypatch.setattr(stacks, "_move", lambda place, *given: (sizes.append(len(place.weights.flat)), move(place, *given))[1])
    rows = [row(supernet, seed, steps=1 + seed % 2) for seed in range(5)]
    for got, given in zip(trained(stacks, rows), rows, strict=True):
        check(got, by_hand(supernet, given), given[1])
    assert set(sizes) == {most}  # one size: on a GPU a step is captured once
    assert len(sizes) == {1: 7, 2: 5, 3: 4}[most]  # a stack takes as many steps as its longest row


@pytest.mark.parametrize("names", [("smallest",) * 3, ("smallest", "medium", "largest")], ids=["one", "different"])
def test_a_course_without_steps_leaves_the_weights(supernet: MobileNetV3Supernet, stacks: Stacks, names: tuple[str, ...]) -> None:
    rows = [row(supernet, seed, steps, name=name) for seed, (steps, name) in enumerate(zip((0, 2, 0), names, strict=True))]
    results = trained(stacks, rows)
    assert same(results[0], rows[0][1]) and same(results[2], rows[2][1])
    check(results[1], by_hand(supernet, rows[1]), rows[1][1])
    next(iter(results[0].values())).zero_()
    assert not same(results[0], rows[0][1])  # a copy
    assert trained(stacks, []) == [] and same(trained(stacks, rows[:1])[0], rows[0][1])


def test_only_architectures_with_few_networks_are_masked(
    supernet: MobileNetV3Supernet, stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANY", 2)
    rows = [row(supernet, seed, name=name) for seed, name in enumerate(["smallest", "medium", "smallest", "largest"])]
    kinds = []
    lockstep = stacks._in_lockstep
    monkeypatch.setattr(
        stacks, "_in_lockstep", lambda kind, starts, *more: (kinds.append((kind, len(starts))), lockstep(kind, starts, *more))[1]
    )
    got = trained(stacks, rows)
    assert kinds == [("supernet", 2), (("network", supernet.space.named["smallest"], "whole", (None, None)), 2)]
    for own, given in zip(got, rows, strict=True):
        check(own, by_hand(supernet, given), given[1])


def test_what_trains_is_a_copy(supernet: MobileNetV3Supernet, stacks: Stacks) -> None:
    rows = [row(supernet, seed) for seed in range(2)]
    before = [{name: tensor.clone() for name, tensor in plain.items()} for _, plain, _ in rows]
    first = trained(stacks, rows)
    kept = [{name: tensor.clone() for name, tensor in one.items()} for one in first]
    again = trained(stacks, rows)  # in the same places of memory
    assert all(same(plain, old) for (_, plain, _), old in zip(rows, before, strict=True))
    assert all(same(one, old) and same(one, new) for one, old, new in zip(first, kept, again, strict=True))


# -- the others ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["smallest", "medium"])
def test_results_do_not_depend_on_who_else_is_there(supernet: MobileNetV3Supernet, stacks: Stacks, name: str) -> None:
    """Bit for bit, whatever the others are, wherever a row lies among them."""
    mine, medium = row(supernet, 0), row(supernet, 5, name="medium")  # with different architectures all of them run masked
    expected = trained(stacks, [mine, row(supernet, 1, name=name), medium if name == "medium" else row(supernet, 2)])[0]
    for others in ([row(supernet, 3, name=name, rate=0.5), row(supernet, 4, steps=3, name=name)], [row(supernet, 6, name=name)] * 2):
        assert same(trained(stacks, [mine, *others])[0], expected)
        assert same(trained(stacks, [*others, mine])[2], expected)
    alone = trained(stacks, [mine])[0]  # not stacked: other kernels
    check(expected, alone, mine[1])


@pytest.mark.parametrize("name", ["smallest", "medium"])
@pytest.mark.parametrize("how", ["weights", "rate"])
def test_a_row_that_diverges_does_not_touch_the_others(supernet: MobileNetV3Supernet, stacks: Stacks, name: str, how: str) -> None:
    good, other = row(supernet, 0, steps=3), row(supernet, 1, steps=3, name=name)
    architecture, plain, steps = row(supernet, 2, steps=3, name=name)
    if how == "weights":
        bad: Row = (architecture, {key: torch.full_like(tensor, torch.nan) for key, tensor in plain.items()}, steps)
    else:
        bad = (architecture, plain, [(images, labels, 1e300) for images, labels, _ in steps])
    expected = trained(stacks, [good, other, (architecture, plain, steps)])
    results = trained(stacks, [good, other, bad])
    assert same(results[0], expected[0]) and same(results[1], expected[1])
    assert not all(bool(tensor.isfinite().all()) for tensor in results[2].values())
    # nothing of it is left for the next that train in its place
    assert all(
        same(one, another) for one, another in zip(trained(stacks, [good, other, (architecture, plain, steps)]), expected, strict=True)
    )


# -- through the trainer ---------------------------------------------------------------------
def test_a_trainer_stacks_supernets_with_unequal_examples(supernet: MobileNetV3Supernet) -> None:
    space, weights = supernet.space, {name: tensor.double() for name, tensor in supernet.initial(0).items()}
    draw = one_of([*space.named.values(), space.sample(rng("one"))])
    sizes, epochs = (24, 8, 5, 17), (1, 2, 1, 0)  # 5: smaller batches; 0: no step at all

    def run(settings: TrainingSettings) -> list[Any]:
        trainer = Trainer(supernet, settings, PIXELS)
        jobs = [
            SupernetJob(weights, draw, examples_of(size, seed), [0.02] * times, np.random.default_rng(seed))
            for seed, (size, times) in enumerate(zip(sizes, epochs, strict=True))
        ]
        return trainer._train_supernets(jobs)

    for one, other in zip(run(SLICED), run(STACKED), strict=True):
        assert one.steps == other.steps and one.macs == other.macs
        if one.steps:
            check(other.weights, one.weights, weights)
        else:
            assert same(one.weights, weights) and same(other.weights, weights)


def test_rows_whose_subnets_see_other_sizes_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three supernets, three sizes, in another order each: as alone, and in fewer steps than one after the other takes."""
    supernet = NASViTSupernet(NASViT(replace(NASViTSettings.tiny(), depth=0.1), ImageShape(1, 8, 3)))
    subnets = [replace(supernet.space.named["medium"], choices=(size, *supernet.space.named["medium"].choices[1:])) for size in range(3)]
    turns = [(0, 1, 2), (0, 2, 1), (1, 2)]

    def jobs() -> Iterator[SupernetJob]:
        for seed, sizes in enumerate(turns):
            weights = {name: tensor.double() for name, tensor in supernet.initial(seed).items()}
            drawn = iter([[subnets[size]] for size in sizes])
            yield SupernetJob(
                weights, lambda _, drawn=drawn: next(drawn), examples_of(8, seed), [0.05] * len(sizes), np.random.default_rng(seed)
            )  # type: ignore[misc]

    alone = Trainer(supernet, SLICED, PIXELS)._train_supernets([*jobs()])
    steps: list[tuple[int, int]] = []
    run = WeightsInTraining.run

    def listen(self: WeightsInTraining, step: Any, key: Any, *inputs: Any) -> None:
        steps.append((key[1][0][0], int(inputs[4].any(1).sum())))  # the size, and the rows that move
        run(self, step, key, *inputs)

    monkeypatch.setattr(WeightsInTraining, "run", listen)
    together = Trainer(supernet, STACKED, PIXELS)._train_supernets([*jobs()])
    for job, one, other in zip(jobs(), alone, together, strict=True):
        check(other.weights, one.weights, job.weights)
        assert one.momenta is not None and other.momenta is not None
        torch.testing.assert_close(other.momenta, one.momenta)
    assert steps == [(5, 2), (6, 2), (9, 3), (6, 1)]


def test_a_trainer_stacks_networks_with_unequal_examples(supernet: MobileNetV3Supernet) -> None:
    names, sizes, epochs = ("smallest", "medium", "smallest", "medium"), (24, 8, 5, 16), (1, 2, 1, 0)

    def run(settings: TrainingSettings) -> list[Any]:
        jobs = [
            NetworkJob(
                plain_of(supernet, supernet.space.named[name], seed),
                supernet.space.named[name],
                examples_of(size, seed),
                [0.02] * times,
                np.random.default_rng(seed),
            )
            for seed, (name, size, times) in enumerate(zip(names, sizes, epochs, strict=True))
        ]
        return Trainer(supernet, settings, PIXELS).train_networks(jobs)

    for seed, (name, one, other) in enumerate(zip(names, run(SLICED), run(STACKED), strict=True)):
        assert one.steps == other.steps and one.macs == other.macs
        start = plain_of(supernet, supernet.space.named[name], seed)
        if epochs[seed]:
            check(other.weights, one.weights, start)
        else:
            assert same(one.weights, start) and same(other.weights, start)


def test_when_networks_are_stacked(supernet: MobileNetV3Supernet) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    found = {
        execution: (stacked(own, cpu), stacked(own, gpu), trains_masked(supernet, own, cpu), trains_masked(supernet, own, gpu))
        for execution in ("auto", "sliced", "masked", "reference")
        for own in [replace(SLICED, execution=execution)]
    }
    assert found == {"auto": (False, True, False, True), "sliced": (False,) * 4, "masked": (True,) * 4, "reference": (False,) * 4}


def test_a_stack_has_a_bound(supernet: MobileNetV3Supernet, stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = supernet.space.named["largest"]
    plain = plain_of(supernet, architecture, 0)
    assert stacks._most(architecture, plain) == module.ROWS
    each = 8 * STACKED.batch * 2 * supernet.space.cost(architecture).activations
    monkeypatch.setattr(module, "CPU_BYTES", 3.5 * each)
    assert stacks._most(architecture, plain) == 3
    monkeypatch.setattr(module, "CPU_BYTES", 1)
    assert stacks._most(architecture, plain) == 1


def test_few_kinds_of_stacks_are_kept(supernet: MobileNetV3Supernet, stacks: Stacks) -> None:
    """Their captured steps take memory."""
    for count in range(1, module.KEPT + 3):
        trained(stacks, [row(supernet, seed, steps=1) for seed in range(count)])
    assert [key[2] for key in stacks._places] == [3, 4, 5]  # type: ignore[index]
    steps: Iterator[NetworkStep] = iter(())
    assert stacks.networks([(supernet.space.named["smallest"], plain_of(supernet, supernet.space.named["smallest"], 0))], [steps])
    assert len(stacks._places) == module.KEPT  # nothing to train, nothing to keep


# -- what some methods bring along ---------------------------------------------------------
def test_a_loss_that_counts_labels_sees_those_of_its_own_row(supernet: MobileNetV3Supernet) -> None:
    """hapfnas: counts of all clients in a stack would teach each of them what the others have."""
    rows = [row(supernet, seed, name=name) for seed, name in enumerate(("smallest", "medium"))]
    rows[1] = (*rows[1][:2], [(images, torch.zeros_like(labels), rate) for images, labels, rate in rows[1][2]])
    stacks = Stacks(supernet, STACKED, PIXELS, balanced_softmax)
    for got, given in zip(trained(stacks, rows), rows, strict=True):
        check(got, trained(stacks, [given])[0], given[1])


def test_parts_of_a_supernet_stack_too(supernet: MobileNetV3Supernet) -> None:
    """perfedrlnas and hapfnas train an architecture's part of the supernet, which has more weights than the plain network."""
    whole = {name: tensor.double() for name, tensor in supernet.initial(0).items()}
    rows: list[Row] = []
    for seed, name in enumerate(("smallest", "medium")):
        architecture = supernet.space.named[name]
        own = {key: tensor.clone() for key, tensor in supernet.take(whole, architecture).items()}
        assert set(own) > set(supernet.plain(whole, architecture))
        rows.append((architecture, own, steps_of(2, seed=seed)))
    for got, given in zip(trained(Stacks(supernet, STACKED, PIXELS, F.cross_entropy), rows), rows, strict=True):
        check(got, by_hand(supernet, given), given[1])
