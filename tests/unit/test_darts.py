"""The DARTS space and supernet against published numbers and a network written out with plain torch modules."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidArchitecture, InvalidConfig
from fedloom.core.seeds import rng
from fedloom.spaces.base import ImageShape
from fedloom.spaces.darts import DARTS, DARTSSettings, Part, operation_layers
from fedloom.spaces.genotype import EDGES, OPERATIONS, Genotype, derive
from fedloom.supernets.darts import DARTSSupernet, run_part
from fedloom.supernets.elastic import Statistics
from fedloom.supernets.foreign import PUBLIC
from nets import images_of, measured, weights_of

TINY = DARTSSettings.tiny()


def space_of(classes: int = 10, size: int = 32, colours: int = 3, base: DARTSSettings | None = None, **changes: Any) -> DARTS:
    return DARTS(replace(base or DARTSSettings(), **changes), ImageShape(colours, size, classes))


def tiny_supernet(size: int = 8, **changes: Any) -> DARTSSupernet:
    return DARTSSupernet(space_of(3, size, 1, TINY, **changes))


def with_operations(space: DARTS, normal: str, reduction: str) -> Architecture:
    return Architecture("darts", tuple(space.operations.index(name) for name in (normal, reduction) for _ in EDGES))


def one_hot(architecture: Architecture, operations: int = 8) -> Tensor:
    return F.one_hot(torch.tensor(architecture.choices), operations).float().reshape(2, 14, operations)


# -- counts ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("operations", "classes", "parameters"), [("full", 10, 1_930_618), ("full", 100, 1_953_748), ("s2", 10, 665_466), ("s2", 100, 688_596)]
)
def test_parameters_of_the_supernet(operations: str, classes: int, parameters: int) -> None:
    shapes = DARTSSupernet(space_of(classes, operations=operations)).shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


@pytest.mark.parametrize(("operations", "per_cell"), [("full", 8**14), ("s2", 2**14)])
def test_number_of_architectures(operations: str, per_cell: int) -> None:
    space = space_of(operations=operations)
    assert space.architectures == per_cell**2
    assert math.prod(int(size) for size in space.sizes[:14]) == math.prod(int(size) for size in space.sizes[14:]) == per_cell


def test_genes_by_hand() -> None:
    genes = space_of().genes
    assert len(genes) == 28
    assert genes[0].name == "operation of input 0 → node 1 in the normal cell"
    assert genes[4].name == "operation of node 1 → node 2 in the normal cell"
    assert genes[27].name == "operation of node 3 → node 4 in the reduction cell"
    assert all(gene.values == tuple(range(8)) for gene in genes)
    assert [gene.values for gene in space_of(operations="s2").genes] == [(0, 1)] * 28
    assert space_of(operations="s2").operations == ("skip_connect", "sep_conv_3x3")


def test_cells_by_hand() -> None:
    cells = space_of().cells
    assert [cell.kind for cell in cells] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert [cell.channels for cell in cells] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert [cell.size for cell in cells] == [32, 32, 32, 16, 16, 16, 8, 8]
    inputs = [tuple(part.layers[1].inputs for part in cell.inputs) for cell in cells]
    assert inputs == [(48, 48), (48, 64), (64, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 256)]
    assert [cell.name for cell in cells if cell.inputs[0].layers[1].kind == "halve"] == ["cell4", "cell7"]
    assert not any(cell.inputs[1].layers[1].kind == "halve" for cell in cells)


@pytest.mark.parametrize("cells", range(3, 13))
def test_every_number_of_cells_from_three_on(cells: int) -> None:
    supernet = tiny_supernet(cells=cells, channels=2, input_size=9)
    assert [cell.kind for cell in supernet.space.cells] == [int(i in (cells // 3, 2 * cells // 3)) for i in range(cells)]
    assert sum(cell.kind for cell in supernet.space.cells) == 2
    architecture = supernet.space.named["medium"]
    logits = supernet.forward(images_of(supernet, 3), supernet.take(supernet.initial(0), architecture), architecture)
    assert logits.shape == (3, 3) and logits.isfinite().all()


def test_smallest_has_no_parameters_on_its_edges_and_largest_the_most_on_all() -> None:
    space = space_of()
    fixed = sum(math.prod(shape) for name, shape in DARTSSupernet(space).shapes.items() if "_to_" not in name)
    none = with_operations(space, "none", "none")
    assert space.cost(space.named["smallest"]).parameters == space.cost(none).parameters == fixed == 99_450
    assert space.cost(space.named["largest"]).parameters == 767_866
    assert space.cost(space.named["darts_v2"]).parameters == 239_898
    for names in [(operation, operation) for operation in OPERATIONS]:
        assert space.cost(with_operations(space, *names)).parameters <= 767_866
    assert space.genotype(space.named["smallest"]).normal[:4] == (("skip_connect", 0), ("skip_connect", 1)) * 2
    two = space_of(operations="s2")
    assert two.named["smallest"].choices == (0,) * 28 and two.named["largest"].choices == (1,) * 28


@pytest.mark.parametrize("changes", [{}, {"input_size": 11, "cells": 4}, {"operations": "s2"}])
def test_multiply_accumulates_and_parameters_against_an_independent_counter(changes: dict[str, Any]) -> None:
    supernet = tiny_supernet(**changes)
    space, draw = supernet.space, rng("macs")
    for architecture in [*space.named.values(), *(space.sample(draw) for _ in range(30))]:
        network = supernet.network(architecture).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.zeros(1, 1, 8, 8))
        assert counter.get_total_flops() == 2 * space.cost(architecture).macs > 0
        assert sum(parameter.numel() for parameter in network.parameters()) == space.cost(architecture).parameters


@pytest.mark.parametrize("name", ["smallest", "medium", "largest", "darts_v2"])
def test_activations_are_what_the_backward_pass_keeps(name: str) -> None:
    supernet = DARTSSupernet(space_of(size=16))
    architecture, kept = supernet.space.named[name], {}
    network = supernet.network(architecture)
    weights = {parameter.data_ptr() for parameter in network.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr(), tensor.numel()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(torch.zeros(2, 3, 16, 16))
    numbers = sum(tensor.numel() * tensor.element_size() / 4 for tensor in kept.values()) / 2
    assert supernet.space.cost(architecture).activations == pytest.approx(numbers, rel=0.06)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"channels": 5}, "even"), ({"channels": 0}, "even"), ({"cells": 2}, "at least 3"), ({"operations": "s3"}, "full, s2")],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        space_of(**changes)


def test_a_drawing_shows_the_operations_that_are_there() -> None:
    space = space_of()
    normal, reduction = space.drawing(space.named["darts_v2"])
    assert (normal.title, reduction.title) == ("normal cell", "reduction cell")
    assert normal.nodes == ("input 0", "input 1", "node 1", "node 2", "node 3", "node 4", "output")
    assert len(normal.edges) == len(reduction.edges) == 8 + 4
    assert (2, 5, "dil_conv_3x3") in normal.edges and (5, 6, "") in normal.edges
    assert all(source < target for graph in (normal, reduction) for source, target, _ in graph.edges)
    assert len(space.drawing(with_operations(space, "none", "max_pool_3x3"))[0].edges) == 4


# -- genotypes ---------------------------------------------------------------
TEXT = (
    "Genotype(normal=[('sep_conv_3x3', 1), ('skip_connect', 0), ('sep_conv_5x5', 2), ('max_pool_3x3', 0), ('dil_conv_3x3', 3), "
    "('dil_conv_5x5', 1), ('avg_pool_3x3', 4), ('skip_connect', 2)], normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), "
    "('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 1), ('max_pool_3x3', 0), ('skip_connect', 2), ('skip_connect', 2), "
    "('max_pool_3x3', 1)], reduce_concat=range(2, 6))"
)


def test_the_text_of_a_genotype_round_trips() -> None:
    genotype = Genotype.parse(TEXT)
    assert str(genotype) == TEXT
    assert genotype.normal[2] == ("sep_conv_5x5", 2) and genotype.normal_concat == (2, 3, 4, 5)
    assert Genotype.parse(TEXT.replace("range(2, 6)", "[2, 3, 4, 5]")) == genotype
    assert Genotype.parse(f" {TEXT.replace(', ', ',  ')}\n") == genotype
    uneven = replace(genotype, reduce_concat=(2, 4, 5))
    assert str(uneven).endswith("reduce_concat=[2, 4, 5])") and Genotype.parse(str(uneven)) == uneven


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Genotype()",
        "Genotype(",
        TEXT[:-1],
        TEXT + ".normal",
        TEXT.replace("Genotype", "Phenotype"),
        TEXT.replace("normal=", "normal=list", 1),
        TEXT.replace("reduce=", "normal=", 1),
        TEXT.replace("reduce_concat=range(2, 6)", "reduce_concat=range(2, 10**9)"),
        TEXT.replace("reduce_concat=range(2, 6)", "reduce_concat=range(-999999999, 6)"),
        TEXT.replace("reduce_concat=range(2, 6)", "reduce_concat=print(2, 6)"),
        TEXT.replace("reduce_concat=range(2, 6)", "reduce_concat=['2']"),
        TEXT.replace("('skip_connect', 0)", "('skip_connect', 0, 1)", 1),
        TEXT.replace("('skip_connect', 0)", "(0, 'skip_connect')", 1),
        TEXT.replace("('skip_connect', 0)", "exit(3)", 1),
        "(" * 10_000,
    ],
)
def test_texts_that_are_no_genotype_are_refused(text: str) -> None:
    with pytest.raises(InvalidArchitecture, match="is not a genotype: write Genotype"):
        Genotype.parse(text)


def test_genotypes_and_architectures() -> None:
    space = space_of()
    genotype = Genotype.parse(TEXT)
    architecture = space.find(TEXT, rng(0))
    space.check(architecture)
    assert architecture == space.from_genotype(genotype)
    assert architecture.choices[:14] == (3, 4, 1, 0, 5, 0, 7, 0, 6, 0, 0, 3, 0, 2)
    back = space.genotype(architecture)
    assert back.normal == tuple(pair for node in range(4) for pair in sorted(genotype.normal[2 * node : 2 * node + 2], key=lambda p: p[1]))
    assert space.from_genotype(back) == architecture


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("('skip_connect', 0), ", "", "4 nodes of two edges each"),
        ("normal_concat=range(2, 6)", "normal_concat=range(3, 6)", "all of them its output"),
        ("('skip_connect', 0)", "('skip_connect', 1)", "two different earlier states"),
        ("('skip_connect', 0)", "('skip_connect', 2)", "two different earlier states"),
        ("('skip_connect', 0)", "('none', 0)", "two different earlier states, not by none"),
        ("('skip_connect', 0)", "('sep_conv_7x7', 0)", "no operation 'sep_conv_7x7'"),
    ],
)
def test_genotypes_outside_the_space_are_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(InvalidArchitecture, match=re.escape(words)):
        space_of().from_genotype(Genotype.parse(TEXT.replace(old, new, 1)))


def test_architectures_without_two_edges_per_node_have_no_genotype() -> None:
    space = space_of()
    with pytest.raises(InvalidArchitecture, match="node 2 of the normal cell has 3 edges"):
        space.genotype(space.named["largest"])
    with pytest.raises(InvalidArchitecture, match="node 1 of the reduction cell has 0 edges"):
        space.genotype(Architecture("darts", space.named["darts_v2"].choices[:14] + (0,) * 14))
    with pytest.raises(InvalidArchitecture, match="leaves edges out"):
        space_of(operations="s2").from_genotype(Genotype.parse(TEXT))


def test_derivation_by_hand() -> None:
    normal, reduction = np.full((14, 8), 0.1), np.full((14, 8), 0.1)
    normal[:, 0] = 9  # none never counts
    normal[0, 4], normal[1, 5] = 0.2, 0.3  # node 1: both edges, the stronger first
    normal[2, 1], normal[3, 2], normal[4, 3] = 0.4, 0.2, 0.3  # node 2: from states 0 and 2
    normal[8, 7], normal[8, 6] = 0.5, 0.5  # node 3: from state 3, the earlier of two equal operations; then the first of equals
    normal[13, 4], normal[9, 4] = 0.8, 0.9  # node 4: from states 0 and 4
    genotype = derive(normal, reduction)
    assert genotype.normal == (
        *(("sep_conv_5x5", 1), ("sep_conv_3x3", 0)),
        *(("max_pool_3x3", 0), ("skip_connect", 2)),
        *(("dil_conv_3x3", 3), ("max_pool_3x3", 0)),
        *(("sep_conv_3x3", 0), ("sep_conv_3x3", 4)),
    )
    assert genotype.reduce == (("max_pool_3x3", 0), ("max_pool_3x3", 1)) * 4
    assert genotype.normal_concat == genotype.reduce_concat == (2, 3, 4, 5)
    space = space_of()
    assert derive(*one_hot(space.from_genotype(genotype)).numpy()).operations == genotype.operations
    two = derive(np.eye(14, 2), np.eye(14, 2), ("skip_connect", "sep_conv_3x3"))
    assert two.normal[:2] == (("skip_connect", 0), ("sep_conv_3x3", 1))


@pytest.mark.parametrize("wrong", [np.zeros((14, 7)), np.zeros((13, 8)), np.zeros(8), np.full((14, 8), np.nan)])
def test_coefficients_of_another_shape_are_refused(wrong: np.ndarray) -> None:
    for pair in ((wrong, np.zeros((14, 8))), (np.zeros((14, 8)), wrong)):
        with pytest.raises(InvalidArchitecture, match=re.escape("finite and of shape (14, 8)")):
            derive(*pair)


# -- the published network, written out -----------------------------------------
class Sequence(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.op = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class Reduce(nn.Module):
    """Half of the channels from the even pixels, half from the odd ones; even sides only."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False) for _ in range(2))
        self.bn = nn.BatchNorm2d(outputs, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(min=0)
        return self.bn(torch.cat([self.conv_1(x), self.conv_2(x[:, :, 1:, 1:])], 1))


class Nothing(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


def published(operation: str, channels: int, stride: int) -> nn.Module:
    def separable(kernel: int, stride: int, dilation: int) -> list[nn.Module]:
        padding = dilation * (kernel - 1) // 2
        depth = nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False)
        return [nn.ReLU(), depth, nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels, affine=False)]

    kind, kernel = operation.split("_")[0], int(operation[-1]) if operation[-1].isdigit() else 0
    if kind == "none":
        return Nothing(stride)
    if kind == "skip":
        return nn.Identity() if stride == 1 else Reduce(channels, channels)
    if kind in ("max", "avg"):
        pool = nn.MaxPool2d(3, stride, 1) if kind == "max" else nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        return nn.Sequential(pool, nn.BatchNorm2d(channels, affine=False))
    return Sequence(*separable(kernel, stride, 1), *separable(kernel, 1, 1)) if kind == "sep" else Sequence(*separable(kernel, stride, 2))


