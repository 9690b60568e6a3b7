"""The training loop against torch.optim, the scoring function against itself in pieces, the schedule by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientData, ClientSite, Examples
from fedloom.core.seeds import rng
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.supernets.normalisation import Statistics
from fedloom.training import scoring
from fedloom.training.local import Trainer, one_of
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings, falling
from fedloom.training.scoring import Score, Scored, Scorer, best_first
from fedloom.training.tools import Tools

PIXELS = Pixels((0.5,), (0.25,))
PLAIN = TrainingSettings(batch=8, crop=0, flip=False, cutout=0, momentum=0.0, weight_decay=0.1, label_smoothing=0.2, calibration=6)
HEAVY = replace(PLAIN, momentum=0.9, weight_decay=0.05)
CLASSES = 3
# Against torch.optim on torch modules: float32, other kernels, a handful of steps. Measured 1e-7.
CLOSE = {"rtol": 1e-3, "atol": 1e-5}


@pytest.fixture(scope="module")
def supernet() -> MobileNetV3Supernet:
    settings = MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1))
    return MobileNetV3Supernet(MobileNetV3(settings, ImageShape(1, 8, CLASSES)))


def examples_of(count: int, seed: int = 0) -> Examples:
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    images = np.clip(draw.normal(128, 50, (count, 1, 8, 8)) + 80 * (labels[:, None, None, None] - 1), 0, 255)
    return Examples(torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels))


def perturbed(supernet: MobileNetV3Supernet, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in supernet.initial(seed).items()}


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def cancelled(name: str) -> bool:
    """The next layer's batch normalisation takes the shift of a projection away again: it has no gradient."""
    return name.endswith("project.norm.bias")


