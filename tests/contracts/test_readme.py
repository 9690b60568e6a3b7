"""What the README and the how-to pages show, done. Runs are shrunk by further overrides; every command is otherwise as printed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom import config
from fedloom.commands import app as cli
from fedloom.generator import pretrain
from fedloom.testing.plugged import taken_back
from support.checks import shrinking
from support.toy import FOLDER, SECONDS

ROOT = Path(__file__).parents[2]
MOMENTS = [*SECONDS, "denoiser.steps=2", "supernet.epochs=1", "labels.architectures=20", "predictor.steps=2"]  # no good generator
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONG = ("own-images.md", "own-space.md", "report.md")  # for `make slow`: CI tests what they show, in tests of each part


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def little_is_drawn_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pretrain, "DRAWN", 40)
    with taken_back():
        yield


@pytest.mark.usefixtures("little_is_drawn_and_nothing_stays")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG)) for page in PAGES if "```sh" in page.read_text()],
    ids=lambda page: page.name,
)
def test_every_snippet_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for number in range(30):
            pixels = draw.integers(0, 256, (12, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / kind / f"{number}.png")
    for site in ("north", "east", "west"):
        shutil.copytree(tmp_path / "pictures", tmp_path / "sites" / site)
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    for name in re.findall(r"\]\(\.\./\.\./examples/(\w+\.py)\)", page.read_text()):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    for text in blocks(page, "toml") + [text for text in blocks(page, "py") if text.startswith("# ")]:
        named = re.match(r"# (\w+\.(toml|py))\n", text)
        (tmp_path / (named[1] if named else "pictures.toml")).write_text(text)
    commands = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[0] == "make":  # the Makefile's own targets: running them here would run this test again
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            continue
        if words[0] == "pytest":  # as its reader does: in a folder outside this tree, without its settings
            tests = subprocess.run([sys.executable, "-m", *words, "-q"], capture_output=True, text=True, timeout=100)
            assert tests.returncode == 0, tests.stdout
            continue
        assert words[0] == "fedloom", command
        splits = ".toml" in command or "split." in command or "data." in command  # then the split is what it says
        own_data = "plugins=" in command and "data." in command  # then they must be enough for its clients
        extra = {"run": shrinking(split=not splits, clients=not own_data), "pretrain": MOMENTS, "check": shrinking(split=False)}.get(
            words[1], []
        )
        if "budget.latency_ms=" in command:  # which a slow or busy machine could not keep
            extra = [*extra, "budget.latency_ms=1000"]
        if words[1] == "latency":  # of the space that runs have here
            extra = ["--count", "20", *(change for change in shrinking() if change.startswith("mobilenetv3."))]
        monkeypatch.setattr(sys, "argv", [*words, *extra])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, command
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_placeholder_was_left(page: Path) -> None:
    assert not re.search(r"\b[A-Z]+_[A-Z]+\b", re.sub(r"`[^`]*`", "", page.read_text()))


def test_the_quickstart_is_what_the_readme_says() -> None:
    settings = config.load("quickstart")
    assert settings.clients == 12
    assert settings.data.name == "digits"
    assert settings.method == "perfedsde"


def test_every_method_has_a_page() -> None:
    missing = [name for name in config.METHODS if not (ROOT / "docs" / "methods" / f"{name}.md").exists()]
    assert missing == []


@pytest.mark.parametrize("file", ["toy_space.py", "toy_supernet.py"])
def test_the_space_that_is_explained_is_the_one_that_is_tested(file: str) -> None:
    assert f"# {file}\n{(FOLDER / file).read_text()}" in blocks(ROOT / "docs" / "how-to" / "own-space.md", "py")
