"""Masks cancel in sums and in nothing less; shares give secrets back, from the threshold on."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from fedloom.maths.masks import add_mask, agreed, combined, derived, new_private, pairwise, public_of, sealed, split, threshold, unsealed

NAMES = ("east", "north", "south", "west")
PRIVATE = {name: name.encode().ljust(32, b".") for name in NAMES}  # the same each time: chance must not decide a test


def chi_square(data: bytes) -> float:
    """The probability that evenly drawn bytes are at least as uneven as these."""
    found = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    return float(chi2.sf(((found - len(data) / 256) ** 2 / (len(data) / 256)).sum(), 255))


def masked(values: dict[str, np.ndarray], private: dict[str, bytes], *context: str) -> dict[str, np.ndarray]:
    found = {}
    for name, own in values.items():
        found[name] = own.copy()
        pairwise(found[name], name, private[name], {other: public_of(key) for other, key in private.items() if other != name}, *context)
    return found


@pytest.mark.parametrize("word", ["<u1", "<u2", "<u4"])
def test_pairwise_masks_cancel_exactly_and_a_part_of_the_sum_is_noise(word: str) -> None:
    draw = np.random.default_rng(0)
    values = {name: draw.integers(0, 3, 300_001).astype(word) for name in NAMES}  # more than a chunk, and not of whole ones
    reports = masked(values, PRIVATE, "federation", "1")
    total: Any = sum(reports.values())
    assert np.array_equal(total.astype(word), sum(values.values()).astype(word))  # type: ignore[union-attr]
    for size in (1, 2, 3):
        for some in combinations(NAMES, size):
            part: Any = sum(reports[name] for name in some)
            assert chi_square(part.astype(word).tobytes()) > 1e-4, some
    assert chi_square(values["east"].tobytes()) < 1e-9, "or the test would see noise everywhere"


def test_another_context_gives_another_mask() -> None:
    zeros = {name: np.zeros(1000, "<u4") for name in NAMES}
    one, other = (masked(zeros, PRIVATE, "federation", round) for round in ("1", "2"))
    assert all(np.mean(one[name] == other[name]) < 0.01 for name in NAMES)
    assert derived(b"s" * 32, "a", "bc") != derived(b"s" * 32, "ab", "c"), "parts must not run together"


def test_the_key_stream_is_chacha20() -> None:
    """RFC 8439, appendix A.1, test vector 1: key, counter and nonce are zero."""
    values = np.zeros(16, "<u4")
    add_mask(values, bytes(32))
    assert values.tobytes().hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    add_mask(values, bytes(32), -1)
    assert not values.any()


def test_a_pair_agrees_and_a_key_that_forces_the_secret_is_refused() -> None:
    one, other = new_private(), new_private()
    assert agreed(one, public_of(other)) == agreed(other, public_of(one)) != agreed(one, public_of(new_private()))
    with pytest.raises(ValueError):
        agreed(one, bytes(32))


@pytest.mark.parametrize("length", [16, 32])
def test_a_secret_comes_back_from_any_shares_from_the_threshold_on(length: int) -> None:
    secret = bytes(range(length))
    shares = dict(enumerate(split(secret, 3, 5), 1))
    assert all(len(share) == length for share in shares.values())
    for some in combinations(shares, 3):
        assert combined({number: shares[number] for number in some}, 3) == secret
    for some in combinations(shares, 2):
        with pytest.raises(ValueError, match="there are 2 shares, and 3 are needed"):
            combined({number: shares[number] for number in some}, 3)
        assert combined({number: shares[number] for number in some}, 2) != secret, "two say nothing of it"


def test_what_is_sealed_opens_with_its_key_alone() -> None:
    key = derived(b"s", "from", "to")
    box = sealed(key, b"a share")
    assert unsealed(key, box) == b"a share" and sealed(key, b"a share") != box
    for damaged, wrong in ((box, derived(b"s", "to", "from")), (box[:-1], key), (b"", key)):
        with pytest.raises(ValueError, match="not sealed for this site"):
            unsealed(wrong, damaged)


def test_more_than_two_thirds_open_a_sum() -> None:
    assert [threshold(count, 3) for count in (3, 4, 5, 6, 10, 50)] == [3, 3, 4, 5, 7, 34]
    assert threshold(5, 5) == 5
    for count in range(3, 60):  # two groups have more than a third in common
        assert 3 * (2 * threshold(count, 2) - count) > count >= threshold(count, 2)
