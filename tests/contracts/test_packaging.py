"""What surrounds the package: a wheel that is all one needs, and files that repeat facts of pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedloom

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {fedloom.__version__}\n" in text and f"\nlicense: {PROJECT['license']}\n" in text


def test_the_same_pythons_everywhere() -> None:
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    minors = [f"3.{minor}" for minor in range(int(low), int(high))]
    known = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith("Programming Language :: Python :: 3.")]
    workflow = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert known == minors and workflow and re.findall(r'"([\d.]+)"', workflow[1]) == minors
    assert f"(3, {low}) <= sys.version_info < (3, {high})" in (ROOT / "Makefile").read_text()
    assert all(minor in (ROOT / "docs/start/install.md").read_text() for minor in minors)


def test_what_the_container_copies_is_there() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "src" in names and all((ROOT / name).exists() and f"!{name}" in ignored for name in names)


def test_the_workflow_runs_what_runs_here() -> None:
    assert "- run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text() and os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.slow
def test_a_wheel_is_all_one_needs(tmp_path: Path) -> None:
    """Its files alone, in a folder far from the source: presets, generators and pages are there, and a federation runs."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("fedloom-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    surroundings = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    little = ["method=fedavg", "rounds=1", "clients=2", "participants=2", "training.epochs=1", "training.finetune_epochs=1"]
    for arguments in (["list", "presets"], ["run", "quickstart", *little], ["report", "runs/quickstart"], ["generate", "mobilenetv3"]):
        done = subprocess.run(
            [sys.executable, "-m", "fedloom", *arguments], cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    where = "import fedloom; print(fedloom.__file__)"
    there = subprocess.run([sys.executable, "-c", where], env=surroundings, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert there.stdout.startswith(str(tmp_path))
