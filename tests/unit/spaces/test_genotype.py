"""Genotypes: their text, their architectures, and how coefficients become one."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidArchitecture
from fedloom.core.seeds import rng
from fedloom.spaces.genotype import Genotype, derive
from support.darts import one_hot, space_of

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
