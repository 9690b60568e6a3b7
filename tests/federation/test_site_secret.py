"""What a site draws does not follow from the seed that the server sends: each site mixes in a secret of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun
from fedloom.core.messages import Instruction
from fedloom.federation.site.secret import SECRET, own_secret
from support.site import Place, at, write_agreement


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreement(tmp_path_factory.mktemp("agreed"))


def drawn(place: Place, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Architecture], bytes]:
    """The first population of a site, and its signed report on the first round."""
    method, populations = place.participant.method, []
    first: Any = type(method)._first_population  # type: ignore[attr-defined]

    def listening(self: Any, instruction: Instruction) -> Sequence[Architecture]:
        populations.append(first(self, instruction))
        return populations[-1]  # type: ignore[no-any-return]

    with monkeypatch.context() as changed:
        changed.setattr(type(method), "_first_population", listening)
        asked = place.data(0)
        answer = place.participant.answer(asked)
    (population,) = populations
    assert place.report(answer, asked)
    return population, place.participant.answers.last.report  # type: ignore[union-attr]


def guessed(place: Place) -> list[Architecture]:
    """What the server would draw with the seed that it sent."""
    found: list[Architecture] = place.method._first_population(place.instruction(0))
    return found


def test_the_first_population_does_not_follow_from_the_servers_seed(agreed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with at(agreed, tmp_path / "rehearsed", secret=False) as place:
        assert drawn(place, monkeypatch)[0] == guessed(place), "without a secret the server knows it"
    with at(agreed, tmp_path / "one", secret=True) as place:
        one, _ = drawn(place, monkeypatch)
        assert not set(one) & set(guessed(place))
    with at(agreed, tmp_path / "other", secret=True) as place:
        assert not set(one) & set(drawn(place, monkeypatch)[0]), "each has a secret of its own"


def test_a_site_that_is_started_again_draws_the_same(agreed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_secret(tmp_path / "one")
    known = (tmp_path / "one" / SECRET).read_bytes()
    (tmp_path / "two" / "state").mkdir(parents=True)
    (tmp_path / "two" / SECRET).write_bytes(known)  # as if it had been killed before it answered
    with at(agreed, tmp_path / "one", secret=True) as one, at(agreed, tmp_path / "two", secret=True) as two:
        assert drawn(one, monkeypatch) == drawn(two, monkeypatch)
    assert (tmp_path / "one" / SECRET).read_bytes() == known


def test_a_damaged_secret_is_refused(tmp_path: Path) -> None:
    own_secret(tmp_path)
    (tmp_path / SECRET).write_text("short\n")
    with pytest.raises(DamagedRun, match="does not hold this site's secret"):
        own_secret(tmp_path)
