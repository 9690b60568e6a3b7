"""The DARTS supernet against the published network, and its three executions."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.spaces.darts import DARTSSettings, Part, operation_layers
from fedloom.spaces.genotype import EDGES, OPERATIONS
from fedloom.supernets import darts_many
from fedloom.supernets.darts import DARTSSupernet, run_part
from fedloom.supernets.darts_many import Plan
from fedloom.supernets.foreign import PUBLIC
from fedloom.supernets.normalisation import Statistics
from fedloom.testing.nets import images_of, measured, weights_of
from support.darts import PublishedNetwork, Reduce, one_hot, published, random_state, space_of, tiny_supernet, with_operations


@pytest.mark.parametrize(("cells", "size"), [(3, 8), (5, 12)])
@torch.no_grad()
def test_foreign_weights_give_the_logits_of_the_published_network(cells: int, size: int) -> None:
    supernet = DARTSSupernet(space_of(3, size, 1, DARTSSettings(channels=4, cells=cells)))
    network = PublishedNetwork(4, cells, 1, 3)
    state, table = random_state(network), PUBLIC["darts"].make.table(supernet)
    assert len(set(table.values())) == len(table)
    assert all(re.search(PUBLIC["darts"].make.expected_leftovers(supernet), key) for key in set(state) - set(table.values()))
    assert set(table.values()) <= set(state)
    weights = {name: state[table[name]] for name in supernet.shapes}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == supernet.shapes
    norms = [name.removesuffix(".running_mean") for name in table if name.endswith(".running_mean")]
    stored = Statistics({n: (state[table[f"{n}.running_mean"]], state[table[f"{n}.running_var"]]) for n in norms})
    draw, generator = rng("published"), torch.Generator().manual_seed(1)
    empty = Architecture("darts", (0, 0, *supernet.space.named["largest"].choices[2:]))  # the first node of normal cells gets nothing
    for architecture in [empty, *(supernet.space.sample(draw) for _ in range(4))]:
        images = torch.randn(6, 1, size, size, generator=generator)
        soft = torch.randn(2, 14, 8, generator=generator).softmax(-1)
        for statistics in (stored, None):
            network.load_state_dict(state)
            network.train(statistics is None)
            expected = network(images, one_hot(architecture))
            own = None if statistics is None else supernet.take_statistics(stored, architecture)
            logits = supernet.forward(images, supernet.take(weights, architecture), architecture, own)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            mixed = supernet.mixture(images, weights, one_hot(architecture), statistics)
            torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(supernet.mixture(images, weights, soft, statistics), network(images, soft), rtol=1e-4, atol=1e-4)


def test_the_public_network_in_numbers() -> None:
    supernet = DARTSSupernet(space_of(base=PUBLIC["darts"].make.settings))
    table = PUBLIC["darts"].make.table(supernet)
    assert len(table) == len(supernet.shapes) + 2 * 929
    assert table["cell3.input0_to_node1.skip_connect.halve.odd.weight"] == "cells.2._ops.0._ops.3.conv_2.weight"
    assert table["cell1.node3_to_node4.max_pool_3x3.norm.running_var"] == "cells.0._ops.13._ops.1.1.running_var"
    assert table["cell4.input0.halve.even.weight"] == "cells.3.preprocess0.conv_1.weight"
    two = PUBLIC["darts"].make.table(DARTSSupernet(space_of(operations="s2")))
    assert two.items() <= table.items() and len(two) < len(table)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("operation", OPERATIONS[1:])
@torch.no_grad()
def test_every_operation_is_the_published_one(operation: str, stride: int) -> None:
    """Also on a map of odd side, for which the published halving layer has no answer."""
    part = Part("here", operation_layers(operation, 4, stride), 6)
    module = published(operation, 4, stride).train()
    weights = dict(zip(part.shapes, module.parameters(), strict=True))
    for side in (6, 5):
        x = torch.randn(3, 4, side, side, generator=torch.Generator().manual_seed(side))
        made = run_part(part, x, weights, None)
        assert made.shape == (3, 4, *[-(-side // stride)] * 2)
        if isinstance(module, Reduce):
            x = F.pad(x, (0, side % 2, 0, side % 2))
        torch.testing.assert_close(made, module(x), rtol=1e-5, atol=1e-5)


def test_fresh_weights_are_drawn_as_torch_draws_them() -> None:
    weights = DARTSSupernet(space_of()).initial(0)
    for name, bound in {
        "cell1.input0_to_node1.sep_conv_5x5.depth2.weight": 1 / 5,
        "cell8.input1.conv.weight": 1 / 16,
        "classifier.weight": 1 / 16,
        "classifier.bias": 1 / 16,
    }.items():
        assert 0.7 * bound < weights[name].abs().max() <= bound
        assert float(weights[name].std()) == pytest.approx(bound / math.sqrt(3), rel=0.1 if weights[name].numel() > 100 else 0.5)
    assert (weights["stem.norm.weight"] == 1).all() and (weights["stem.norm.bias"] == 0).all()
    assert [name for name in weights if name.endswith(("norm.weight", "norm.bias"))] == ["stem.norm.weight", "stem.norm.bias"]


def test_regions_and_statistics_by_hand() -> None:
    supernet = tiny_supernet()
    architecture = with_operations(supernet.space, "dil_conv_3x3", "max_pool_3x3")
    regions = supernet.regions(architecture)
    assert all(part == slice(None) for region in regions.values() for part in region)
    edges = [name for name in regions if "_to_" in name]
    assert len(edges) == 14 * 2 and all(name.startswith("cell1.") and ".dil_conv_3x3." in name for name in edges)
    everything = Statistics({norm: (torch.zeros(1), torch.ones(1)) for part in supernet.space.parts() for norm in part.norms})
    taken = supernet.take_statistics(everything, architecture)
    assert len(taken) == 1 + 3 * 2 + 3 * 14  # stem, pre-processing, one per edge
    assert set(measured(supernet, supernet.initial(0), architecture, images_of(supernet, 4))) == set(taken)


@torch.no_grad()
def test_a_mixture_of_one_is_the_sliced_network() -> None:
    supernet = tiny_supernet()
    weights, images, draw = weights_of(supernet), images_of(supernet, 9), rng("one")
    for architecture in [*supernet.space.named.values(), *(supernet.space.sample(draw) for _ in range(8))]:
        own = supernet.take(weights, architecture)
        for rows in (0, 6):
            statistics = [Statistics(rows=rows) if rows else None for _ in range(2)]
            mixed = supernet.mixture(images, weights, one_hot(architecture), statistics[0])
            torch.testing.assert_close(mixed, supernet.forward(images, own, architecture, statistics[1]), rtol=1e-5, atol=1e-5)


def test_coefficients_get_the_gradient_of_finite_differences() -> None:
    supernet = tiny_supernet()
    weights = {name: tensor.double() for name, tensor in weights_of(supernet).items()}
    images = images_of(supernet, 4).double()
    coefficients = torch.rand(2, 14, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    supernet.mixture(images, weights, coefficients).square().sum().backward()
    gradient = coefficients.grad
    assert gradient is not None and not gradient[:, :, 0].any()  # none adds nothing, whatever its coefficient
    assert (gradient[:, :, 1:] != 0).all()
    for place in ((0, 5, 4), (1, 0, 3)):
        step = torch.zeros_like(coefficients)
        step[place] = 1e-6
        with torch.no_grad():
            up, down = (supernet.mixture(images, weights, coefficients + sign * step).square().sum() for sign in (1, -1))
        assert float(gradient[place]) == pytest.approx(float(up - down) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("operations", ["full", "s2", "s2n"])
def test_masked_gradients_are_those_of_the_sliced_network(operations: str) -> None:
    """In float64: in float32 a rectifier close to zero may open in one execution and not in the other."""
    supernet, draw = tiny_supernet(operations=operations), rng("gradients")
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights_of(supernet).items()}
    images = images_of(supernet, 9).double()
    first = with_operations(supernet.space, supernet.space.operations[0], "skip_connect")
    architectures = [first, *(supernet.space.sample(draw) for _ in range(4))]
    pull = torch.randn(len(architectures), 9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masked = supernet.forward_many(images, leaves, torch.tensor([architecture.choices for architecture in architectures]))
    sliced = torch.stack([supernet.forward(images, supernet.take(leaves, one), one) for one in architectures])
    torch.testing.assert_close(masked, sliced, rtol=1e-10, atol=1e-10)
    both = [torch.autograd.grad((logits * pull).sum(), list(leaves.values()), materialize_grads=True) for logits in (masked, sliced)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_spider_adds_both_operations_up() -> None:
    """Mushtaq et al.: every coefficient is one until an operation is removed, then zero."""
    supernet = tiny_supernet(operations="s2")
    space, weights, images = supernet.space, weights_of(supernet), images_of(supernet, 5)
    ones = torch.ones(2, 14, 2)
    x = F.interpolate(images, size=(18, 18), mode="bicubic", align_corners=False)
    before = last = run_part(space.stem, x, weights, None)
    for cell in space.cells:
        states = [run_part(part, x, weights, None) for part, x in zip(cell.inputs, (before, last), strict=True)]
        for node in range(2, 6):
            edges = [(number, source) for number, (source, target) in enumerate(EDGES) if target == node]
            terms = [run_part(part, states[source], weights, None) for number, source in edges for part in cell.operations[number].values()]
            states.append(torch.stack(terms).sum(0))
        before, last = last, torch.cat(states[2:], 1)
    expected = F.linear(last.mean((2, 3)), weights["classifier.weight"], weights["classifier.bias"])
    torch.testing.assert_close(supernet.mixture(images, weights, ones), expected, rtol=1e-4, atol=1e-4)
    architecture = space.sample(rng("spider"))
    selected = supernet.forward(images, supernet.take(weights, architecture), architecture)
    torch.testing.assert_close(supernet.mixture(images, weights, one_hot(architecture, 2)), selected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [5, 7, 9, 12, 13])
@torch.no_grad()
def test_images_of_any_side(size: int) -> None:
    supernet = tiny_supernet(size, input_size=0)
    weights, images = weights_of(supernet), images_of(supernet, 6)
    draw = rng("odd")
    architectures = [with_operations(supernet.space, "skip_connect", "skip_connect"), *(supernet.space.sample(draw) for _ in range(3))]
    many = supernet.forward_many(images, weights, torch.tensor([architecture.choices for architecture in architectures]))
    for architecture, masked in zip(architectures, many, strict=True):
        own = supernet.take(weights, architecture)
        logits = supernet.forward(images, own, architecture)
        torch.testing.assert_close(masked, logits, rtol=1e-4, atol=1e-4)
        stored = measured(supernet, own, architecture, images)
        network = supernet.extract(weights, architecture, stored)
        torch.testing.assert_close(network(images), supernet.forward(images, own, architecture, stored), rtol=1e-4, atol=1e-4)


def test_a_network_without_any_operation_says_the_same_of_every_image() -> None:
    supernet = tiny_supernet()
    weights, images = weights_of(supernet), images_of(supernet, 6)
    leaves = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    architecture = with_operations(supernet.space, "none", "none")
    expected = leaves["classifier.bias"].expand(6, 3)
    statistics = Statistics(rows=6)
    made = {
        "sliced": supernet.forward(images, supernet.take(leaves, architecture), architecture),
        "masked": supernet.forward_many(images, leaves, torch.tensor([architecture.choices]))[0],
        "many": supernet.forward_many(images, leaves, torch.tensor([architecture.choices] * 2))[1],
        "mixture": supernet.mixture(images, leaves, one_hot(architecture)),
        "calibrated": supernet.forward(images, supernet.take(leaves, architecture), architecture, statistics),
        "extracted": supernet.extract(supernet.take(leaves, architecture), architecture, statistics)(images),
    }
    for name, logits in made.items():
        assert torch.equal(logits, expected), name
    for name in ("sliced", "masked", "many", "mixture"):
        gradients = torch.autograd.grad(made[name].square().sum(), list(leaves.values()), materialize_grads=True)
        moved = [parameter for parameter, gradient in zip(leaves, gradients, strict=True) if gradient.any()]
        assert moved == ["classifier.bias"], name


def test_an_empty_node_is_zero_and_the_rest_works() -> None:
    supernet = tiny_supernet()
    choices = np.array(supernet.space.named["largest"].choices)
    choices[[0, 1, 14, 15]] = 0  # node 1 of both cells
    architecture = Architecture("darts", tuple(int(choice) for choice in choices))
    weights, images = weights_of(supernet), images_of(supernet, 6)
    logits = supernet.forward(images, supernet.take(weights, architecture), architecture)
    torch.testing.assert_close(supernet.mixture(images, weights, one_hot(architecture)), logits, rtol=1e-4, atol=1e-4)
    assert logits.isfinite().all() and logits.std(0).min() > 1e-2


@torch.no_grad()
def test_what_is_not_chosen_may_be_no_number() -> None:
    supernet = tiny_supernet()
    images, draw = images_of(supernet, 6), rng("nan")
    for architecture in [supernet.space.sample(draw) for _ in range(3)]:
        regions = supernet.regions(architecture)
        weights = weights_of(supernet)
        poisoned = {name: tensor if name in regions else torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
        genes = torch.tensor([architecture.choices] * 2)
        assert torch.equal(supernet.forward_many(images, poisoned, genes), supernet.forward_many(images, weights, genes))


# -- many at once --------------------------------------------------------------------------------------------------------
def changed(architecture: Architecture, **operations: int) -> Architecture:
    """With other choices of genes: g0=4, …"""
    choices = list(architecture.choices)
    for gene, choice in operations.items():
        choices[int(gene[1:])] = choice
    return Architecture("darts", tuple(choices))


@torch.no_grad()
@pytest.mark.parametrize("call", [4e9, 1])
@pytest.mark.parametrize("operations", ["full", "s2", "s2n"])
def test_many_networks_at_once(operations: str, call: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three clients, of whom one asks for nothing; with empty nodes, with nothing at all, the same twice; images in two parts."""
    monkeypatch.setattr(darts_many, "CALL_BYTES", call)
    supernet, draw = tiny_supernet(operations=operations), rng("many")
    space, rows = supernet.space, 5
    first = space.operations[0]
    architectures = [with_operations(space, first, first), with_operations(space, first, "skip_connect")]
    architectures += [*space.named.values(), *(space.sample(draw) for _ in range(3))]
    architectures.append(changed(architectures[-1], g0=0, g1=0, g14=0, g15=0))
    subnets = [(client, architecture) for client in (0, 2) for architecture in [*architectures, architectures[2]]]
    images = torch.stack([images_of(supernet, 9, seed=seed) for seed in range(3)])
    clients = [weights_of(supernet, seed=seed) for seed in range(3)]
    for several in (clients, clients[:1]):
        walk = supernet.many(subnets, {name: torch.stack([own[name] for own in several]) for name in supernet.shapes})
        found = torch.cat([walk.run(images[:, :7], rows), walk.run(images[:, 7:], 0)], 1)
        for (client, architecture), logits in zip(subnets, found, strict=True):
            own = supernet.take(several[client % len(several)], architecture)
            expected = supernet.forward(images[client], own, architecture, Statistics(rows=rows))
            assert float((logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@torch.no_grad()
def test_many_in_half_precision() -> None:
    supernet = tiny_supernet()
    subnets = [(0, supernet.space.named["medium"]), (0, supernet.space.named["smallest"])]
    weights, images = weights_of(supernet), images_of(supernet, 12)
    whole, half = (
        supernet.many(subnets, {name: tensor[None].to(kind) for name, tensor in weights.items()}).run(images[None].to(kind), 12)
        for kind in (torch.float32, torch.bfloat16)
    )
    assert half.dtype == torch.bfloat16
    assert float((half.float() - whole).abs().max()) <= 0.1 * float(whole.abs().max())


def test_what_many_have_in_common_by_hand() -> None:
    space = tiny_supernet().space  # a normal cell and two reduction cells
    conv = space.operations.index("sep_conv_3x3")
    one = with_operations(space, "sep_conv_3x3", "sep_conv_3x3")

    def rows(*architectures: Architecture, clients: int = 1) -> list[list[int]]:
        """Rows of each cell: its inputs, the calls on its levels, its outputs."""
        plan = Plan(space, [(client, architecture) for client in range(clients) for architecture in architectures])
        return [[len(cell.clients[1]), *(len(call.source) for call in cell.calls), len(cell.outputs)] for cell in plan.cells]

    alone = [[1, 8, 3, 2, 1, 1]] * 3
    assert rows(one) == rows(one, one, one) == alone
    assert rows(one, clients=2) == [[2 * count for count in cell] for cell in alone]
    # another operation on the last edge of reduction cells: the normal cell runs once, and all but that edge of the first reduction cell
    other = changed(one, g27=conv + 1)
    assert rows(one, other) == [[1, 8, 3, 2, 1, 1], [1, 8, 3, 2, 2, 2], [2, 12, 6, 4, 2, 2]]
    # on an edge from an input of the normal cell to its last node
    assert rows(one, changed(one, g9=conv + 1))[0] == [1, 9, 3, 2, 1, 2]
    # an identity is no call, and nothing depends on what is not there
    assert rows(changed(one, g0=3, g1=0))[0] == [1, 6, 3, 2, 1, 1]
    assert rows(with_operations(space, "none", "none")) == [[1, 1]] * 3
    # pools have no weights: all edges that leave a state have the same
    assert rows(with_operations(space, "avg_pool_3x3", "max_pool_3x3")) == [[1, 2, 1, 1, 1, 1]] * 3
    macs = [Plan(space, [(0, architecture) for architecture in some]).macs for some in ([one], [other], [one, one], [one, other])]
    assert macs[:2] == [space.cost(one).macs, space.cost(other).macs]
    assert macs[2] == macs[0] + space.features * space.image.classes and macs[0] < macs[3] < macs[0] + macs[1]
    assert Plan(space, [(0, one)]).calls == 1 + 3 * (2 + 4)


def test_what_many_hold_grows_with_what_they_do_not_share() -> None:
    space, draw = tiny_supernet().space, rng("held")
    architectures = [space.sample(draw) for _ in range(6)]
    held = [
        Plan(space, [(0, architecture) for architecture in some]).held for some in (architectures[:1], architectures[:1] * 6, architectures)
    ]
    assert held[0] == held[1] < held[2] < 6 * held[0] * 1.5


@torch.no_grad()
def test_of_many_weights_that_nobody_chose_may_be_no_numbers() -> None:
    supernet, draw = tiny_supernet(), rng("nan")
    architectures = [supernet.space.sample(draw) for _ in range(2)]
    regions = {name for architecture in architectures for name in supernet.regions(architecture)}
    weights, images = weights_of(supernet), images_of(supernet, 6)[None]
    poisoned = {name: tensor if name in regions else torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    found = [
        supernet.many([(0, one) for one in architectures], {k: v[None] for k, v in own.items()}).run(images, 4)
        for own in (weights, poisoned)
    ]
    assert torch.equal(*found)
