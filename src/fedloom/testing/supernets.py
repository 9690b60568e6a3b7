"""What every supernet promises. Weights are randomised throughout, because some start at zero or at the identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.supernets.base import Supernet
from fedloom.supernets.normalisation import Statistics
from fedloom.testing.nets import CLOSE, images_of, mask, masks, measured, weights_of
from fedloom.testing.spaces import Given


def some(supernet: Supernet[Any], count: int = 4) -> list[Architecture]:
    draw = rng("some")
    return list(dict.fromkeys([*supernet.space.named.values(), *(supernet.space.sample(draw) for _ in range(count))]))


def positions(part: slice, size: int) -> set[int]:
    return set(range(*part.indices(size)))


class SupernetContract(Given):
    """How networks of a space compute with shared weights, sliced."""

    def test_initial_weights_follow_from_the_seed(self, supernet: Supernet[Any]) -> None:
        one, same, other = supernet.initial(1), supernet.initial(1), supernet.initial(2)
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert any(not torch.equal(one[name], other[name]) for name in one)
        assert {name: tuple(tensor.shape) for name, tensor in one.items()} == supernet.shapes
        assert all(tensor.dtype == torch.float32 for tensor in one.values())

    @torch.no_grad()
    def test_the_extracted_network_computes_what_the_supernet_computes(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 7)
        for architecture in some(supernet):
            own = supernet.take(weights, architecture)
            statistics = measured(supernet, own, architecture, images_of(supernet, 12, seed=1))
            expected = supernet.forward(images, own, architecture, statistics)
            network = supernet.extract(weights, architecture, statistics)
            assert not network.training
            torch.testing.assert_close(network(images), expected, **CLOSE)
            assert expected.shape == (7, supernet.space.image.classes)
            assert expected.std(0).min() > 1e-2  # images make a difference, so equality says something

    @torch.no_grad()
    def test_plain_weights_compute_what_taken_weights_compute(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 7)
        for architecture in some(supernet):
            plain = supernet.plain(weights, architecture)
            expected = supernet.forward(images, supernet.take(weights, architecture), architecture)
            torch.testing.assert_close(supernet.forward(images, plain, architecture), expected, **CLOSE)

    @torch.no_grad()
    def test_without_the_classifier_all_images_are_alike(self, supernet: Supernet[Any]) -> None:
        """``in_head`` names the layer that makes logits, in the supernet and in its plain networks, and not the whole network."""
        assert any(supernet.in_head(name) for name in supernet.shapes)
        weights = weights_of(supernet)
        for architecture in some(supernet, 1):
            plain = supernet.plain(weights, architecture)
            head, images = [name for name in plain if supernet.in_head(name)], images_of(supernet, 4)
            assert 0 < len(head) < len(plain), "say in_head: it finds the parameters of the classifier by their names"
            logits = supernet.forward(images, {name: tensor * (name not in head) for name, tensor in plain.items()}, architecture)
            assert (logits == logits[:1]).all() and (supernet.forward(images, plain, architecture) != logits).any()

    def test_different_architectures_compute_different_things(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 7)
        logits = [supernet.forward(images, supernet.take(weights, a), a) for a in some(supernet)]
        for index, one in enumerate(logits):
            assert all((one - other).abs().max() > 1e-2 for other in logits[:index])

    def test_plain_weights_have_the_names_and_shapes_of_the_network(self, supernet: Supernet[Any]) -> None:
        weights = weights_of(supernet)
        for architecture in some(supernet):
            parameters = {name: parameter.shape for name, parameter in supernet.network(architecture).named_parameters()}
            plain = supernet.plain(weights, architecture)
            assert {name: tensor.shape for name, tensor in plain.items()} == parameters
            before = {name: tensor.clone() for name, tensor in weights.items()}
            for tensor in plain.values():
                tensor.zero_()
            assert all(torch.equal(weights[name], before[name]) for name in weights)

    def test_taken_weights_are_views_of_exactly_the_regions(self, supernet: Supernet[Any]) -> None:
        for architecture in some(supernet):
            weights = {name: torch.zeros(shape) for name, shape in supernet.shapes.items()}
            regions = supernet.regions(architecture)
            taken = supernet.take(weights, architecture)
            assert set(taken) == set(regions) <= set(weights)
            for view in taken.values():
                view.fill_(1)
            for name, tensor in weights.items():
                assert torch.equal(tensor > 0, mask(supernet.shapes[name], regions.get(name)))

    @torch.no_grad()
    def test_nothing_outside_the_regions_is_read(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 7)
        for architecture in some(supernet):
            regions = supernet.regions(architecture)
            poisoned = {n: torch.where(mask(supernet.shapes[n], regions.get(n)), tensor, torch.nan) for n, tensor in weights.items()}
            expected = supernet.forward(images, supernet.take(weights, architecture), architecture)
            assert torch.equal(supernet.forward(images, supernet.take(poisoned, architecture), architecture), expected)
            assert all(torch.isfinite(tensor).all() for tensor in supernet.plain(poisoned, architecture).values())

    def test_gradients_reach_every_region_and_nothing_else(self, supernet: Supernet[Any]) -> None:
        images = images_of(supernet, 16)
        labels = torch.arange(16) % supernet.space.image.classes
        for architecture in [self.trainable(supernet.space, one) for one in some(supernet)]:
            weights = {name: tensor.requires_grad_() for name, tensor in weights_of(supernet).items()}
            own = supernet.take(weights, architecture)
            # With fixed statistics; those of the batch take a constant shift away again, and with it its gradient.
            logits = supernet.forward(images, own, architecture, measured(supernet, own, architecture, images))
            F.cross_entropy(logits, labels).backward()
            regions = supernet.regions(architecture)
            for name, tensor in weights.items():
                inside = mask(supernet.shapes[name], regions.get(name))
                if name not in regions:
                    assert tensor.grad is None or not tensor.grad.any(), name
                    continue
                assert tensor.grad is not None
                assert not tensor.grad[~inside].any(), name
                assert tensor.grad[inside].abs().max() > 0, name

    def test_regions_are_tight(self, supernet: Supernet[Any]) -> None:
        """A region holds no entry that its architecture cannot train: over a few weights every entry gets a gradient."""
        labels = torch.arange(16) % supernet.space.image.classes
        for architecture in (supernet.space.named["largest"], supernet.space.sample(rng("tight"))):
            taken = supernet.take(supernet.initial(0), architecture)
            idle = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in taken.items()}
            for seed in range(16):  # a rectifier that is dead under one seed's weights lives under another's
                images, own = images_of(supernet, 16, seed), supernet.take(weights_of(supernet, seed), architecture)
                leaves = {name: tensor.requires_grad_() for name, tensor in own.items()}
                loss = F.cross_entropy(
                    supernet.forward(images, leaves, architecture, measured(supernet, own, architecture, images)), labels
                )
                for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    idle[name] &= gradient == 0
                if not any(entries.any() for entries in idle.values()):
                    break
            assert [name for name, entries in idle.items() if entries.any()] == []

    def test_coverage_counts_the_steps_of_every_entry(self, supernet: Supernet[Any]) -> None:
        architectures = some(supernet)
        steps = {architecture: times for times, architecture in enumerate(architectures, 1)}
        counts, marks = supernet.coverage(steps), supernet.coverage(steps, counted=False)
        assert set(counts) == set(marks) == set(supernet.shapes)
        for name, shape in supernet.shapes.items():
            expected = torch.zeros(shape, dtype=torch.int64)
            for architecture, times in steps.items():
                expected += times * mask(shape, supernet.regions(architecture).get(name))
            assert counts[name].ndim == len(shape)
            assert torch.equal(counts[name].expand(shape).long(), expected), name
            assert torch.equal(marks[name], counts[name] > 0), name

    def test_no_steps_cover_nothing(self, supernet: Supernet[Any]) -> None:
        assert not any(count.any() for count in supernet.coverage({}).values())

    def test_compact_axes_are_those_that_everybody_uses_whole(self, supernet: Supernet[Any]) -> None:
        counts = supernet.coverage({})
        for architecture in some(supernet):
            for name, region in supernet.regions(architecture).items():
                for size, length, part in zip(supernet.shapes[name], counts[name].shape, region, strict=True):
                    assert length in (1, size)
                    assert length == size or positions(part, size) == set(range(size)), name

    def test_a_parameter_that_nobody_uses_is_named_and_not_waited_for(
        self, supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(supernet.__dict__, "elastic_axes", raising=False)
        monkeypatch.setitem(supernet.__dict__, "shapes", {"everybody's": (2,), "nobody's": (2,)})
        monkeypatch.setattr(supernet, "regions", lambda architecture: {"everybody's": (slice(1),)})
        monkeypatch.setattr(supernet.space, "sample", lambda draw: None)
        with pytest.raises(ValueError, match=r"no architecture uses \[\"nobody's\"\]"):
            supernet.coverage({})

    def test_every_entry_is_reached_by_some_architecture(self, supernet: Supernet[Any]) -> None:
        draw = rng("reach")
        counts = supernet.coverage(dict.fromkeys([*supernet.space.named.values(), *(supernet.space.sample(draw) for _ in range(60))], 1))
        assert all((count > 0).all() for count in counts.values())

    def test_the_parameters_of_the_network_are_those_counted(self, supernet: Supernet[Any]) -> None:
        for architecture in some(supernet, 20):
            network = supernet.network(architecture)
            assert supernet.space.cost(architecture).parameters == sum(parameter.numel() for parameter in network.parameters())

    def test_regions_are_nested(self, supernet: Supernet[Any]) -> None:
        """Along every axis one of two regions contains the other, and the smallest architecture's is contained in all."""
        architectures = some(supernet, 12)
        smallest = supernet.regions(supernet.space.named["smallest"])
        for first in architectures:
            for second in architectures:
                one, other = supernet.regions(first), supernet.regions(second)
                for name in set(one) & set(other):
                    for size, a, b in zip(supernet.shapes[name], one[name], other[name], strict=True):
                        inside, outside = sorted((positions(a, size), positions(b, size)), key=len)
                        assert inside <= outside, name
            for name, region in supernet.regions(first).items():
                if name in smallest:
                    assert not (mask(supernet.shapes[name], smallest[name]) & ~mask(supernet.shapes[name], region)).any(), name

    @torch.no_grad()
    def test_one_calibrated_pass_is_measuring_and_then_applying(self, supernet: Supernet[Any]) -> None:
        weights, rows = weights_of(supernet), 9
        images = torch.cat([images_of(supernet, rows, seed=1), 3 + 2 * images_of(supernet, 5, seed=2)])
        for architecture in some(supernet):
            own = supernet.take(weights, architecture)
            in_one = Statistics(rows=rows)
            logits = supernet.forward(images, own, architecture, in_one)
            stored = measured(supernet, own, architecture, images[:rows])
            assert set(in_one) == set(stored)
            for name in stored:
                torch.testing.assert_close(in_one[name], stored[name], **CLOSE)
            torch.testing.assert_close(logits, supernet.forward(images, own, architecture, stored), **CLOSE)

    @torch.no_grad()
    def test_statistics_make_images_independent_of_each_other(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 6)
        architecture = supernet.space.named["medium"]
        own = supernet.take(weights, architecture)
        stored = measured(supernet, own, architecture, images_of(supernet, 12, seed=1))
        one_by_one = torch.cat([supernet.forward(image[None], own, architecture, stored) for image in images])
        torch.testing.assert_close(one_by_one, supernet.forward(images, own, architecture, stored), **CLOSE)

    @torch.no_grad()
    def test_measured_statistics_are_those_of_training(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 12)
        architecture = supernet.space.named["medium"]
        own = supernet.take(weights, architecture)
        stored = measured(supernet, own, architecture, images)
        torch.testing.assert_close(
            supernet.forward(images, own, architecture, stored), supernet.forward(images, own, architecture), **CLOSE
        )

    def test_a_network_is_not_loaded_without_the_statistics_it_needs(self, supernet: Supernet[Any]) -> None:
        architecture = supernet.space.named["smallest"]
        plain = supernet.plain(weights_of(supernet), architecture)
        if any(name.endswith("running_mean") for name in supernet.network(architecture).state_dict()):
            with pytest.raises(RuntimeError, match="running_mean"):
                supernet.load(architecture, plain)
        else:
            assert not supernet.load(architecture, plain).training

    @torch.no_grad()
    def test_images_keep_their_size_unless_the_space_resizes_them(self, supernet: Supernet[Any]) -> None:
        """Networks without an input size of their own see images of any side as they are, in every execution."""
        weights, larger = weights_of(supernet), F.pad(images_of(supernet, 5), (2, 2, 2, 2), mode="replicate")
        for architecture in some(supernet, 1):
            own, size = supernet.take(weights, architecture), supernet.space.input_sizes([architecture.choices])[0]
            statistics = measured(supernet, own, architecture, larger)
            expected = supernet.forward(larger, own, architecture, statistics)
            torch.testing.assert_close(supernet.extract(weights, architecture, statistics)(larger), expected, **CLOSE)
            if masks(supernet):
                masked = supernet.forward_many(larger, weights, torch.tensor([architecture.choices]), Statistics(rows=len(larger)))
                torch.testing.assert_close(masked[0], expected, **CLOSE)
            seen = supernet.forward(F.interpolate(larger, size=supernet.space.image.size, mode="bicubic"), own, architecture, statistics)
            assert size or (seen - expected).abs().max() > 1e-3  # not resized behind our back
