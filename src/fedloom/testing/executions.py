"""Training and scoring do the same, sliced and masked, one subnet per step or several, for every supernet."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.supernets.base import Supernet
from fedloom.supernets.normalisation import Statistics
from fedloom.testing.nets import CLOSE, InPrecision, images_of, mask, masks, measured, weights_of
from fedloom.testing.spaces import Given, each, needs_masks
from fedloom.training import scoring
from fedloom.training.local import Draw, Trainer, beside, one_of
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings
from fedloom.training.scoring import Scorer

PIXELS = Pixels((0.5,), (0.25,))
SLICED = TrainingSettings(batch=8, crop=0, flip=False, cutout=0, momentum=0.9, weight_decay=0.5, calibration=12, execution="sliced")
MASKED = replace(SLICED, execution="masked")


def examples_of(supernet: Supernet[Any], count: int, seed: int = 0) -> Examples:
    image, generator = supernet.space.image, torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, image.channels, image.size, image.size), generator=generator, dtype=torch.uint8)
    return Examples(images, torch.arange(count) % image.classes)


def draws_of(supernet: Supernet[Any], kind: str) -> Draw:
    """taught: a middle one first, which smaller, equal and larger ones follow, also in the size of their images."""
    archive = [*supernet.space.named.values(), supernet.space.sample(rng("archive"))]
    draws = {"fair": supernet.space.fair, "archive": one_of(archive), "taught": beside(supernet.space.named["medium"], one_of(archive))}
    return draws[kind]


def in_turn(*drawn: list[Architecture]) -> Draw:
    turns = iter(drawn)
    return lambda _: next(turns)


def executions(supernet: Supernet[Any]) -> list[TrainingSettings]:
    return [SLICED, MASKED] if masks(supernet) else [SLICED]


class ExecutionContract(Given):
    """Training and scoring in both executions, and everything that must agree on random architectures."""

    kind = each(["archive", "fair", "taught"])
    count = each([12])

    @needs_masks
    def test_training(self, supernet: Supernet[Any], kind: str) -> None:
        weights, examples, draw = weights_of(supernet), examples_of(supernet, 16), draws_of(supernet, kind)
        taught = kind == "taught"
        sliced, masked = (
            Trainer(supernet, settings, PIXELS).train_supernet(weights, draw, examples, [0.02, 0.02], np.random.default_rng(0), taught)
            for settings in (SLICED, MASKED)
        )
        assert sliced.steps == masked.steps and sliced.macs == masked.macs > 0
        counts = supernet.coverage(sliced.steps)
        for name, tensor in sliced.weights.items():
            still = (counts[name] == 0).expand(tensor.shape)
            for trained in (tensor, masked.weights[name]):
                assert torch.equal(trained[still], weights[name][still]), name
        start, one, other = (torch.cat([w[name].flatten() for name in weights]) for w in (weights, sliced.weights, masked.weights))
        assert (one - other).norm() < 0.05 * (one - start).norm()  # float32: rectifiers at their switch; see test_masked

    def test_the_order_of_the_weights_does_not_matter(self, supernet: Supernet[Any]) -> None:
        weights, examples, draw = weights_of(supernet), examples_of(supernet, 16), draws_of(supernet, "archive")
        turned = dict(reversed(list(weights.items())))
        for settings in executions(supernet):
            one, other = (
                Trainer(supernet, settings, PIXELS).train_supernet(given, draw, examples, [0.02], np.random.default_rng(0)).weights
                for given in (weights, turned)
            )
            assert all(torch.equal(one[name], other[name]) for name in weights)

    def test_a_trainer_serves_one_network_after_another(self, supernet: Supernet[Any]) -> None:
        """Weights, batch size and execution change between calls; nothing of an earlier call is left in a later one."""
        settings = executions(supernet)[-1]
        trainer = Trainer(supernet, settings, PIXELS)
        draw = draws_of(supernet, "archive")
        for seed, count in ((0, 16), (1, 5), (0, 16)):
            weights, examples = weights_of(supernet, seed), examples_of(supernet, count)
            used = trainer.train_supernet(weights, draw, examples, [0.02], np.random.default_rng(seed)).weights
            fresh = Trainer(supernet, settings, PIXELS).train_supernet(weights, draw, examples, [0.02], np.random.default_rng(seed)).weights
            assert all(torch.equal(used[name], fresh[name]) for name in weights)

    def test_a_fair_step_sums_the_gradients_of_all_its_subnets(self, supernet: Supernet[Any]) -> None:
        """By hand: one step without momentum or decay moves by the rate times the sum."""
        settings = replace(SLICED, momentum=0.0, weight_decay=0.0, label_smoothing=0.0)
        weights, examples = weights_of(supernet), examples_of(supernet, 8)
        trained = Trainer(supernet, settings, PIXELS).train_supernet(
            weights, supernet.space.fair, examples, [0.01], np.random.default_rng(3)
        )
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for architecture, times in trained.steps.items():
            leaves: dict[str, Tensor] = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
            logits = supernet.forward(PIXELS.normalise(examples.images), supernet.take(leaves, architecture), architecture)
            loss = F.cross_entropy(logits, examples.labels)
            for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), strict=True):
                total[name] += times * gradient
        largest = max(float(gradient.abs().max()) for gradient in total.values())
        for name, tensor in trained.weights.items():
            assert float((weights[name] - 0.01 * total[name] - tensor).abs().max()) < 0.01 * 0.01 * largest + 1e-6, name

    def test_the_first_subnet_of_a_taught_step_teaches_the_others(self, supernet: Supernet[Any]) -> None:
        """By hand: the first learns from the labels, the others from what it says, which counts half, and it does not learn from them."""
        named = supernet.space.named
        drawn = [named["medium"], named["smallest"], named["largest"]]
        weights, examples, rate = weights_of(supernet), examples_of(supernet, 8), 0.01
        precise = {name: tensor.double() for name, tensor in weights.items()}
        for settings in executions(supernet):
            plain = replace(settings, momentum=0.0, weight_decay=0.0)
            trainer = Trainer(supernet, plain, InPrecision(PIXELS.mean, PIXELS.std, torch.float64))
            trained = trainer.train_supernet(precise, in_turn(drawn), examples, [rate], np.random.default_rng(3), taught=0.5)
            order = np.random.default_rng(3).permutation(8)
            images, labels = PIXELS.normalise(examples.images[order]).double(), examples.labels[order]
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in precise.items()}
            first, *others = (supernet.forward(images, supernet.take(leaves, own), own) for own in drawn)
            soft = first.detach().softmax(1)
            loss = F.cross_entropy(first, labels, label_smoothing=plain.label_smoothing)
            loss = loss - 0.5 * sum((soft * own.log_softmax(1)).sum(1).mean() for own in others)
            found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), strict=True))
            largest = max(float(gradient.abs().max()) for gradient in found.values())
            for name, tensor in trained.weights.items():
                assert float((precise[name] - rate * found[name] - tensor).abs().max()) < 1e-6 * rate * largest, (settings.execution, name)
            assert trained.steps == Counter(drawn) and trained.macs == 8 * sum(supernet.space.cost(own).macs for own in drawn)

    def test_training_goes_on_with_its_momenta(self, supernet: Supernet[Any]) -> None:
        """Epoch by epoch with the momenta handed on is the same as at once; without them it is not."""
        weights, examples, draw = weights_of(supernet), examples_of(supernet, 16), draws_of(supernet, "archive")
        for settings in executions(supernet):
            trainer, turns = Trainer(supernet, settings, PIXELS), [np.random.default_rng(0) for _ in range(3)]
            whole = trainer.train_supernet(weights, draw, examples, [0.02, 0.01], turns[0]).weights
            first, again = (trainer.train_supernet(weights, draw, examples, [0.02], turn) for turn in turns[1:])
            second = trainer.train_supernet(first.weights, draw, examples, [0.01], turns[1], momenta=first.momenta).weights
            restarted = trainer.train_supernet(again.weights, draw, examples, [0.01], turns[2]).weights
            assert all(torch.equal(whole[name], second[name]) for name in weights)
            assert not all(torch.equal(whole[name], restarted[name]) for name in weights)

    def test_momentum_and_decay_rest_outside_a_fair_step(self, supernet: Supernet[Any]) -> None:
        """Only the union of the drawn regions moves, also when it is no rectangle."""
        smallest, drawn = supernet.space.named["smallest"], [supernet.space.sample(rng("one")), supernet.space.sample(rng("two"))]
        weights, examples = weights_of(supernet), examples_of(supernet, 16)
        for settings in executions(supernet):
            trainer = Trainer(supernet, settings, PIXELS)
            once = trainer.train_supernet(weights, in_turn(drawn), examples_of(supernet, 8), [0.02], np.random.default_rng(0))
            assert once.steps == Counter(drawn)
            both = trainer.train_supernet(weights, in_turn(drawn, [smallest, smallest]), examples, [0.02], np.random.default_rng(0))
            regions, counts = supernet.regions(smallest), supernet.coverage(once.steps)
            for name in weights:
                never = ~(mask(supernet.shapes[name], regions.get(name)) | (counts[name] > 0))
                assert torch.equal(both.weights[name][never], weights[name][never]), name

    @needs_masks
    def test_scoring(self, supernet: Supernet[Any]) -> None:
        weights, examples, train = weights_of(supernet), examples_of(supernet, 30), examples_of(supernet, 40, seed=1)
        draw = rng("scored")
        architectures = [*supernet.space.named.values(), *(supernet.space.sample(draw) for _ in range(5))]
        sliced, masked = (Scorer(supernet, s, PIXELS).score_subnets(weights, architectures, examples, train) for s in (SLICED, MASKED))
        assert [scored.architecture for scored in masked] == architectures
        for one, other in zip(sliced, masked, strict=True):
            assert other.score.loss == pytest.approx(one.score.loss, rel=1e-4)
            assert abs(other.score.accuracy - one.score.accuracy) <= 1 / 30  # an image on the edge may fall either way

    @needs_masks
    def test_scoring_in_pieces(self, supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Few architectures and few images at a time change nothing."""
        weights, examples, train = weights_of(supernet), examples_of(supernet, 30), examples_of(supernet, 40, seed=1)
        architectures = [*supernet.space.named.values()]
        scorer = Scorer(supernet, MASKED, PIXELS)
        whole = scorer.score_subnets(weights, architectures, examples, train)
        monkeypatch.setattr(scoring, "CHUNK", 7)
        monkeypatch.setattr(scoring, "MASKED_BYTES", 1)
        for one, other in zip(whole, scorer.score_subnets(weights, architectures, examples, train), strict=True):
            assert other.architecture == one.architecture
            assert other.score.loss == pytest.approx(one.score.loss, rel=1e-4)

    @needs_masks
    def test_scores_are_masked_where_many_small_networks_fit_at_once(self, supernet: Supernet[Any]) -> None:
        def masks(execution: str, images: int, device: str = "cuda") -> bool:
            scorer = Scorer(supernet, TrainingSettings(execution=execution), PIXELS)
            assert scorer.at_once(images) >= 1
            return scorer.masks(images, torch.device(device))

        assert masks("auto", 1) == (supernet.masks_pay and not supernet.in_groups)
        assert not masks("auto", 10**6) and not masks("auto", 1, "cpu")
        assert masks("masked", 10**6, "cpu") and not masks("sliced", 1)

    @torch.no_grad()
    def test_everything_agrees(self, supernet: Supernet[Any], count: int) -> None:
        draw, space = rng("many"), supernet.space
        weights, images, more = weights_of(supernet), images_of(supernet, 5), images_of(supernet, 6, seed=1)
        for start in range(0, count, 10):
            architectures = [space.sample(draw) for _ in range(min(10, count - start))]
            genes = torch.tensor([architecture.choices for architecture in architectures])
            both, calibrating = torch.cat([more, images]), Statistics(rows=len(more))
            masked = supernet.forward_many(both, weights, genes, calibrating)[:, len(more) :] if masks(supernet) else None
            for index, architecture in enumerate(architectures):
                space.check(architecture)
                assert space.decode(space.encode(architecture)) == architecture
                own = supernet.take(weights, architecture)
                statistics = measured(supernet, own, architecture, more)
                sliced = supernet.forward(images, own, architecture, statistics)
                network = supernet.extract(weights, architecture, statistics)
                torch.testing.assert_close(network(images), sliced, **CLOSE)
                if masked is not None:
                    torch.testing.assert_close(masked[index], sliced, **CLOSE)
                with FlopCounterMode(display=False) as counter:
                    network(images[:1])
                assert space.cost(architecture).macs == pytest.approx(counter.get_total_flops() / 2, rel=0.01)
