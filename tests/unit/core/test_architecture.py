"""An architecture's text id: identity, file form and wire form."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidArchitecture


def test_the_id_by_hand() -> None:
    assert Architecture("toy", (2, 0, 11)).id == "toy:2-0-11"


@pytest.mark.parametrize("choices", [(0,), (2, 0, 1), (10, 200, 3)])
def test_parse_undoes_id(choices: tuple[int, ...]) -> None:
    architecture = Architecture("toy", choices)
    assert Architecture.parse(architecture.id) == architecture


@pytest.mark.parametrize("text", ["", "toy", "toy:", ":1-2", "toy:1-x", "toy:1--2", "toy:-1-2", "toy:1.5", "1-2", "toy:a:1"])
def test_other_texts_are_refused_and_quoted(text: str) -> None:
    with pytest.raises(InvalidArchitecture, match="SPACE:choice-choice") as caught:
        Architecture.parse(text)
    assert repr(text) in str(caught.value)
    assert caught.value.facts["text"] == text
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("text", ["toy:01-2", "toy:+1-2", "toy: 1-2", "toy:1-2 ", "toy:1-2\n", "toy:1_0-2", "toy:١-2", "toy:-0-2"])
def test_there_is_one_text_for_one_architecture(text: str) -> None:
    """Python reads all of these as numbers."""
    with pytest.raises(InvalidArchitecture, match="SPACE:choice-choice"):
        Architecture.parse(text)


def test_it_is_a_value() -> None:
    one, same, other = Architecture("toy", (1, 2)), Architecture("toy", (1, 2)), Architecture("toy", (1, 3))
    assert one == same and hash(one) == hash(same)
    assert len({one, same, other}) == 2
    assert Architecture("toy", (1, 2)) != Architecture("boy", (1, 2))
    assert sorted([other, one]) == [one, other]
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(FrozenInstanceError):
        one.space = "boy"  # type: ignore[misc]
