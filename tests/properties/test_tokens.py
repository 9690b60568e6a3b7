"""Whatever a network says, decoding it gives a valid architecture; and every architecture survives its table."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedloom.generator.tokens import Tokens
from support.generator import Toy, tiny_spaces

TOKENS = {**{name: Tokens(space) for name, space in tiny_spaces()}, "toy": Tokens(Toy(3, 2, 1, 4))}
numbers = st.floats(allow_nan=False, allow_infinity=True, width=32)


@given(data=st.data(), name=st.sampled_from(sorted(TOKENS)))
def test_any_numbers_decode_to_a_valid_architecture(data: st.DataObject, name: str) -> None:
    tokens = TOKENS[name]
    table = data.draw(arrays(np.float32, (2, len(tokens), tokens.symbols), elements=numbers, fill=numbers))
    choices = tokens.decode(torch.from_numpy(table))
    assert choices.shape == (2, len(tokens.space.genes)) and choices.dtype == np.int64
    for architecture in tokens.architectures(choices):
        tokens.space.check(architecture)


@given(data=st.data(), name=st.sampled_from(sorted(TOKENS)))
def test_every_architecture_comes_back(data: st.DataObject, name: str) -> None:
    tokens = TOKENS[name]
    drawn = data.draw(st.tuples(*(st.integers(0, int(size) - 1) for size in tokens.space.sizes)))
    choices = tokens.space.canonical_many(np.array([drawn]))
    symbols = tokens.encode(choices)
    assert tokens.mask[torch.arange(len(tokens)), symbols[0]].all()
    assert np.array_equal(tokens.decode(tokens.one_hot(symbols)), choices)
