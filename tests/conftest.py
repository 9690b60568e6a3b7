"""For every test: one thread, because bit equality holds for one thread count, and the same examples every time."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy or torch is imported; processes that a test starts inherit it

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
