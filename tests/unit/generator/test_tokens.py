"""Architectures as tables of genes and symbols."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.generator.tokens import Tokens
from fedloom.spaces.base import SearchSpace
from support.generator import Toy, tiny_space, tiny_spaces

SPACES = dict(tiny_spaces())


@pytest.fixture(params=SPACES.values(), ids=SPACES.keys(), scope="module")
def space(request: pytest.FixtureRequest) -> SearchSpace:
    return request.param


# -- by hand ----------------------------------------------------------------------------
def test_rows_are_the_genes_that_decide_something() -> None:
    tokens = Tokens(Toy(2, 1, 3, 2))
    assert tokens.genes.tolist() == [0, 2, 3] and len(tokens) == 3
    assert tokens.symbols == 4  # three choices and "absent"
    assert tokens.may_be_absent.tolist() == [False, True, True]
    assert tokens.mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 1]]
    assert tokens.choice_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]


def test_without_absent_genes_there_is_no_symbol_for_them() -> None:
    tokens = Tokens(Toy(3))
    assert tokens.symbols == 3 and tokens.mask.all() and tokens.mask.shape == (1, 3)


def test_rows_at_one_place_share_a_token() -> None:
    tokens = Tokens(Toy(2, 1, 3, 2))
    assert tokens.places == [(1, 0), (1, 1), (1, 1)]
    assert tokens.blocks == [(1, 0), (1, 1)]
    assert tokens.slots.tolist() == [[0, 3], [1, 2]]  # 3: no row
    assert tokens.follows.int().tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 0]]


def test_genes_without_effect_are_absent() -> None:
    tokens = Tokens(Toy(2, 1, 3, 2))
    symbols = tokens.encode(np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 2, 1]]))
    assert symbols.tolist() == [[0, 3, 3], [1, 0, 0], [1, 2, 1]]


def test_shares_are_certain() -> None:
    tokens = Tokens(Toy(2, 1, 3, 2))
    shares = tokens.shares(torch.tensor([[0, 3, 3], [1, 2, 1]]))
    assert shares.tolist() == [[[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]], [[0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]]
    assert shares.dtype == torch.float32


def test_the_same_random_architectures_every_time(space: SearchSpace) -> None:
    one, other = Tokens(space), Tokens(space)
    assert one.random is one.random and torch.equal(one.random, other.random)
    assert one.random.shape == (256, *one.mask.shape) and torch.equal(one.random.sum(-1), torch.ones(256, len(one)))
    assert not one.random[:, ~one.mask].any()
    choices = one.decode(one.random)  # and back: nothing but architectures of the space, as it draws them
    assert torch.equal(one.shares(one.encode(choices)), one.random) and len(np.unique(choices, axis=0)) >= min(200, space.architectures)


def test_tables_hold_plus_and_minus_one_and_nothing_where_a_row_has_no_symbol() -> None:
    tokens = Tokens(Toy(2, 1, 3, 2))
    table = tokens.one_hot(torch.tensor([[0, 3, 3], [1, 2, 1]]))
    assert table.tolist() == [
        [[1, -1, 0, 0], [-1, -1, -1, 1], [-1, -1, 0, 1]],
        [[-1, 1, 0, 0], [-1, -1, 1, -1], [-1, 1, 0, -1]],
    ]


def test_the_likeliest_choice_wins_and_is_lost_again_without_effect() -> None:
    tokens = Tokens(Toy(2, 1, 3, 2))
    present = [[0, 1, 9, 9], [-3, -2, -1, 9], [5, 4, 9, 9]]  # 9: symbols that are no choices, or "absent" where the switch is on
    absent = [[1, 0, 9, 9], [-3, -2, -1, 9], [4, 5, 9, 9]]
    assert tokens.decode(torch.tensor([present, absent]).float()).tolist() == [[1, 0, 2, 0], [0, 0, 0, 0]]


def test_the_mobilenetv3_table() -> None:
    tokens = Tokens(tiny_space("mobilenetv3"))
    assert len(tokens) == 45 and tokens.symbols == 4 and tokens.slots.shape == (25, 2)
    assert tokens.may_be_absent.sum() == 20  # kernel and expansion of blocks 3 and 4 of five stages
    kernel, expansion = tokens.slots[tokens.blocks.index((2, 3))].tolist()
    assert [tokens.space.genes[row].name for row in (kernel, expansion)] == [
        "kernel of block 3 of stage 2",
        "expansion of block 3 of stage 2",
    ]
    smallest = tokens.encode(np.array([tokens.space.named["smallest"].choices]))[0]
    assert [int(smallest[row]) for row in range(20)] == [0, 0, 3, 3] * 5


# -- every space ------------------------------------------------------------------------
def test_architectures_come_back(space: SearchSpace) -> None:
    tokens = Tokens(space)
    choices = np.concatenate([space.sample_many(rng("tokens"), 300), [named.choices for named in space.named.values()]])
    table = tokens.one_hot(tokens.encode(choices))
    assert table.shape == (len(choices), len(tokens), tokens.symbols)
    assert np.array_equal(tokens.decode(table), choices)
    noisy = table + torch.from_numpy(rng("noise").uniform(-0.99, 0.99, table.shape))
    assert np.array_equal(tokens.decode(noisy), choices)


def test_every_row_of_a_table_has_one_symbol_of_its_own(space: SearchSpace) -> None:
    tokens = Tokens(space)
    symbols = tokens.encode(space.sample_many(rng("symbols"), 2000))
    table = tokens.one_hot(symbols)
    assert (table.eq(1).sum(-1) == 1).all() and table[:, ~tokens.mask].eq(0).all() and table[:, tokens.mask].abs().eq(1).all()
    assert table.eq(1).any(0).equal(tokens.mask)  # and every symbol occurs


def test_slots_hold_every_row_once(space: SearchSpace) -> None:
    tokens = Tokens(space)
    rows = tokens.slots.flatten()
    assert rows[rows < len(tokens)].sort().values.tolist() == list(range(len(tokens)))
    for block, members in zip(tokens.blocks, tokens.slots.tolist(), strict=True):
        assert {tokens.places[row] for row in members if row < len(tokens)} == {block}


def test_architectures_are_those_of_the_space(space: SearchSpace) -> None:
    tokens = Tokens(space)
    choices = space.sample_many(rng("list"), 5)
    architectures = tokens.architectures(choices)
    assert architectures == [Architecture(space.name, tuple(int(choice) for choice in row)) for row in choices]
    assert all(type(choice) is int for choice in architectures[0].choices)


def test_a_signature_tells_variants_apart() -> None:
    signatures = [Tokens(space).signature for space in (tiny_space("darts"), tiny_space("darts", operations="s2"), tiny_space("nasvit"))]
    assert signatures[0]["space"] == "darts" and signatures[0]["choices"] == [8] * 28
    assert signatures[0]["genes"][0][:3] == ["operation of input 0 → node 1 in the normal cell", "none", "max_pool_3x3"]
    assert all(one != other for one, other in zip(signatures, signatures[1:] + signatures[:1], strict=True))
    assert Tokens(tiny_space("mobilenetv3", width=0.2)).signature == Tokens(tiny_space("mobilenetv3")).signature  # scale changes no gene
    assert Tokens(tiny_space("mobilenetv3")).signature["genes"][0][1:] == [0, 1, 2]  # values by their order
