"""The tests that every component of Fedloom passes, for components of your own: one line in a test file beside your plugin.

from fedloom.testing import method_tests

TestMine = method_tests("mine.py", "mine")
"""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError("fedloom.testing needs pytest, which is not installed. Run pip install pytest") from error

PARTS = ("methods", "spaces", "supernets", "masked", "executions", "prefixes", "stacks", "surrogates", "together")
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in PARTS))

from fedloom.testing.one_line import method_tests, space_tests, surrogate_tests  # noqa: E402 - their assertions are explained from here on
from fedloom.testing.played import Played  # noqa: E402
from fedloom.testing.tiny import tiny_file  # noqa: E402

__all__ = ["Played", "method_tests", "space_tests", "surrogate_tests", "tiny_file"]
