"""What of a run folder must be equal for two runs to be the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import kills


@pytest.fixture(scope="session")
def content() -> Callable[[Path], dict[str, Any]]:
    return kills.content
