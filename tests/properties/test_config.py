"""Whatever a setting holds, its file gives it back."""

from __future__ import annotations

import tomllib

from hypothesis import example, given
from hypothesis import strategies as st

from fedloom.config import from_table, load, to_toml

LINES = st.text(st.characters(exclude_categories=("Cs",)))  # lone surrogates are no text
NUMBERS = st.floats(0, allow_nan=False, allow_infinity=False)


@given(LINES)
@example('"""')
@example("\\")
@example('\\"')
@example("a\nb\\n")
@example("\x00\r\x1b\x7f\x85\u2028")
@example("[table]\nkey = 'x' # no comment")
def test_text_survives(text: str) -> None:
    settings = from_table({"data": {"folder": text}, "run": {"folder": text}})
    again = from_table(tomllib.loads(to_toml(settings)))
    assert again.run.folder == again.data.folder == text and again == settings


@given(NUMBERS, st.lists(NUMBERS, max_size=4), st.integers(0, 2**63 - 1))
def test_numbers_survive(rate: float, rates: list[float], seed: int) -> None:
    settings = from_table({"seed": seed, "training": {"rate": rate, "finetune_rates": rates}})
    again = from_table(tomllib.loads(to_toml(settings)))
    assert again == settings and again.training.finetune_rates == tuple(rates) and again.seed == seed


@given(NUMBERS, st.lists(st.integers(1, 2), min_size=1, max_size=5), st.booleans(), st.integers(1, 10**6))
def test_an_override_means_what_a_file_means(rate: float, strides: list[int], flip: bool, rounds: int) -> None:
    overrides = [f"training.rate={rate!r}", f"mobilenetv3.strides={strides}", f"training.flip={str(flip).lower()}", f"rounds={rounds}"]
    table = {"training": {"rate": rate, "flip": flip}, "mobilenetv3": {"strides": strides}, "rounds": rounds}
    assert load(None, overrides) == from_table(table)
