"""What a gene may be, and that a space has something to choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fedloom.core.errors import InvalidConfig
from fedloom.spaces.base import MOST_CHOICES, Gene
from support.generator import Toy


@pytest.mark.parametrize("values", [[3, 5, 7], range(3, 8, 2), (3, 5, 7)])
def test_values_may_be_any_sequence(values: Sequence[int]) -> None:
    gene = Gene("kernel", values)  # type: ignore[arg-type]
    assert gene == Gene("kernel", (3, 5, 7)) and len({gene, Gene("kernel", (3, 5, 7))}) == 1


def test_there_may_be_many_values() -> None:
    assert len(Gene("width", range(MOST_CHOICES)).values) == 65_536  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("width", 3), "The gene 'width' needs a tuple of numbers, such as (8, 12, 16), got 3"),
        (("width", None), "needs a tuple of numbers, such as (8, 12, 16), got None"),
        (("width", "357"), "needs a tuple of numbers, such as (8, 12, 16), got '357'"),
        (("width", (3, "5")), "needs a tuple of numbers, such as (8, 12, 16), got (3, '5')"),
        (("width", {3, 5}), "needs a tuple of numbers, such as (8, 12, 16), got {3, 5}"),  # in which order?
        (("width", ()), "The gene 'width' needs 1 to 65,536 values, got 0"),
        (("width", range(MOST_CHOICES + 1)), "The gene 'width' needs 1 to 65,536 values, got 65,537"),
        (("width", (3, 5, 3)), "The gene 'width' has the value 3 more than once. Name every value once"),
        (("width", (1, 1.0)), "The gene 'width' has the value 1 more than once"),
        (("", (3, 5)), "A gene needs a name, got ''. Write Gene("),
        ((" ", (3, 5)), "A gene needs a name, got ' '. Write Gene("),
        (((3, 5), (3, 5)), "A gene needs a name, got (3, 5). Write Gene("),
        (("width", (3, 5), ("narrow",)), "has 1 labels for 2 values. Give one label for each value, or none"),
    ],
)
def test_what_is_no_gene(given: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        Gene(*given)
    assert reason in str(refused.value)


@pytest.mark.parametrize("sizes", [(), (1,), (1, 1, 1)])
def test_a_space_of_one_architecture_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match=r"toy has one architecture only: give at least one of its genes two values or more"):
        _ = Toy(*sizes).sizes
    assert Toy(1, 2).sizes.tolist() == [1, 2]
