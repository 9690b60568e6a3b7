"""A site of a federation, before its first round and after two; a server's port, and a connection to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.federation.site.connection import Connection
from support.port import Port, listening
from support.site import Place, at, write_agreement


@pytest.fixture(scope="session")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreement(tmp_path_factory.mktemp("made once"))


@pytest.fixture
def fresh(agreed: Path, tmp_path: Path) -> Iterator[Place]:
    with at(agreed, tmp_path / "digits" / "north") as place:
        yield place


@pytest.fixture(scope="session")
def after_two_rounds(agreed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; take ``answered`` to change it."""
    folder = tmp_path_factory.mktemp("made once") / "digits"
    with at(agreed, folder / "north") as place:
        for round in (0, 1):
            place.participant.answer(place.data(round))
    return folder


@pytest.fixture
def answered(agreed: Path, after_two_rounds: Path, tmp_path: Path) -> Iterator[Place]:
    shutil.copytree(after_two_rounds, tmp_path / "digits")
    with at(agreed, tmp_path / "digits" / "north") as place:
        yield place


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    with listening(tmp_path / "certs") as opened:
        yield opened


@pytest.fixture
def north(port: Port) -> Iterator[Connection]:
    with port.connect("north") as connection:
        yield connection
