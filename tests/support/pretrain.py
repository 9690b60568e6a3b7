"""A pretraining small enough for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.assemble import pretraining
from fedloom.generator import pretrain as module
from fedloom.generator.generator import AnyGenerator

STAGES = ("denoiser", "features", "supernet", "labels", "predictor")
SMALL = ("denoiser.architectures=100", "denoiser.steps=2", "denoiser.batch=8", "denoiser.width=8", "denoiser.layers=1", "denoiser.heads=2")
TINY = (
    *SMALL,
    *("data.name=digits", "mobilenetv3.width=0.05", "mobilenetv3.strides=[2,2,1,1,1]", "seed=3"),
    *("features.epochs=1", "features.batch=256", "proxy.reserved=90", "proxy.tasks=6", "proxy.held_out_tasks=3", "proxy.task_sizes=[2,3]"),
    'proxy.conditions=["plain"]',
    *("supernet.epochs=2", "supernet.batch=128", "labels.architectures=12", "labels.images=2", "labels.calibration=8"),
    *("predictor.steps=2", "predictor.tasks=2", "predictor.architectures=4", "predictor.width=8"),
)
Told = list[tuple[str, int, int, str]]


class Stopped(Exception):
    """What a progress callback raises."""


def pretrain(folder: Path, *changes: str, stop: tuple[str, int] | None = None, space: str = "mobilenetv3") -> tuple[AnyGenerator, Told]:
    """The generator and everything that was told meanwhile. stop: at this stage, when so much of it is done."""
    told: Told = []

    def progress(stage: str, done: int, total: int, remark: str) -> None:
        told.append((stage, done, total, remark))
        if (stage, done) == stop:
            raise Stopped

    base = TINY if space == "mobilenetv3" else SMALL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DRAWN", 40)
        patch.setattr(module, "BLOCK", 4)
        return pretraining.pretrain(pretraining.plan(space, [*base, *changes]), folder, "cpu", progress), told
