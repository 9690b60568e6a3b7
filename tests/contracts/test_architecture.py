"""The map: docs/explain/architecture.md tells walks through the code in one direction, and the code agrees; tests mirror the rooms."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedloom"
PAGE = (ROOT / "docs" / "explain" / "architecture.md").read_text()
SECTIONS = re.findall(r"^### (.+?)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
WALKS = {title: re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.MULTILINE) for title, text in SECTIONS}


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("fedloom", cache_dir=None)


def module(path: str) -> str:
    return "fedloom." + path.removesuffix(".py").replace("/", ".")


def imports(importer: str, imported: str) -> bool:
    """Directly, or through what a package offers in its __init__."""
    direct = graph().find_modules_directly_imported_by(importer)
    packages = [name for name in direct if imported.startswith(f"{name}.")]
    return imported in direct or any(imported in graph().find_modules_directly_imported_by(name) for name in packages)


def test_there_are_walks() -> None:
    assert len(WALKS) >= 5 and all(len(files) >= 5 for files in WALKS.values()), WALKS


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_goes_in_one_direction(walk: str) -> None:
    """Each file is imported by one that stands before it, and imports none of them."""
    files = WALKS[walk]
    assert len(set(files)) == len(files) and all((SOURCE / path).is_file() for path in files)
    for place, path in enumerate(files[1:], start=1):
        before = files[:place]
        assert any(imports(module(other), module(path)) for other in before), f"{path} is imported by none of {before}"
        assert not [other for other in before if imports(module(path), module(other))], f"{path} steps back"


def test_every_room_is_on_the_map() -> None:
    """CONTRIBUTING.md has a row for every folder and file of the package's top level, and for nothing else."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+/|\w+\.py)`", "\n".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE))))
    folders = {f"{path.name}/" for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    files = {path.name for path in SOURCE.glob("[!_]*.py")}
    assert named == folders | files


def test_unit_tests_mirror_the_rooms() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir()} | {"benchmarks"}
    assert {path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"} <= rooms
    alone = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "unit").glob("test_*.py")}
    assert alone <= {path.stem for path in SOURCE.glob("*.py")}, "a test of a room lies in the room's folder"
