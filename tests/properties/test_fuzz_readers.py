"""Whatever bytes a file holds, whoever reads it gets what it says or a refusal that is documented: no traceback, no waiting."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom import config
from fedloom.core.errors import FedloomError
from fedloom.engine.run import Watcher
from support.fuzz import Kind, kinds, settings_texts

SECONDS = 20  # for one file
SINGLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
FEW = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
RUN = ("settings of a run", "result", "ledger", "seconds", "server state", "split", "personal model")
NAMES = (
    *(*RUN, "list of memories", "memory of a client", "model file", "torch program", "weights", "generator", "architecture"),
    *("checkpoint", "checkpoint of old torch", "checkpoint in safetensors", "agreement", "settings of a site", "authority"),
    *("key of a site", "public key of a site", "certificate of a server", "key of a server", "report", "instruction"),
    *(f"image, {format}" for format in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")),
    *("CIFAR, train", "CIFAR, meta"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def files(place: Path, nobody: Watcher) -> dict[str, Kind]:
    pytest.importorskip("flwr")  # which brings cryptography along
    found = kinds(place, nobody, pages=False)
    assert set(found) == set(NAMES)
    return found


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(kind: Kind, place: Path, content: bytes) -> None:
    path = place / kind.path
    path.write_bytes(content)
    try:
        with in_time(), suppress(FedloomError):
            kind.read(path)
    finally:
        path.write_bytes(kind.good)


@pytest.mark.parametrize("name", NAMES)
def test_a_good_file_is_read(files: dict[str, Kind], place: Path, name: str) -> None:
    path = place / files[name].path
    path.write_bytes(files[name].good)
    files[name].read(path)


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes(files: dict[str, Kind], place: Path, name: str) -> None:
    @FEW
    @given(st.binary(max_size=200), st.booleans())
    def read(content: bytes, after: bool) -> None:
        check(files[name], place, files[name].good[:9] + content if after else content)

    read()


@pytest.mark.parametrize("name", NAMES)
def test_damaged_and_forged_files(files: dict[str, Kind], place: Path, name: str) -> None:
    @FEW
    @given(st.randoms(use_true_random=False))
    def read(draw: random.Random) -> None:
        check(files[name], place, files[name].bad(draw))

    read()


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_malformed_settings(draw: random.Random) -> None:
    with in_time(), suppress(FedloomError):
        config.load("quickstart", [settings_texts(draw) for _ in range(draw.randint(1, 2))])


@settings(max_examples=100)
@given(st.recursive(SINGLE, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_table_of_settings(table: Any) -> None:
    """Also one whose keys are those of settings."""
    for content in (table, {"training": table}, {"seed": table}, {"plugins": table}, {"mobilenetv3": table}, {"hardware": table}):
        if isinstance(content, dict):
            with suppress(FedloomError):
                config.from_table(content, trust_plugins=False)
