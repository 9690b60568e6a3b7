"""Things that are made once."""

from __future__ import annotations

from fedloom.core.sharing import once, sharing


def test_made_again_unless_it_is_shared() -> None:
    def make() -> list[int]:
        return []

    assert once(make, "a") is not once(make, "a")
    with sharing():
        first = once(make, "a")
        assert once(make, "a") is first and once(make, "a", 1) is not first
    assert once(make, "a") is not first
    with sharing():
        assert once(make, "a") is not first
