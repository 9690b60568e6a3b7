"""What every surrogate promises."""

from __future__ import annotations

import pytest

from fedloom.search.base import SURROGATES
from fedloom.testing.surrogates import SurrogateContract, surrogates


class TestEverySurrogate(SurrogateContract):
    fit = surrogates([pytest.param(entry.make, id=name) for name, entry in SURROGATES.items()])
