"""The averaging rules on numbers small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.maths import averaging
from fedloom.maths.averaging import AVERAGING, clipped, coverage, coverage_effort, coverage_equal, fedavg, median, trimmed_mean

EXAMPLES = [1.0, 3.0]
UPDATES = [{"w": np.array([4.0, 8.0, 2.0, 0.0], np.float32)}, {"w": np.array([8.0, 0.0, 6.0, 0.0], np.float32)}]
# Both trained entry 0 and 2, client 0 alone entry 1, nobody entry 3; client 0 was three times as busy on entry 2.
COUNTS = [{"w": np.array([1, 2, 3, 0])}, {"w": np.array([1, 0, 1, 0])}]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("fedavg", [7.0, 2.0, 5.0, 0.0]),  # (4 + 24) / 4, 8 / 4, (2 + 18) / 4
        ("coverage", [7.0, 8.0, 5.0, 0.0]),  # entry 1: client 0 alone
        ("coverage_equal", [6.0, 8.0, 4.0, 0.0]),  # examples do not count
        ("coverage_effort", [7.0, 8.0, 4.0, 0.0]),  # entry 2: (3 * 2 + 3 * 6) / (3 + 3)
    ],
)
def test_by_hand(rule: str, expected: list[float]) -> None:
    mean = AVERAGING[rule].make(UPDATES, COUNTS, EXAMPLES)
    assert list(mean) == ["w"]
    assert mean["w"].dtype == np.float32
    assert mean["w"].tolist() == expected


def test_entries_nobody_trained_stay_even_if_their_updates_do_not() -> None:
    updates = [{"w": np.array([5.0, 5.0])}, {"w": np.array([7.0, 7.0])}]
    counts = [{"w": np.array([0, 1])}, {"w": np.array([0, 0])}]
    for rule in (coverage, coverage_equal, coverage_effort):
        assert rule(updates, counts, EXAMPLES)["w"].tolist() == [0.0, 5.0]


def test_compact_coverage_broadcasts() -> None:
    first, second = np.full((2, 3), 4.0, np.float32), np.full((2, 3), 8.0, np.float32)
    # Client 0 trained row 0 whole, client 1 columns 0 and 1 whole.
    counts = [{"w": np.array([[1], [0]])}, {"w": np.array([[1, 1, 0]])}]
    mean = coverage([{"w": first}, {"w": second}], counts, EXAMPLES)
    assert mean["w"].tolist() == [[7.0, 7.0, 4.0], [8.0, 8.0, 0.0]]
    whole = [{"w": np.broadcast_to(client["w"], (2, 3))} for client in counts]
    assert np.array_equal(mean["w"], coverage([{"w": first}, {"w": second}], whole, EXAMPLES)["w"])


def test_compact_counts_weigh_effort() -> None:
    updates = [{"w": np.full((2, 2), 1.0)}, {"w": np.full((2, 2), 4.0)}]
    counts = [{"w": np.array([[2], [0]], np.int32)}, {"w": np.array([[1, 0]], np.int32)}]
    # n c: row 0 has 1 * 2, column 0 has 3 * 1.
    assert coverage_effort(updates, counts, EXAMPLES)["w"].tolist() == [[(2 + 12) / 5, 1.0], [4.0, 0.0]]


def test_coverage_may_be_boolean() -> None:
    yes_or_no = [{"w": client["w"] > 0} for client in COUNTS]
    for rule in (coverage, coverage_equal):
        assert np.array_equal(rule(UPDATES, yes_or_no, EXAMPLES)["w"], rule(UPDATES, COUNTS, EXAMPLES)["w"])
    assert np.array_equal(coverage_effort(UPDATES, yes_or_no, EXAMPLES)["w"], coverage(UPDATES, COUNTS, EXAMPLES)["w"])


def test_fedavg_needs_no_coverage() -> None:
    assert fedavg(UPDATES, [], EXAMPLES)["w"].tolist() == [7.0, 2.0, 5.0, 0.0]


def test_every_parameter_is_averaged_by_itself() -> None:
    updates = [{"a": np.array([2.0]), "b": np.array([[1.0]])}, {"a": np.array([6.0]), "b": np.array([[9.0]])}]
    counts = [{"a": np.array([1]), "b": np.array([[0]])}, {"a": np.array([1]), "b": np.array([[1]])}]
    mean = coverage(updates, counts, EXAMPLES)
    assert mean["a"].tolist() == [5.0] and mean["b"].tolist() == [[9.0]]


def test_sums_are_made_in_double_precision() -> None:
    # In float32, 1e8 + 1 - 1e8 is 0.
    updates = [{"w": np.array([value], np.float32)} for value in (1e8, 1.0, -1e8)]
    assert fedavg(updates, [], [1.0, 1.0, 1.0])["w"][0] == np.float32(1 / 3)


def test_numbers_of_clients_must_agree() -> None:
    with pytest.raises(ValueError):
        coverage(UPDATES, COUNTS, [1.0])
    with pytest.raises(ValueError):
        coverage(UPDATES, COUNTS[:1], EXAMPLES)


def test_the_rules_are_known_by_their_names() -> None:
    rules = {"fedavg": fedavg, "coverage": coverage, "coverage_equal": coverage_equal, "coverage_effort": coverage_effort}
    robust = {"clipped": clipped, "median": median, "trimmed_mean": trimmed_mean}
    assert {**rules, **robust} == {name: entry.make for name, entry in AVERAGING.items()}


def test_robust_rules_by_hand() -> None:
    # five clients, lengths 1, 1, 1, 1 and 10 (a liar): the last is shortened to 1
    updates = [{"w": np.array(values, np.float32)} for values in ([1, 0], [0, 1], [0.6, 0.8], [0.8, 0.6], [-10, 0])]
    everything = [{"w": np.ones(2, int)}] * 5
    weights = [1.0, 1.0, 1.0, 1.0, 4.0]
    assert clipped(updates, everything, weights)["w"] == pytest.approx([(1 + 0 + 0.6 + 0.8 - 1) / 5, 2.4 / 5])  # it weighs 1, too
    assert median(updates, everything, weights)["w"] == pytest.approx([0.6, 0.6])
    assert trimmed_mean(updates, everything, weights)["w"] == pytest.approx([(0 + 0.6 + 0.8) / 3, (0 + 0.6 + 0.8) / 3])
    for rule in (clipped, median, trimmed_mean):  # without coverage all trained everything
        assert np.array_equal(rule(updates, [], weights)["w"], rule(updates, everything, weights)["w"])


def test_robust_rules_ask_those_who_trained_an_entry() -> None:
    updates = [{"w": np.array(values, np.float32)} for values in ([0.6, 0, 0.8], [0.8, 0.6, 0], [0, 0.8, 0.6], [30, 40, 0])]
    counts = [{"w": np.array(steps)} for steps in ([1, 0, 1], [2, 1, 0], [0, 3, 5], [0, 0, 0])]  # the liar trained nothing
    for rule in (median, trimmed_mean):  # two each, between whom there is no middle but their mean
        assert rule(updates, counts, [1.0] * 4)["w"] == pytest.approx([0.7, 0.7, 0.7])
    assert clipped(updates, counts, [1.0, 3.0, 1.0, 9.0])["w"] == pytest.approx([(0.6 + 1.6) / 3, (1.2 + 0.8) / 3, 0.7])  # at most 2


def test_trimming_grows_with_the_number_of_clients() -> None:
    for clients, kept in ((2, 2), (3, 1), (5, 3), (9, 7), (10, 6)):
        updates = [{"w": np.array([1.0, 0.0]) if i % 2 else np.array([0.0, 1.0])} for i in range(clients)]
        values = sorted(float(update["w"][0]) for update in updates)
        cut = (clients - kept) // 2
        assert trimmed_mean(updates, [], [1.0] * clients)["w"][0] == pytest.approx(np.mean(values[cut : clients - cut]))


def test_large_sums_are_the_same_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, rows = np.random.default_rng(0), range(3, 12)
    updates = [{f"w{size}": draw.normal(size=(size, 4)).astype(np.float32) for size in rows} for _ in EXAMPLES]
    counts = [{f"w{size}": draw.integers(0, 2, (size, 1)) for size in rows} for _ in EXAMPLES]
    alone = coverage(updates, counts, EXAMPLES)
    monkeypatch.setattr(averaging, "LARGE", 0)
    threads = coverage(updates, counts, EXAMPLES)
    assert list(alone) == list(threads) and all(alone[name].tobytes() == threads[name].tobytes() for name in alone)
