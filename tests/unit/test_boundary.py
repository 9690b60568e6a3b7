"""The one door out of a client: what passes, what is refused, what it weighs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom.core.boundary import Upload, release
from fedloom.core.errors import BadReport, UndeclaredUpload
from fedloom.core.messages import Instruction, Report, frozen, payload_bytes

MANIFEST = {
    "update": Upload("a change", like="weights"),
    "coverage": Upload("where", like="weights", counts=True),
    "examples": Upload("how many"),
}
WEIGHTS = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
INSTRUCTION = Instruction("client-1", 5, "train", 0, {"weights": WEIGHTS})


def report(**changes: Any) -> Report:
    whole = Report("client-1", 5, {"update": {name: array + 1 for name, array in WEIGHTS.items()}}, {"examples": 20})
    return replace(whole, **changes)


def with_arrays(field: str, **arrays: Any) -> Report:
    return report(arrays={field: {name: array + 1 for name, array in WEIGHTS.items()} | arrays})


def test_a_declared_report_passes_unchanged_and_is_weighed() -> None:
    sent = report()
    released = release(sent, INSTRUCTION, MANIFEST)
    assert released.report is sent
    assert released.bytes == (6 + 4) * 4 + len('{"examples": 20}')


def test_less_than_declared_passes() -> None:
    assert release(Report("client-1", 5), INSTRUCTION, MANIFEST).bytes == 0
    assert release(Report("client-1", 5), INSTRUCTION, {}).bytes == 0


@pytest.mark.parametrize(
    "extra",
    [{"facts": {"examples": 3, "accuracy": 0.5}}, {"arrays": {"labels": {"x": np.zeros(2)}}}, {"facts": {"accuracy": float("nan")}}],
)
def test_an_undeclared_field_is_refused_by_name(extra: dict[str, Any]) -> None:
    name = "labels" if "arrays" in extra else "accuracy"
    with pytest.raises(UndeclaredUpload, match=f"client-1, round 5: {name} may not leave") as caught:
        release(report(**extra), INSTRUCTION, MANIFEST)
    assert "coverage, examples, update" in str(caught.value)
    assert caught.value.facts["fields"] == [name]
    assert caught.value.exit_code == 6


def test_a_method_that_declares_nothing_lets_nothing_out() -> None:
    with pytest.raises(UndeclaredUpload, match="declares nothing"):
        release(report(), INSTRUCTION, {})


@pytest.mark.parametrize("change", [{"client": "client-2"}, {"round": 4}])
def test_a_report_answers_its_own_instruction(change: dict[str, Any]) -> None:
    with pytest.raises(BadReport, match="the report answers client-1, round 5"):
        release(report(**change), INSTRUCTION, MANIFEST)


@pytest.mark.parametrize("names", [{"a"}, {"a", "b", "c"}, {"a", "c"}, set()])
def test_array_names_are_those_of_the_model(names: set[str]) -> None:
    arrays = {name: WEIGHTS.get(name, WEIGHTS["b"]) for name in names}
    with pytest.raises(BadReport, match="must name the same arrays as the instruction's weights"):
        release(report(arrays={"update": arrays}), INSTRUCTION, MANIFEST)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (6,), (1, 3), (2, 1), (2, 4), ()])
def test_shapes_are_those_of_the_model(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadReport, match=r"update\[a\] has shape") as caught:
        release(with_arrays("update", a=np.ones(shape, np.float32)), INSTRUCTION, MANIFEST)
    assert "expected (2, 3)" in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_a_compact_field_may_shrink_axes_to_one(shape: tuple[int, ...]) -> None:
    sent = with_arrays("coverage", a=np.ones(shape, bool))
    assert release(sent, INSTRUCTION, MANIFEST).bytes == np.prod(shape) + 4 * 4 + len('{"examples": 20}')


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 2), (2, 3, 1), (0, 3), (4, 3)])
def test_but_not_otherwise(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadReport, match=r"coverage\[a\] has shape"):
        release(with_arrays("coverage", a=np.ones(shape, bool)), INSTRUCTION, MANIFEST)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_arrays_are_finite(value: float) -> None:
    bad = np.ones((2, 3), np.float32)
    bad[1, 2] = value
    with pytest.raises(BadReport, match=r"update\[a\] holds values that are not finite"):
        release(with_arrays("update", a=bad), INSTRUCTION, MANIFEST)


@pytest.mark.parametrize("kind", [object, complex, "U3", "M8[s]"])
def test_arrays_are_numbers(kind: Any) -> None:
    with pytest.raises(BadReport, match="not finite numbers"):
        release(with_arrays("update", a=np.zeros((2, 3), kind)), INSTRUCTION, MANIFEST)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "many"])
def test_facts_are_finite_numbers(value: Any) -> None:
    with pytest.raises(BadReport, match=r"examples is .*, which is not a finite number"):
        release(report(facts={"examples": value}), INSTRUCTION, MANIFEST)


def test_a_number_is_not_arrays_and_arrays_are_not_a_number() -> None:
    with pytest.raises(BadReport, match="examples must be one number"):
        release(report(arrays={"examples": {"a": np.zeros(1)}}), INSTRUCTION, MANIFEST)
    with pytest.raises(BadReport, match="update must be arrays like the instruction's weights"):
        release(report(facts={"update": 3}), INSTRUCTION, MANIFEST)


def test_payload_counts_every_group_and_the_facts() -> None:
    instruction = Instruction("a", 0, "train", 9, {"x": {"p": np.zeros(3, np.int32)}, "y": {"p": np.zeros(2, bool)}}, {"k": "ä"})
    assert payload_bytes(instruction) == 12 + 2 + len('{"k": "\\u00e4"}')
    assert payload_bytes(Instruction("a", 0, "train", 9)) == 0


def test_frozen_arrays_refuse_to_change() -> None:
    arrays = frozen({"a": np.zeros(2)})
    with pytest.raises(ValueError, match="read-only"):
        arrays["a"][0] = 1