class Edge(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self._ops = nn.ModuleList(published(operation, channels, stride) for operation in OPERATIONS)

    def forward(self, x: Tensor, coefficients: Tensor) -> Tensor:
        return torch.stack([c * operation(x) for c, operation in zip(coefficients, self._ops, strict=True)]).sum(0)


class PublishedCell(nn.Module):
    def __init__(self, before: int, last: int, channels: int, reduces: bool, reduced: bool) -> None:
        super().__init__()

        def narrow(inputs: int) -> nn.Module:
            return Sequence(nn.ReLU(), nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels, affine=False))

        self.preprocess0 = Reduce(before, channels) if reduced else narrow(before)
        self.preprocess1 = narrow(last)
        self._ops = nn.ModuleList(Edge(channels, 2 if reduces and source < 2 else 1) for source, _ in EDGES)

    def forward(self, before: Tensor, last: Tensor, coefficients: Tensor) -> Tensor:
        states = [self.preprocess0(before), self.preprocess1(last)]
        edge = 0
        for _ in range(4):
            incoming = range(edge, edge + len(states))
            states.append(torch.stack([self._ops[number](states[number - edge], coefficients[number]) for number in incoming]).sum(0))
            edge = incoming.stop
        return torch.cat(states[2:], 1)


class PublishedNetwork(nn.Module):
    """The search network; its state dict has the keys of the public implementation."""

    def __init__(self, channels: int, cells: int, images: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(images, 3 * channels, 3, padding=1, bias=False), nn.BatchNorm2d(3 * channels))
        before = last = 3 * channels
        self.kinds = [int(index in (cells // 3, 2 * cells // 3)) for index in range(cells)]
        self.cells = nn.ModuleList()
        for index, kind in enumerate(self.kinds):
            channels *= 1 + kind
            self.cells.append(PublishedCell(before, last, channels, bool(kind), index > 0 and bool(self.kinds[index - 1])))
            before, last = last, 4 * channels
        self.classifier = nn.Linear(last, classes)

    def forward(self, images: Tensor, coefficients: Tensor) -> Tensor:
        before = last = self.stem(images)
        for kind, cell in zip(self.kinds, self.cells, strict=True):
            before, last = last, cell(before, last, coefficients[kind])
        return self.classifier(last.mean((2, 3)))


def random_state(network: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = network.state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(1, tensor[0].numel()) ** 0.5)
            if name.endswith("running_var"):
                tensor.abs_().add_(0.5)
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize(("cells", "size"), [(3, 8), (5, 12)])
@torch.no_grad()
def test_foreign_weights_give_the_logits_of_the_published_network(cells: int, size: int) -> None:
    supernet = DARTSSupernet(space_of(3, size, 1, DARTSSettings(channels=4, cells=cells)))
    network = PublishedNetwork(4, cells, 1, 3)
    state, table = random_state(network), PUBLIC["darts"].table(supernet)
    assert len(set(table.values())) == len(table)
    assert all(re.search(PUBLIC["darts"].expected_leftovers(supernet), key) for key in set(state) - set(table.values()))
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
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
            mixed = supernet.mixture(images, weights, one_hot(architecture), statistics)
            torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=2e-4)
            torch.testing.assert_close(supernet.mixture(images, weights, soft, statistics), network(images, soft), rtol=1e-4, atol=2e-4)


def test_the_public_network_in_numbers() -> None:
    supernet = DARTSSupernet(space_of(base=PUBLIC["darts"].settings))
    table = PUBLIC["darts"].table(supernet)
    assert len(table) == len(supernet.shapes) + 2 * 929
    assert table["cell3.input0_to_node1.skip_connect.halve.odd.weight"] == "cells.2._ops.0._ops.3.conv_2.weight"
    assert table["cell1.node3_to_node4.max_pool_3x3.norm.running_var"] == "cells.0._ops.13._ops.1.1.running_var"
    assert table["cell4.input0.halve.even.weight"] == "cells.3.preprocess0.conv_1.weight"
    two = PUBLIC["darts"].table(DARTSSupernet(space_of(operations="s2")))
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


# -- executions --------------------------------------------------------------
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


def test_masked_gradients_are_those_of_the_sliced_network() -> None:
    """In float64: in float32 a rectifier close to zero may open in one execution and not in the other."""
    supernet, draw = tiny_supernet(), rng("gradients")
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights_of(supernet).items()}
    images = images_of(supernet, 9).double()
    architectures = [with_operations(supernet.space, "none", "skip_connect"), *(supernet.space.sample(draw) for _ in range(4))]
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
        torch.testing.assert_close(masked, logits, rtol=1e-3, atol=1e-3)
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
