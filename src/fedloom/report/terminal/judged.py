"""What models are worth, by class and as probabilities, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from fedloom.core.judgement import Judgement
from fedloom.maths.judging import precision, sensitivity
from fedloom.report.words import many, percent

SHOWN = 12  # classes of a confusion matrix that fits a terminal


def judged_line(name: str, judged: Judgement) -> str:
    matrix = judged.matrix()
    right = int(np.trace(matrix)) / max(int(matrix.sum()), 1)
    parts = [f"{many(int(matrix.sum()), 'image')}, accuracy {percent(right)}, balanced over classes {percent(judged.balanced_accuracy)}"]
    parts += [f"area under the ROC curve {judged.auroc:.3f}"] if judged.auroc is not None else []
    parts.append(f"calibration error {percent(judged.calibrated_error)} at temperature {judged.temperature:.2f}")
    sure = f"sure (at least {percent(judged.threshold)}) of {percent(judged.accepted)} of the images"
    sure += f", and right in {percent(judged.accepted_accuracy)} of these" if judged.accepted_accuracy is not None else ""
    parts.append(f"{sure}; of noise it is sure in {percent(judged.noise_accepted)}")
    return f"{name}: {'; '.join(parts)}"


def class_table(judged: Judgement, classes: Sequence[str]) -> Table:
    table = Table("class", "images", "sensitivity", "precision", "taken for most often", title="by class")
    matrix = judged.matrix()
    found, said = (np.where(np.isnan(shares), -1, shares).tolist() for shares in (sensitivity(matrix), precision(matrix)))
    for number, name in enumerate(classes):
        wrong = matrix[number].copy()
        wrong[number] = 0
        other = f"{classes[int(wrong.argmax())]} ({int(wrong.max())})" if wrong.any() else ""
        shares = [percent(share) if share >= 0 else "–" for share in (found[number], said[number])]
        table.add_row(name, f"{int(matrix[number].sum()):,}", *shares, other)
    return table


def confusion_table(judged: Judgement, classes: Sequence[str]) -> Table | None:
    """Nothing where it would not fit."""
    if len(classes) > SHOWN:
        return None
    table = Table("is / was said to be", *classes, title="confusion matrix")
    for name, row in zip(classes, judged.matrix().tolist(), strict=True):
        table.add_row(name, *(str(count) if count else "·" for count in row))
    return table


def models_table(models: Mapping[str, tuple[float, Judgement]]) -> Table:
    """models: name -> accuracy and judgement."""
    heads = ("client", "accuracy", "balanced", "calibration", "sure", "then right", "noise")
    table = Table(*heads, title="personal models on these images")
    for name, (accuracy, judged) in models.items():
        shares = (accuracy, judged.balanced_accuracy, judged.calibrated_error, judged.accepted, judged.accepted_accuracy)
        table.add_row(name, *map(percent, shares), percent(judged.noise_accepted))
    return table
