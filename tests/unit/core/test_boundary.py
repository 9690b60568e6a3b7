"""The one door out of a client: what passes, what is refused, what it weighs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom.core.boundary import Manifest, Upload, release
from fedloom.core.errors import BadReport, UndeclaredUpload
from fedloom.core.messages import Instruction, Report, frozen, payload_bytes

MANIFEST = {
    "update": Upload("a change", like="weights"),
    "coverage": Upload("where", like="weights", counts=True),
    "examples": Upload("how many", low=1),
}
WEIGHTS = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
INSTRUCTION = Instruction("client-1", 5, "train", 0, {"weights": WEIGHTS})


def report(**changes: Any) -> Report:
    """Everything the manifest declares, and nothing wrong with it."""
    arrays = {
        "update": {name: array + 1 for name, array in WEIGHTS.items()},
        "coverage": {name: np.ones(array.shape, np.uint8) for name, array in WEIGHTS.items()},
    }
    return replace(Report("client-1", 5, arrays, {"examples": 20}), **changes)


def with_group(field: str, group: Any) -> Report:
    return report(arrays={**report().arrays, field: group})


def with_arrays(field: str, **arrays: Any) -> Report:
    return with_group(field, {**report().arrays[field], **arrays})


def refused(sent: Report, words: str, manifest: Manifest = MANIFEST, instruction: Instruction = INSTRUCTION) -> BadReport:
    with pytest.raises(BadReport, match=words) as caught:
        release(sent, instruction, manifest)
    assert str(caught.value).startswith(f"{sent.client}, round {sent.round}: ")
    return caught.value


def test_a_declared_report_passes_unchanged_and_is_weighed() -> None:
    sent = report()
    released = release(sent, INSTRUCTION, MANIFEST)
    assert released.report is sent
    assert released.bytes == (6 + 4) * 4 + (6 + 4) * 1 + len('{"examples": 20}')


def test_an_empty_report_passes() -> None:
    assert release(Report("client-1", 5), INSTRUCTION, MANIFEST).bytes == 0
    assert release(Report("client-1", 5), INSTRUCTION, {}).bytes == 0


@pytest.mark.parametrize("missing", [("update",), ("coverage",), ("examples",), ("coverage", "examples"), ("coverage", "update")])
def test_otherwise_every_declared_field_is_there(missing: tuple[str, ...]) -> None:
    whole = report()
    arrays, facts = ({name: value for name, value in group.items() if name not in missing} for group in (whole.arrays, whole.facts))
    words = f"5: {', '.join(missing)} is missing; a report carries every declared field or none"
    error = refused(report(arrays=arrays, facts=facts), words)
    assert error.facts["fields"] == list(missing)


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
    refused(report(**change), "the report answers client-1, round 5")


@pytest.mark.parametrize("field", ["update", "coverage"])
@pytest.mark.parametrize("names", [{"a"}, {"a", "b", "c"}, {"a", "c"}, set()])
def test_array_names_are_those_of_the_model(field: str, names: set[str]) -> None:
    arrays = {name: report().arrays[field].get(name, np.zeros(4)) for name in names}
    error = refused(with_group(field, arrays), f"{field} must name the same arrays as the instruction's weights")
    assert error.facts["array"] == sorted(names ^ {"a", "b"})[0]


def test_an_instruction_without_the_model_can_have_no_update() -> None:
    bare = replace(INSTRUCTION, arrays={})
    refused(report(), "update has nothing to be compared with: the instruction carried no weights", instruction=bare)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (6,), (1, 3), (2, 1), (2, 4), (0, 3), ()])
def test_shapes_are_those_of_the_model(shape: tuple[int, ...]) -> None:
    error = refused(with_arrays("update", a=np.ones(shape, np.float32)), r"update\[a\] has shape")
    assert f"{shape}, expected (2, 3)" in str(error) and error.facts == {"array": "a"}


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int8, np.int32, bool, ">f4", object, complex, "U3", "M8[s]"])
def test_types_are_those_of_the_model(kind: Any) -> None:
    error = refused(with_arrays("update", a=np.ones((2, 3)).astype(kind)), r"update\[a\] has type .*, expected float32")
    assert str(np.dtype(kind)) in str(error) and error.facts == {"array": "a"}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_arrays_are_finite(value: float) -> None:
    bad = np.ones((2, 3), np.float32)
    bad[1, 2] = value
    error = refused(with_arrays("update", a=bad), r"update\[a\] holds values that are not finite.* Lower training\.rate")
    assert error.facts == {"array": "a"}


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("kind", [bool, np.uint8, np.int32, np.int64, np.uint64])
def test_counts_may_shrink_axes_to_one(shape: tuple[int, ...], kind: Any) -> None:
    counts = np.ones(shape, kind)
    sent = with_arrays("coverage", a=counts)
    assert release(sent, INSTRUCTION, MANIFEST).bytes == (6 + 4) * 4 + counts.nbytes + 4 + len('{"examples": 20}')


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 2), (2, 3, 1), (0, 3), (4, 3), ()])
def test_but_not_otherwise(shape: tuple[int, ...]) -> None:
    refused(with_arrays("coverage", a=np.ones(shape, bool)), r"coverage\[a\] has shape")


@pytest.mark.parametrize(
    "bad", [np.ones((2, 3)), np.ones((2, 3), np.float32), np.ones((2, 3), object), np.ones((2, 3), complex), -np.eye(2, 3, dtype=np.int8)]
)
def test_counts_are_whole_numbers_from_0_on(bad: np.ndarray) -> None:
    assert refused(with_arrays("coverage", a=bad), r"coverage\[a\] must hold whole numbers from 0 on").facts == {"array": "a"}
    assert release(with_arrays("coverage", a=np.zeros((2, 3), np.int8)), INSTRUCTION, MANIFEST)


def test_counts_of_an_empty_parameter() -> None:
    empty = replace(INSTRUCTION, arrays={"weights": {"a": np.zeros((0, 3), np.float32)}})
    sent = Report("client-1", 5, {"coverage": {"a": np.zeros((0, 1), np.int64)}})
    assert release(sent, empty, {"coverage": MANIFEST["coverage"]}).bytes == 0


@pytest.mark.parametrize("field", ["update", "coverage"])
@pytest.mark.parametrize("value", [None, 3.0, [[1, 1, 1], [1, 1, 1]], [[1], [1, 2]], "abc", np.float32(1)])
def test_what_is_no_array_is_refused(field: str, value: Any) -> None:
    assert refused(with_arrays(field, a=value), rf"{field}\[a\]").facts == {"array": "a"}


@pytest.mark.parametrize("group", [None, 3, ["a", "b"], np.ones(2)])
def test_what_is_no_group_of_arrays_is_refused(group: Any) -> None:
    refused(with_group("update", group), "update")


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, "many", b"1", None, [1], {}, 1j, True, np.int64(3), np.float32(3), np.float64(3), np.ones(())]
)
def test_facts_are_finite_numbers(value: Any) -> None:
    refused(report(facts={"examples": value}), r"examples is .*, which is not a finite number")


@pytest.mark.parametrize("digits", [400, 5000])  # beyond floats, and beyond what Python writes down
def test_a_number_that_no_float_can_hold_is_refused(digits: int) -> None:
    refused(report(facts={"examples": 10**digits}), "5: examples")


@pytest.mark.parametrize(("value", "low"), [(0, 1), (0.99, 1), (-1, 0), (-0.5, 0), (-3, -2)])
def test_a_number_has_a_lower_limit(value: float, low: float) -> None:
    manifest = {**MANIFEST, "examples": Upload("how many", low=low)}
    refused(report(facts={"examples": value}), f"examples is {value}, it must be at least {low}", manifest)
    assert release(report(facts={"examples": low}), INSTRUCTION, manifest)
    assert release(report(facts={"examples": float(low)}), INSTRUCTION, manifest)


def test_a_number_is_not_negative_unless_declared_so() -> None:
    refused(report(facts={"examples": -1}), "at least 0", {**MANIFEST, "examples": Upload("how many")})


def test_a_number_is_not_arrays_and_arrays_are_not_a_number() -> None:
    refused(report(arrays={**report().arrays, "examples": {"a": np.zeros(1)}}), "examples must be one number")
    refused(report(facts={"examples": 20, "update": 3}), "update must be arrays like the instruction's weights")


def test_payload_counts_every_group_and_the_facts() -> None:
    instruction = Instruction("a", 0, "train", 9, {"x": {"p": np.zeros(3, np.int32)}, "y": {"p": np.zeros(2, bool)}}, {"k": "ä"})
    assert payload_bytes(instruction) == 12 + 2 + len('{"k": "\\u00e4"}')
    assert payload_bytes(Instruction("a", 0, "train", 9)) == 0


def test_frozen_arrays_refuse_to_change_and_leave_their_owner_free() -> None:
    own = {"a": np.zeros(2), "scalar": np.array(1.0), "locked": np.zeros(2)}
    own["locked"].setflags(write=False)
    arrays = frozen(own)
    for array in arrays.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
    assert own["a"].flags.writeable and np.shares_memory(arrays["a"], own["a"])  # a view, not a copy
    assert not own["locked"].flags.writeable and list(arrays) == list(own) and arrays is not own


# -- parts of what was sent ---------------------------------------------------------------------
PARTS = {**MANIFEST, "update": replace(MANIFEST["update"], part=True)}


def test_a_part_passes_where_parts_are_declared() -> None:
    whole = report().arrays["update"]
    for part in (whole, {"a": whole["a"]}, {"a": whole["a"][:1, :2]}, {**whole, "b": whole["b"][:0]}):
        sent = with_group("update", part)
        assert release(sent, INSTRUCTION, PARTS).report is sent
        if part is not whole:
            refused(sent, "update")


def test_a_part_is_never_more_than_what_was_sent() -> None:
    larger, deeper = np.zeros((3, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    refused(with_arrays("update", a=larger), r"update\[a\] has shape \(3, 1\)", PARTS)
    refused(with_arrays("update", a=deeper), r"update\[a\] has shape", PARTS)
    refused(with_arrays("update", labels=np.zeros(1, np.float32)), "'labels' differs", PARTS)
    refused(with_arrays("update", a=np.zeros((1, 1))), "has type float64", PARTS)
    refused(with_arrays("update", a=np.full((1, 1), np.nan, np.float32)), "not finite", PARTS)
    coverage = with_arrays("coverage", a=np.ones((2, 2), np.uint8))
    refused(coverage, r"coverage\[a\] has shape", PARTS)
