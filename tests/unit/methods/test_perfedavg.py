"""Per-FedAvg: what its settings make of a step. The gradients themselves are in tests/unit/training/test_adaptation.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.testing import Played
from fedloom.training.adaptation import Adaptation

ONE_STEP = ("training.schedule=constant", "training.rate=0.1", "training.weight_decay=0", "training.crop=0", "participants=1")


def play(tiny: Callable[..., Settings], *changes: str) -> Played:
    return Played(tiny("method=perfedavg", *ONE_STEP, *changes))


def test_settings_say_what_is_differentiated(tiny: Callable[..., Settings]) -> None:
    cases = {
        ("perfedavg.step=0.2",): Adaptation(0.2),
        ("perfedavg.step=0.2", "perfedavg.order=hessian_free", "perfedavg.probe=0.5"): Adaptation(0.2, 0.5),
    }
    for changes, expected in cases.items():
        played, asked = play(tiny, *changes), []
        train = played.tools.trainer.train_networks
        played.tools.trainer.train_networks = lambda jobs, train=train, asked=asked: (asked.extend(jobs), train(jobs))[1]  # type: ignore[method-assign]
        (answer,) = played.round()
        assert [job.adaptation for job in asked] == [expected]
        played.farewell(answer.report.client)
        assert {job.adaptation for job in asked[1:]} == {None}  # fine-tuning is plain


def test_three_kinds_of_steps_differ(tiny: Callable[..., Settings]) -> None:
    """Without an inner step it is plain SGD on a half of the batch."""
    still, first, whole = (
        play(tiny, *changes).round()[0].report.arrays["update"]
        for changes in (("perfedavg.step=0",), ("perfedavg.step=0.5",), ("perfedavg.step=0.5", "perfedavg.order=hessian_free"))
    )
    for one, other in ((still, first), (first, whole), (still, whole)):
        assert any(not np.allclose(array, other[name], rtol=1e-3, atol=1e-6) for name, array in one.items())


def test_too_few_images_for_a_step_are_refused(tiny: Callable[..., Settings]) -> None:
    with pytest.raises(InvalidData, match=r"needs 3 images.*Raise split\.size"):
        play(tiny, "perfedavg.order=hessian_free", "training.batch=2").round()
    assert play(tiny, "training.batch=2").round()


def test_half_precision_cannot_measure_differences(tiny: Callable[..., Settings]) -> None:
    with pytest.raises(InvalidConfig, match=r"training\.precision=full"):
        play(tiny, "perfedavg.order=hessian_free", "training.precision=half").round()
    assert play(tiny, "training.precision=half").round()