def by_torch(
    supernet: MobileNetV3Supernet,
    plain: dict[str, Tensor],
    architecture: Architecture,
    settings: TrainingSettings,
    examples: Examples,
    rates: Sequence[float],
    seed: int,
) -> dict[str, Tensor]:
    """The same training with torch's own network, optimiser and loss."""
    network = supernet.network(architecture)
    network.load_state_dict(plain, strict=False)
    network.train()
    groups = [
        {"params": [p for p in network.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in network.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.SGD(groups, lr=0.1, momentum=settings.momentum)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
    draw = np.random.default_rng(seed)
    for rate in rates:
        for group in optimiser.param_groups:
            group["lr"] = rate
        order = torch.from_numpy(draw.permutation(len(examples)))
        for batch in order.split(settings.batch):
            if len(batch) < settings.batch:
                continue
            images = (examples.images[batch].float() / 255 - PIXELS.mean[0]) / PIXELS.std[0]
            optimiser.zero_grad()
            loss_of(network(images), examples.labels[batch]).backward()
            optimiser.step()
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


# -- one network -------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "count", "rates"),
    [
        pytest.param(PLAIN, 8, [0.1], id="one plain step"),
        pytest.param(HEAVY, 19, [0.05, 0.02], id="four steps with momentum"),
    ],
)
def test_training_is_sgd_as_torch_does_it(
    supernet: MobileNetV3Supernet, settings: TrainingSettings, count: int, rates: list[float]
) -> None:
    architecture = supernet.space.sample(rng("sgd", 1))
    plain, examples = supernet.plain(perturbed(supernet, 1), architecture), examples_of(count, seed=1)
    trained = Trainer(supernet, settings, PIXELS).train_network(plain, architecture, examples, rates, np.random.default_rng(5))
    expected = by_torch(supernet, plain, architecture, settings, examples, rates, seed=5)
    assert set(trained.weights) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(trained.weights[name] - plain[name], tensor - plain[name], **CLOSE)
        assert not torch.equal(tensor, plain[name]) or cancelled(name)


def test_steps_and_multiply_accumulates_are_counted(supernet: MobileNetV3Supernet) -> None:
    architecture = supernet.space.named["medium"]
    plain = supernet.plain(supernet.initial(0), architecture)
    trained = Trainer(supernet, PLAIN, PIXELS).train_network(plain, architecture, examples_of(19), [0.1] * 3, rng(0))
    assert trained.steps == Counter({architecture: 6})  # 19 examples fill two batches of 8
    assert trained.macs == 6 * 8 * supernet.space.cost(architecture).macs


def test_fewer_examples_than_a_batch_make_one_step(supernet: MobileNetV3Supernet) -> None:
    architecture = supernet.space.named["smallest"]
    plain = supernet.plain(supernet.initial(0), architecture)
    trained = Trainer(supernet, PLAIN, PIXELS).train_network(plain, architecture, examples_of(5), [0.1], rng(0))
    assert trained.steps == Counter({architecture: 1})
    assert trained.macs == 5 * supernet.space.cost(architecture).macs


# -- both kinds ----------------------------------------------------------------
Training = Callable[[Trainer, dict[str, Tensor], Examples, np.random.Generator], Any]


def of_network(trainer: Trainer, weights: dict[str, Tensor], examples: Examples, draw: np.random.Generator) -> Any:
    """Weights are already plain: the largest architecture's kernels need no matrices."""
    architecture = trainer.supernet.space.named["largest"]
    return trainer.train_network(trainer.supernet.take(weights, architecture), architecture, examples, [0.1, 0.05], draw)


def of_supernet(trainer: Trainer, weights: dict[str, Tensor], examples: Examples, draw: np.random.Generator) -> Any:
    return trainer.train_supernet(weights, one_of(list(trainer.supernet.space.named.values())), examples, [0.1, 0.05], draw)


@pytest.mark.parametrize("training", [of_network, of_supernet])
def test_the_generator_decides_everything(supernet: MobileNetV3Supernet, training: Training) -> None:
    trainer = Trainer(supernet, replace(HEAVY, crop=1, flip=True, cutout=3), PIXELS)
    weights, examples = perturbed(supernet), examples_of(20)
    torch.manual_seed(1)
    one = training(trainer, weights, examples, np.random.default_rng(1))
    torch.manual_seed(2)
    again = training(trainer, weights, examples, np.random.default_rng(1))
    other = training(trainer, weights, examples, np.random.default_rng(2))
    assert same(one.weights, again.weights) and one.steps == again.steps and one.macs == again.macs
    assert not same(one.weights, other.weights)


@pytest.mark.parametrize("training", [of_network, of_supernet])
def test_inputs_are_not_modified(supernet: MobileNetV3Supernet, training: Training) -> None:
    weights, examples = perturbed(supernet), examples_of(20)
    before, images, labels = copied(weights), examples.images.clone(), examples.labels.clone()
    trained = training(Trainer(supernet, replace(HEAVY, crop=1), PIXELS), weights, examples, rng(0))
    assert same(weights, before)
    assert torch.equal(examples.images, images) and torch.equal(examples.labels, labels)
    for tensor in trained.weights.values():
        assert not tensor.requires_grad
        tensor.zero_()
    assert same(weights, before)


def test_training_learns(supernet: MobileNetV3Supernet) -> None:
    examples, architecture = examples_of(48), supernet.space.named["smallest"]
    plain = supernet.plain(supernet.initial(0), architecture)
    settings = replace(PLAIN, momentum=0.9, weight_decay=0.0, label_smoothing=0.0, calibration=48)
    trained = Trainer(supernet, settings, PIXELS).train_network(plain, architecture, examples, [0.05] * 6, rng(0)).weights
    scorer = Scorer(supernet, replace(PLAIN, calibration=48), PIXELS)
    scores = [scorer.score_network(w, architecture, scorer.calibrate(w, architecture, examples), examples) for w in (plain, trained)]
    assert scores[1].accuracy > 0.9 > scores[0].accuracy
    assert scores[1].loss < scores[0].loss


# -- a supernet ----------------------------------------------------------------
def test_nothing_outside_the_drawn_regions_moves(supernet: MobileNetV3Supernet) -> None:
    weights, draw = perturbed(supernet), rng("archive")
    choices = np.zeros(45, int)
    archive = [supernet.space.canonical(choices + (np.arange(45) == gene)) for gene in (0, 21, 40)]
    trained = Trainer(supernet, HEAVY, PIXELS).train_supernet(weights, one_of(archive), examples_of(24), [0.1, 0.1], draw)
    assert set(trained.steps) == set(archive) and sum(trained.steps.values()) == 6
    counts = supernet.coverage(trained.steps)
    still = moved = 0
    for name, tensor in trained.weights.items():
        covered = (counts[name] > 0).expand(tensor.shape)
        assert torch.equal(tensor[~covered], weights[name][~covered]), name
        if covered.any() and not cancelled(name):
            assert not torch.equal(tensor[covered], weights[name][covered]), name
        still, moved = still + int((~covered).sum()), moved + int(covered.sum())
    assert still > 1000 and moved > 1000


def test_momentum_and_decay_rest_while_another_subnet_trains(supernet: MobileNetV3Supernet) -> None:
    """What only the first step trained stays, bit for bit, where the first step left it."""
    smallest, largest = supernet.space.named["smallest"], supernet.space.named["largest"]
    weights, examples = perturbed(supernet), examples_of(8)
    trainer = Trainer(supernet, HEAVY, PIXELS)

    def train(epochs: int, seed: int) -> Any:
        return trainer.train_supernet(weights, one_of([smallest, largest]), examples, [0.1] * epochs, np.random.default_rng(seed))

    seed = next(s for s in range(100) if train(1, s).steps == {largest: 1} and train(2, s).steps == {largest: 1, smallest: 1})
    once, twice = train(1, seed).weights, train(2, seed).weights
    regions = supernet.regions(smallest)
    for name in weights:
        inside = torch.zeros(supernet.shapes[name], dtype=torch.bool)
        if name in regions:
            inside[regions[name]] = True
            assert not torch.equal(once[name][inside], twice[name][inside]) or cancelled(name), name
        assert torch.equal(once[name][~inside], twice[name][~inside]), name


def test_an_archive_of_one_trains_like_its_own_region(supernet: MobileNetV3Supernet) -> None:
    """On the region of a kernel-7 subnet, supernet training and network training are the same computation."""
    architecture = supernet.space.named["largest"]
    weights, examples = perturbed(supernet), examples_of(16)
    trainer = Trainer(supernet, HEAVY, PIXELS)
    alone = trainer.train_network(supernet.plain(weights, architecture), architecture, examples, [0.1], np.random.default_rng(0))
    shared = trainer.train_supernet(weights, one_of([architecture]), examples, [0.1], np.random.default_rng(0))
    assert same(alone.weights, supernet.take(shared.weights, architecture))
    assert alone.macs == shared.macs


# -- schedule ------------------------------------------------------------------
@pytest.mark.parametrize(("done", "rate"), [(0, 0.4), (1 / 3, 0.3), (0.5, 0.2), (2 / 3, 0.1), (1, 0.0)])
def test_the_cosine_by_hand(done: float, rate: float) -> None:
    assert falling(0.4, done, "cosine") == pytest.approx(rate)
    assert falling(0.4, done, "constant") == 0.4


def bench_of(supernet: MobileNetV3Supernet, **changes: Any) -> Tools:
    whole = Tools(supernet.space, supernet, replace(PLAIN, rate=0.4), PIXELS, 3, 3, "clean", torch.device("cpu"))
    return replace(whole, **changes)


def test_rates_fall_over_all_rounds(supernet: MobileNetV3Supernet) -> None:
    tools = bench_of(supernet)
    rates = [rate for round in range(3) for rate in tools.rates(round, 2)]
    assert rates == pytest.approx([0.2 * (1 + np.cos(np.pi * step / 6)) for step in range(6)])
    assert bench_of(supernet, training=replace(PLAIN, rate=0.4, schedule="constant")).rates(2, 2) == [0.4, 0.4]


# -- scores --------------------------------------------------------------------
def test_scores_rank_by_accuracy_then_loss_then_choices() -> None:
    def scored(choice: int, accuracy: float, loss: float) -> Scored:
        return Scored(Architecture("toy", (choice,)), Score(accuracy, loss))

    ranked = [scored(9, 0.8, 2.0), scored(8, 0.5, 0.1), scored(1, 0.5, 0.2), scored(2, 0.5, 0.2), scored(0, 0.2, 0.0)]
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [3, 2, 1, 0, 4]):
        assert best_first([ranked[index] for index in order]) == ranked
    assert min(Score(0.5, 0.3), Score(0.5, 0.2), Score(0.4, 0.0), key=lambda score: score.rank) == Score(0.5, 0.2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_network_that_diverged_scores_nothing_and_ranks_last(supernet: MobileNetV3Supernet, value: float) -> None:
    """Its argmax is the first class; where most examples are of that class, it must not win."""
    examples = Examples(examples_of(12).images, torch.zeros(12, dtype=torch.int64))
    scorer = Scorer(supernet, PLAIN, PIXELS)
    architecture, nothing = supernet.space.named["smallest"], Score(0.0, np.inf)
    weights = perturbed(supernet)
    for name in ("stem.conv.weight", "classifier.bias"):
        dead = {**weights, name: torch.full_like(weights[name], value)}
        assert scorer.score_subnets(dead, [architecture], examples, examples_of(12)) == [Scored(architecture, nothing)]
        plain = supernet.plain(dead, architecture)
        assert scorer.score_network(plain, architecture, scorer.calibrate(plain, architecture, examples), examples) == nothing

    alive = Scored(Architecture("toy", (9,)), Score(0.0, 50.0))  # nothing right either, but it computes
    ruins = [Scored(Architecture("toy", (choice,)), Score(0.0, np.inf)) for choice in range(3)]
    for order in itertools.permutations([alive, *ruins]):
        assert best_first(order) == [alive, *ruins]


@pytest.mark.parametrize(("count", "expected"), [(2, [0, 9]), (4, [0, 3, 6, 9]), (10, [*range(10)]), (99, [*range(10)])])
def test_calibration_images_are_spread_over_the_examples(supernet: MobileNetV3Supernet, count: int, expected: list[int]) -> None:
    images = (torch.arange(10) * 20).to(torch.uint8).view(10, 1, 1, 1).expand(10, 1, 8, 8)
    chosen = Scorer(supernet, replace(PLAIN, calibration=count), PIXELS).calibration_images(Examples(images, torch.arange(10)))
    torch.testing.assert_close(chosen[:, 0, 0, 0], (torch.tensor(expected) * 20 / 255 - 0.5) / 0.25)


def test_scoring_in_chunks_gives_the_same(supernet: MobileNetV3Supernet, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, examples = supernet.space.named["medium"], examples_of(23)
    plain = supernet.plain(perturbed(supernet), architecture)
    scorer = Scorer(supernet, replace(PLAIN, calibration=12), PIXELS)
    statistics = scorer.calibrate(plain, architecture, examples_of(30, seed=1))
    whole = scorer.score_network(plain, architecture, statistics, examples)
    for chunk in (1, 7, 23):
        monkeypatch.setattr(scoring, "CHUNK", chunk)
        part = scorer.score_network(plain, architecture, statistics, examples)
        assert part.accuracy == whole.accuracy
        assert part.loss == pytest.approx(whole.loss, rel=1e-5)


def test_a_score_is_accuracy_and_loss_of_the_plain_network(supernet: MobileNetV3Supernet) -> None:
    architecture, examples, train = supernet.space.sample(rng("score")), examples_of(23), examples_of(30, seed=1)
    weights, scorer = perturbed(supernet), Scorer(supernet, replace(PLAIN, calibration=12), PIXELS)
    statistics = scorer.calibrate(supernet.plain(weights, architecture), architecture, train)
    with torch.no_grad():
        logits = supernet.extract(weights, architecture, statistics)(PIXELS.normalise(examples.images))
    score = scorer.score_network(supernet.plain(weights, architecture), architecture, statistics, examples)
    assert score.accuracy == (logits.argmax(1) == examples.labels).double().mean().item()
    assert score.loss == pytest.approx(F.cross_entropy(logits, examples.labels).item(), rel=1e-4)


def test_subnets_are_scored_like_their_plain_networks(supernet: MobileNetV3Supernet) -> None:
    weights, examples, train = perturbed(supernet), examples_of(23), examples_of(30, seed=1)
    architectures, scorer = [*supernet.space.named.values()], Scorer(supernet, replace(PLAIN, calibration=12), PIXELS)
    scored = scorer.score_subnets(weights, architectures, examples, train)
    assert [one.architecture for one in scored] == architectures
    assert len({one.score for one in scored}) == len(scored)
    for one in scored:
        plain = supernet.plain(weights, one.architecture)
        alone = scorer.score_network(plain, one.architecture, scorer.calibrate(plain, one.architecture, train), examples)
        assert one.score.accuracy == alone.accuracy
        assert one.score.loss == pytest.approx(alone.loss, rel=1e-4)
    assert scorer.score_subnets(weights, [], examples, train) == []


def test_calibrated_statistics_no_longer_change(supernet: MobileNetV3Supernet) -> None:
    architecture = supernet.space.named["smallest"]
    plain, scorer = supernet.plain(perturbed(supernet), architecture), Scorer(supernet, replace(PLAIN, calibration=12), PIXELS)
    statistics = scorer.calibrate(plain, architecture, examples_of(30))
    before = Statistics({name: (mean.clone(), variance.clone()) for name, (mean, variance) in statistics.items()})
    scorer.score_network(plain, architecture, statistics, examples_of(9, seed=4))
    assert statistics.rows == 0 and set(statistics) == set(before)
    for name, (mean, variance) in before.items():
        assert torch.equal(statistics[name][0], mean) and torch.equal(statistics[name][1], variance)


# -- the tools -------------------------------------------------------------------
def site_of() -> ClientSite:
    return ClientSite("client-0", ClientData(examples_of(20), examples_of(12, seed=1), examples_of(14, seed=2)))


def test_validation_data_select_unless_the_papers_protocol_is_asked_for(supernet: MobileNetV3Supernet) -> None:
    data = site_of().data
    assert bench_of(supernet).selecting(data) is data.validation
    assert bench_of(supernet, protocol="paper").selecting(data) is data.test


def test_participants_are_drawn_by_seed_and_round(supernet: MobileNetV3Supernet) -> None:
    tools, clients = bench_of(supernet), [f"client-{number}" for number in range(6)]
    drawn = [tools.draw_participants(0, round, clients) for round in range(30)]
    assert drawn == [tools.draw_participants(0, round, clients) for round in range(30)]
    assert all(len(set(names)) == 3 and names == sorted(names) for names in drawn)
    assert set().union(*drawn) == set(clients) and len({tuple(names) for names in drawn}) > 5
    assert drawn != [tools.draw_participants(1, round, clients) for round in range(30)]
    assert tools.draw_participants(0, 0, clients[:2]) == clients[:2]


def test_fine_tuning_keeps_the_best_rate_on_validation_data(supernet: MobileNetV3Supernet) -> None:
    architecture, site = supernet.space.named["smallest"], site_of()
    fresh = supernet.plain(supernet.initial(0), architecture)
    useful = replace(PLAIN, finetune_epochs=8, finetune_rates=(1e6, 0.05), momentum=0.9, weight_decay=0.0, calibration=20)
    tuned, diary = bench_of(supernet, training=useful).personalise(site, architecture, fresh, 0)
    assert diary.validation_accuracy is not None and diary.validation_accuracy > 0.7
    assert diary.trained_macs == 2 * 8 * 2 * 8 * supernet.space.cost(architecture).macs  # rates, epochs, steps, batch
    assert tuned.architecture == diary.architecture == architecture.id
    assert {"finetune", "test"} <= set(site.clock.seconds)
    good = {name: torch.from_numpy(tuned.arrays[name]) for name in fresh}
    ruinous = replace(useful, finetune_rates=(1e6,))
    kept, _ = bench_of(supernet, training=ruinous).personalise(site, architecture, good, 0)
    assert all(np.array_equal(kept.arrays[name], tuned.arrays[name]) for name in fresh)


def test_fine_tuning_can_be_off(supernet: MobileNetV3Supernet) -> None:
    architecture = supernet.space.named["smallest"]
    plain = supernet.plain(perturbed(supernet), architecture)
    kept, diary = bench_of(supernet, training=replace(PLAIN, finetune_epochs=0)).personalise(site_of(), architecture, plain, 0)
    assert all(np.array_equal(kept.arrays[name], plain[name].numpy()) for name in plain)
    assert diary.trained_macs == 0


def test_training_memory_by_hand(supernet: MobileNetV3Supernet) -> None:
    architecture = supernet.space.named["medium"]
    cost = supernet.space.cost(architecture)
    for examples, batch in ((5, 5), (100, 8)):
        expected = 4 * (2 * 1000 + cost.parameters + batch * cost.activations) / 1e6
        assert bench_of(supernet).training_memory_mb(architecture, 1000, examples) == pytest.approx(expected)
