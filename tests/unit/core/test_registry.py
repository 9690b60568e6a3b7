"""Name -> component, and the cure for a mistyped name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fedloom.core.errors import InvalidConfig
from fedloom.core.registry import Registry, did_you_mean


@dataclass(frozen=True)
class Options:
    size: int = 1


def filled() -> Registry:
    registry: Registry = Registry("loom")
    registry.add("wide", Options, "a wide one")(lambda: "wide loom")
    registry.add("narrow", Options, "a narrow one")(lambda: "narrow loom")
    return registry


def test_an_entry_keeps_what_was_registered() -> None:
    entry = filled()["wide"]
    assert (entry.name, entry.make(), entry.settings, entry.meaning) == ("wide", "wide loom", Options, "a wide one")


def test_the_decorator_returns_what_it_decorates() -> None:
    registry: Registry = Registry("loom")

    @registry.add("here", Options, "defined here")
    def make() -> str:
        return "made"

    assert make() == "made"
    assert registry["here"].make is make


def test_it_knows_its_names_as_a_dictionary_does() -> None:
    registry = filled()
    assert list(registry) == ["wide", "narrow"] and "wide" in registry and "wude" not in registry and registry.get("wude") is None
    assert [entry.name for entry in registry.values()] == ["wide", "narrow"]


def test_a_component_without_settings_has_a_meaning_alone() -> None:
    registry = filled()
    registry.add("bare", meaning="needs nothing")("any value")
    assert (registry["bare"].make, registry["bare"].settings, registry["bare"].meaning) == ("any value", None, "needs nothing")


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(InvalidConfig, match="no loom named 'wude'") as caught:
        filled()["wude"]
    assert "Did you mean 'wide'?" in str(caught.value)
    assert "Known: narrow, wide" in str(caught.value)
    assert caught.value.facts["name"] == "wude"
    assert caught.value.exit_code == 3


def test_a_name_is_taken_once() -> None:
    registry = filled()
    with pytest.raises(InvalidConfig, match=r"There is a loom named 'wide' already\. Choose another name"):
        registry.add("wide", Options, "again")(lambda: "other")
    assert registry["wide"].make() == "wide loom"


def test_far_names_get_no_suggestion() -> None:
    assert did_you_mean("zzzz", ["wide", "narrow"]) == "Known: narrow, wide"
    assert did_you_mean("x", []) == "Known: none"
