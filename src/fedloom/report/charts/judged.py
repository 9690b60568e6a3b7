"""Which classes are taken for which, and whether probabilities can be believed."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.core.judgement import Judgement, pooled
from fedloom.maths.judging import calibration_error, precision, sensitivity
from fedloom.report.charts.data import name_ticks, show_shares
from fedloom.report.figure import BLUE, FAINT, Axis, Figure, Missing, Numbers, Shown
from fedloom.report.view import RunView
from fedloom.report.words import listed, many, percent


def judgements(run: RunView) -> dict[str, Judgement]:
    return {client.name: client.judged for client in run.clients if client.judged is not None}


def judged_figures(run: RunView) -> list[Shown]:
    """Nothing for runs of earlier versions, which did not judge."""
    judged = list(judgements(run).values())
    if not judged or len({one.classes for one in judged} | {len(run.classes)}) > 1:
        return []
    matrix, bins = pooled(judged)
    return [_confusion(run, matrix), _reliability(judged, bins)]


def _confusion(run: RunView, matrix: Any) -> Shown:
    found, said = sensitivity(matrix), precision(matrix)

    def fill(axes: Any) -> None:
        show_shares(axes, np.nan_to_num(matrix / np.maximum(matrix.sum(1, keepdims=True), 1)), BLUE)
        name_ticks(axes.xaxis, run.classes, rotate=max(map(len, run.classes)) > 2)
        name_ticks(axes.yaxis, run.classes)

    def shown(share: float) -> str:
        return percent(None if np.isnan(share) else share)

    def taken_for(number: int) -> str:
        wrong = matrix[number].copy()
        wrong[number] = 0
        return f"{run.classes[int(wrong.argmax())]} ({int(wrong.max())})" if wrong.any() else "–"

    known = [number for number in range(len(run.classes)) if matrix[number].any()]
    worst = sorted(known, key=lambda number: found[number])[:3]
    words = "A row is a class, a column what the models said; the stronger the colour, the larger the share of the row's images. "
    words += f"Least often recognised: {listed([f'{run.classes[number]}, {shown(found[number])}' for number in worst])}."
    columns = ("class", "test images", "sensitivity", "precision", "taken for most often")
    rows = [
        (name, str(int(matrix[number].sum())), shown(found[number]), shown(said[number]), taken_for(number))
        for number, name in enumerate(run.classes)
    ]
    axes = Axis("class that was said", "by name"), Axis("class", "by name")
    height = 1.3 + 0.16 * min(max(len(run.classes), 8), 25)
    return Figure("confusion", "Which classes are taken for which", *axes, words, fill, Numbers(columns, tuple(rows)), height=height)


def _reliability(judged: list[Judgement], bins: tuple[tuple[int, float, float], ...]) -> Shown:
    title, filled = "Can the probabilities be believed?", [entry for entry in bins if entry[0]]
    if not filled:
        return Missing(title, "There is no test image.")
    largest = max(count for count, _, _ in filled)

    def fill(axes: Any) -> None:
        axes.plot([0, 100], [0, 100], color=FAINT, linewidth=0.8, linestyle="--")
        areas = [6 + 80 * count / largest for count, _, _ in filled]
        axes.scatter([100 * entry[1] for entry in filled], [100 * entry[2] for entry in filled], s=areas, color=BLUE)
        axes.set_xlim(0, 102)
        axes.set_ylim(0, 102)

    before = float(np.mean([one.calibration_error for one in judged]))
    words = "A point is a tenth of the scale of confidence, as large as it has images; on the line, confidence is accuracy. "
    words += f"Over all clients they differ by {percent(calibration_error(bins))} on average; of single clients by "
    words += f"{percent(float(np.mean([one.calibrated_error for one in judged])))}, and by {percent(before)} without their temperatures."
    rows = [(str(count), percent(confidence), percent(accuracy)) for count, confidence, accuracy in filled]
    numbers = Numbers(("test images", "mean confidence", "accuracy"), tuple(rows))
    return Figure("reliability", title, Axis("confidence", "%"), Axis("accuracy", "%"), words, fill, numbers)


def judged_table(run: RunView) -> Numbers:
    """Client by client, worst balanced accuracy first."""
    heads = ("client", "balanced accuracy", "calibration error", "temperature", "sure of", "then right", "sure of noise")
    rows = []
    for name, one in sorted(judgements(run).items(), key=lambda pair: (pair[1].balanced_accuracy, pair[0])):
        sure = percent(one.accepted), percent(one.accepted_accuracy), percent(one.noise_accepted)
        rows.append((name, percent(one.balanced_accuracy), percent(one.calibrated_error), f"{one.temperature:.2f}", *sure))
    return Numbers(heads, tuple(rows))


def judged_lead(run: RunView) -> str:
    """In a sentence or two."""
    judged = list(judgements(run).values())
    balanced, noise = (float(np.mean([getattr(one, name) for one in judged])) for name in ("balanced_accuracy", "noise_accepted"))
    lead = f"The personal models of {many(len(judged), 'client')} on their own test images, class by class: balanced over classes, "
    lead += f"{percent(balanced)} are right. A model is sure above a confidence that it reached on nearly all validation images that it "
    return f"{lead}got right; of images of pure noise it is still sure in {percent(noise)}."
