"""How good a classifier's probabilities are, against scikit-learn and by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, precision_score, recall_score, roc_auc_score

from fedloom.core.judgement import Judgement, pooled
from fedloom.maths import judging

RNG = np.random.default_rng(5)
LABELS = RNG.integers(0, 4, 300)
LOGITS = RNG.normal(size=(300, 4)) + 1.5 * np.eye(4)[LABELS]
SAID = LOGITS.argmax(1)


def test_per_class_numbers_are_those_of_scikit_learn() -> None:
    found = judging.confusion_matrix(LABELS, SAID, 4)
    assert np.array_equal(found, confusion_matrix(LABELS, SAID)) and found.sum() == 300
    assert judging.sensitivity(found) == pytest.approx(recall_score(LABELS, SAID, average=None))
    assert judging.precision(found) == pytest.approx(precision_score(LABELS, SAID, average=None))
    assert judging.balanced_accuracy(found) == pytest.approx(balanced_accuracy_score(LABELS, SAID))


def test_classes_without_images_and_classes_never_said_have_no_share() -> None:
    found = judging.confusion_matrix(np.array([0, 0, 1]), np.array([0, 0, 0]), 3)
    assert np.array_equal(judging.sensitivity(found), [1, 0, np.nan], equal_nan=True)
    assert np.array_equal(judging.precision(found), [2 / 3, np.nan, np.nan], equal_nan=True)
    assert judging.balanced_accuracy(found) == 0.5


def test_auroc_counts_ties_half() -> None:
    scores, positive = np.round(LOGITS[:, 1], 1), LABELS == 1
    assert len(set(scores)) < 100
    assert judging.auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores))
    assert judging.auroc(scores[positive], positive[positive]) is None


@pytest.mark.parametrize("true", [0.7, 2.0, 4.0])
def test_the_temperature_that_spoiled_logits_is_found(true: float) -> None:
    logits = 2 * RNG.normal(size=(20_000, 3))
    drawn = np.array([RNG.choice(3, p=row) for row in softmax(logits, axis=1)])
    assert judging.fit_temperature(true * logits, drawn) == pytest.approx(true, rel=0.05)


def test_a_few_images_that_are_all_right_do_not_make_a_model_certain() -> None:
    logits = 3 * np.eye(3)[[0, 1, 2] * 10]
    assert judging.fit_temperature(logits, np.array([0, 1, 2] * 10)) == pytest.approx(judging.COLDEST, rel=1e-3)
    assert judging.fit_temperature(logits[:9], np.array([1, 1, 2] * 3)) == 1.0


def test_calibration_error_by_hand() -> None:
    probabilities = np.array([[0.85, 0.15], [0.85, 0.15], [0.25, 0.75], [1.0, 0.0]])
    bins = judging.reliability(probabilities, np.array([0, 1, 1, 0]))
    assert [entry[0] for entry in bins] == [0, 0, 0, 0, 0, 0, 0, 1, 2, 1]
    assert bins[8] == (2, pytest.approx(0.85), 0.5) and bins[9] == (1, 1.0, 1.0)
    assert judging.calibration_error(bins) == pytest.approx((0.25 + 2 * 0.35 + 0) / 4)


def test_the_threshold_keeps_nearly_all_that_were_right() -> None:
    probabilities = softmax(LOGITS, axis=1)
    threshold, right = judging.rejection_threshold(probabilities, LABELS), SAID == LABELS
    kept = (probabilities.max(1) >= threshold)[right].mean()
    assert 0.95 <= kept < 0.97 and threshold > 0.25
    assert judging.rejection_threshold(probabilities[~right], LABELS[~right]) == 0.0


def test_a_network_that_diverged_leaves_numbers() -> None:
    """What is written as JSON has no NaN in it."""
    logits = np.where(np.arange(len(LOGITS))[:, None] == 3, np.nan, LOGITS)
    assert judging.calibrated(logits, LABELS) == (1.0, 0.0)
    found = judging.judge(np.full_like(LOGITS, np.nan), LABELS, np.zeros((8, 4)), 1.0, 0.0)
    json.dumps(found.__dict__, allow_nan=False)


def test_all_of_it_together_and_through_json() -> None:
    temperature, threshold = judging.calibrated(3 * LOGITS[:150], LABELS[:150])
    found = judging.judge(3 * LOGITS[150:], LABELS[150:], np.zeros((8, 4)), temperature, threshold)
    assert temperature > 1.5 and found.calibrated_error < found.calibration_error
    assert found.noise_accepted == 0 and found.auroc is None and 0.8 < found.accepted <= 1
    assert found.accepted_accuracy is not None and found.accepted_accuracy > (SAID == LABELS)[150:].mean()
    assert np.array_equal(found.matrix(), confusion_matrix(LABELS[150:], SAID[150:]))
    values = {
        **found.__dict__,
        "confusion": [list(row) for row in found.confusion],
        "reliability": [list(row) for row in found.reliability],
    }
    assert Judgement.of(values) == found
    matrix, bins = pooled([found, found])
    assert np.array_equal(matrix, 2 * found.matrix()) and bins[9][0] == 2 * found.reliability[9][0]
    assert bins[9][1:] == pytest.approx(found.reliability[9][1:])
    two = judging.judge(LOGITS[:, :2], LABELS % 2, LOGITS[:4, :2], 1.0, 0.0)
    assert two.auroc == pytest.approx(roc_auc_score(LABELS % 2, LOGITS[:, 1] - LOGITS[:, 0])) and two.noise_accepted == 1


@pytest.mark.parametrize(
    "change",
    [{"classes": "4"}, {"confusion": [[0, 9, 1]]}, {"confusion": [[0, 1]]}, {"temperature": 0}, {"threshold": 2}, {"auroc": "x"}],
    ids=str,
)
def test_damaged_judgements_are_refused(change: dict[str, object]) -> None:
    found = judging.judge(LOGITS, LABELS, LOGITS, 1.0, 0.5)
    with pytest.raises((ValueError, TypeError)):
        Judgement.of({**found.__dict__, **change})
