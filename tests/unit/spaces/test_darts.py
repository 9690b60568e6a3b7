"""The DARTS space: published numbers, cells and costs by hand, settings, drawing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.spaces.genotype import OPERATIONS
from fedloom.supernets.darts import DARTSSupernet
from fedloom.testing.nets import images_of
from support.darts import space_of, tiny_supernet, with_operations


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
    assert [(gene.stage, gene.place) for gene in (genes[0], genes[4], genes[27])] == [(1, 1), (1, 5), (2, 14)]
    assert all(gene.values == tuple(range(8)) for gene in genes)
    assert [gene.values for gene in space_of(operations="s2").genes] == [(0, 1)] * 28
    assert space_of(operations="s2").operations == ("skip_connect", "sep_conv_3x3")


def test_an_edge_is_followed_by_the_edges_from_its_node() -> None:
    # 0: input 0 → node 1, 4: node 1 → node 2, 13: node 3 → node 4, the last of a cell; 14 more are those of the other cell.
    followers = [[other for other in range(28) if space_of().follows[gene, other]] for gene in (0, 4, 13, 14, 18, 27)]
    assert followers == [[4, 7, 11], [8, 12], [], [18, 21, 25], [22, 26], []]


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
