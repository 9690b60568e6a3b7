"""The one line that tests a plugin: what it says of components that break their promises, and of plugins that cannot be used.

That components which keep them pass is shown by the how-to pages, whose commands are executed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.core.errors import FedloomError, InvalidConfig, UnusablePlugin
from fedloom.testing import method_tests, space_tests, surrogate_tests
from support.toy import FOLDER

METHOD = Path(__file__).parents[3] / "examples" / "own_method.py"
TESTS = """
from fedloom.testing import method_tests, space_tests, surrogate_tests

TestUndeclared = method_tests("undeclared.py", "fedavgm")
TestUnseeded = method_tests("unseeded.py", "fedavgm", "fedavgm.momentum=0")
TestInvalid = space_tests("toy_supernet.py", "toy")
TestOrder = surrogate_tests("last.py", "last")
"""
LAST = """
import numpy as np
from fedloom.search.base import SURROGATES

@SURROGATES.add("last", meaning="the last score")
class Last:
    def __init__(self, encodings, scores):
        self.value = scores[-1]
    def predict(self, encodings):
        return np.full(len(encodings), self.value)
"""
DECODE = """
    def decode(self, genes):
        return type(self.named["smallest"])(self.name, (7,) * len(self.genes))
"""


def changed(source: Path, old: str, new: str) -> str:
    text = source.read_text()
    assert text.count(old) == 1, old
    return text.replace(old, new)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints of a test file beside broken plugins, asked from another folder. Two of them have the same name."""
    folder, elsewhere = tmp_path_factory.mktemp("broken"), tmp_path_factory.mktemp("elsewhere")
    (folder / "undeclared.py").write_text(changed(METHOD, '{"examples": len(site', '{"labels": 3, "examples": len(site'))
    (folder / "unseeded.py").write_text(changed(METHOD, 'rng(instruction.seed, "train")', "np.random.default_rng()"))
    (folder / "toy_space.py").write_text((FOLDER / "toy_space.py").read_text() + DECODE)
    (folder / "toy_supernet.py").write_text((FOLDER / "toy_supernet.py").read_text())
    (folder / "last.py").write_text(LAST)
    (folder / "test_mine.py").write_text(TESTS)
    few = "door or answer_is_pure or accounted or decode or names_of_their_own or TestOrder"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder / "test_mine.py", "-k", few]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=elsewhere)
    assert ended.returncode == 1, ended.stdout
    return ended.stdout


def failures(said: str, tests: str) -> list[str]:
    return re.findall(rf"^FAILED \S+::{tests}::(.+?)(?: - .*)?$", said, re.MULTILINE)


def test_a_method_that_uploads_what_it_does_not_declare(said: str) -> None:
    assert "UndeclaredUpload: client-000, round 0: labels may not leave the client; the method declares examples, update" in said
    assert failures(said, "TestUndeclared") == ["test_reports_pass_the_door_and_use_what_the_method_declares[fedavgm]"]


def test_a_method_that_draws_without_its_seed(said: str) -> None:
    """Assertions of the contract are explained as those of a test file are: what differs is named."""
    assert ".report.arrays['update']" in said and "the arrays differ" in said
    assert failures(said, "TestUnseeded") == ["test_answer_is_pure[fedavgm fedavgm.momentum=0]"]


def test_a_space_whose_decoding_is_not_valid(said: str) -> None:
    assert "InvalidArchitecture: gene 0 (width) must be 0..2, got 7" in said
    kinds = [
        f"test_any_noise_decodes_to_something_valid[toy-{kind}]" for kind in ("normal", "wide", "low", "high", "infinite", "no numbers")
    ]
    assert failures(said, "TestInvalid") == ["test_decode_undoes_encode[toy]", *kinds]


def test_a_surrogate_that_minds_the_order(said: str) -> None:
    broken = ["test_the_order_of_members_does_not_matter[last]", "test_scores_that_are_not_finite_leave_finite_predictions[last]"]
    assert failures(said, "TestOrder") == broken


def test_what_is_not_broken_passes(said: str) -> None:
    """Of each method its accounts and one test more, of the space the names of its genes, of the surrogate two tests."""
    assert re.search(r"^11 failed, 7 passed, ", said, re.MULTILINE), said[-500:]


@pytest.mark.parametrize(
    ("ask", "plugin", "name", "kind", "words"),
    [
        (method_tests, "mine.py", "mine", UnusablePlugin, "There is no plugin file .*unit/testing/mine.py"),
        (method_tests, str(METHOD), "fedavg_m", InvalidConfig, "There is no method named 'fedavg_m'. Did you mean 'fedavgm'?"),
        (surrogate_tests, str(METHOD), "rfb", InvalidConfig, "There is no surrogate named 'rfb'. Did you mean 'rbf'?"),
        (space_tests, str(METHOD), "dart", InvalidConfig, "There is no search space named 'dart'. Did you mean 'darts'?"),
    ],
)
def test_what_is_not_there_is_refused_when_tests_are_collected(
    ask: Callable[..., type], plugin: str, name: str, kind: type[FedloomError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        ask(plugin, name)


def test_without_pytest_the_cure_is_named() -> None:
    code = "import sys; sys.modules['pytest'] = None; import fedloom.testing"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.stderr.endswith("ImportError: fedloom.testing needs pytest, which is not installed. Run pip install pytest\n")
