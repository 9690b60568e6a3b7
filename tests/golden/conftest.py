"""Golden files: what earlier versions did, kept in this folder.

A change that is meant to move them is made with ``FEDLOOM_RENEW_GOLDEN=1 pytest tests/golden``, which writes the digests again and adds the
run folders of a version that has none; those of released versions are never written again. The difference belongs in the change's own text.
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def renew() -> bool:
    return os.environ.get("FEDLOOM_RENEW_GOLDEN", "") not in ("", "0")
