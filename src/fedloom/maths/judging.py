"""How good the probabilities of a classifier are: by class, and as probabilities.

Calibration follows Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks (ICML 2017): one temperature divides all
logits, which changes no prediction, and the expected calibration error compares confidence with accuracy in bins of equal width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedloom.core.judgement import Judgement

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

BINS = 10
COLDEST, HOTTEST = 0.5, 10.0  # temperatures; images that are all right would ask for 0, which is certainty from a few images
LEAST = 10  # images that a temperature is fitted to; fewer say nothing
KEPT = 0.95  # of the images that are right on validation data, this share is above the threshold


def confusion_matrix(labels: Integers, said: Integers, classes: int) -> Integers:
    """(classes, classes): images of each class (rows) by what was said of them (columns)."""
    return np.bincount(labels * classes + said, minlength=classes * classes).reshape(classes, classes).astype(np.int64)


def sensitivity(confusion: Integers) -> Numbers:
    """(classes,) share of each class's images that were recognised; nan for a class without images."""
    return _shares(np.diag(confusion), confusion.sum(1))


def precision(confusion: Integers) -> Numbers:
    """(classes,) share of what was said to be of a class that is; nan for a class that was never said."""
    return _shares(np.diag(confusion), confusion.sum(0))


def balanced_accuracy(confusion: Integers) -> float:
    """Mean sensitivity over the classes that have images: the same for always saying the most frequent class as for guessing."""
    found = sensitivity(confusion)
    return float(found[~np.isnan(found)].mean()) if confusion.sum() else float("nan")


def _shares(some: Integers, of: Integers) -> Numbers:
    shares: Numbers = np.divide(some, of, out=np.full(len(of), np.nan), where=of > 0)
    return shares


def auroc(scores: Numbers, positive: npt.NDArray[np.bool_]) -> float | None:
    """Chance that an image of the positive class has the higher score, ties counted half (Mann and Whitney); nothing without both kinds."""
    from scipy.stats import rankdata  # slow to import, needed here only

    hits, misses = int(positive.sum()), int((~positive).sum())
    if not (hits and misses):
        return None
    return float((rankdata(scores)[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


def fit_temperature(logits: Numbers, labels: Integers) -> float:
    """The one that makes the labels most likely, between bounds; 1 where there are too few images. logits: (images, classes)."""
    from scipy.optimize import minimize_scalar  # slow to import, needed here only
    from scipy.special import log_softmax  # as above

    if len(labels) < LEAST:
        return 1.0
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(logits / np.exp(log_temperature), axis=1)[rows, labels].mean())

    return float(np.exp(minimize_scalar(loss, bounds=(np.log(COLDEST), np.log(HOTTEST)), method="bounded").x))


def reliability(probabilities: Numbers, labels: Integers) -> tuple[tuple[int, float, float], ...]:
    """Images by confidence, in bins of equal width: (images, their mean confidence, their accuracy); zeros for an empty bin."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    places = np.minimum((np.nan_to_num(confidence, nan=-1.0) * BINS).astype(int), BINS - 1)  # in no bin where it is not a number
    found = []
    for place in range(BINS):
        own = places == place
        count = int(own.sum())
        found.append((count, float(confidence[own].mean()), float(right[own].mean())) if count else (0, 0.0, 0.0))
    return tuple(found)


def calibration_error(bins: tuple[tuple[int, float, float], ...]) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over images."""
    images = sum(count for count, _, _ in bins)
    return sum(count * abs(confidence - accuracy) for count, confidence, accuracy in bins) / images if images else 0.0


def rejection_threshold(probabilities: Numbers, labels: Integers) -> float:
    """The confidence that all but a few of the images that were right have; 0, which rejects nothing, if none was. Of validation data."""
    right = probabilities.argmax(1) == labels
    return float(np.quantile(probabilities.max(1)[right], 1 - KEPT, method="lower")) if right.any() else 0.0


def _softmax(logits: Numbers) -> Numbers:
    """(images, classes): over the classes."""
    from scipy.special import softmax  # slow to import, needed here only

    shares: Numbers = softmax(logits, axis=1)
    return shares


# -- all of it -----------------------------------------------------------------------------
def calibrated(logits: Numbers, labels: Integers) -> tuple[float, float]:
    """Temperature and threshold, from validation data; 1 and 0, which change nothing, where a network's logits are not numbers."""
    if not np.isfinite(logits).all():
        return 1.0, 0.0
    temperature = fit_temperature(logits, labels)
    return temperature, rejection_threshold(_softmax(logits / temperature), labels)


def judge(logits: Numbers, labels: Integers, noise: Numbers, temperature: float, threshold: float) -> Judgement:
    """Of test images, and of images of noise, both (images, classes)."""
    classes, said = logits.shape[1], logits.argmax(1)
    plain, tempered, in_noise = (_softmax(part) for part in (logits, logits / temperature, noise / temperature))
    confusion = confusion_matrix(labels, said, classes)
    sure = tempered.max(1) >= threshold
    bins = reliability(tempered, labels)
    return Judgement(
        classes=classes,
        confusion=tuple((int(row), int(column), int(confusion[row, column])) for row, column in np.argwhere(confusion)),
        balanced_accuracy=balanced_accuracy(confusion),
        auroc=auroc(logits[:, 1] - logits[:, 0], labels == 1) if classes == 2 else None,
        temperature=temperature,
        calibration_error=calibration_error(reliability(plain, labels)),
        calibrated_error=calibration_error(bins),
        reliability=bins,
        threshold=threshold,
        accepted=float(sure.mean()),
        accepted_accuracy=float((said == labels)[sure].mean()) if sure.any() else None,
        noise_accepted=float((in_noise.max(1) >= threshold).mean()),
    )
