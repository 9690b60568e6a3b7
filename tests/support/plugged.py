"""Plugins of the tests, taken back afterwards: what a test registers must not be there for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom import config, plugins

FOLDER = Path(__file__).parent / "plugins"
TOY = str(FOLDER / "toy_supernet.py")  # brings its space with it


@contextmanager
def taken_back() -> Iterator[None]:
    undo = plugins.remember()
    try:
        yield
    finally:
        undo()


@contextmanager
def plugged(*names: str) -> Iterator[None]:
    with taken_back():
        config.plug_in(names)
        yield


# A generator for the toy space in seconds: enough to see that guidance works, too little for a good one.
SECONDS = (
    *(
        "data.name=digits",
        "denoiser.architectures=4000",
        "denoiser.steps=400",
        "denoiser.batch=128",
        "denoiser.width=16",
        "denoiser.rate=0.005",
    ),
    *(
        "denoiser.layers=1",
        "denoiser.heads=2",
        "denoiser.average=0.98",
        "features.epochs=1",
        "features.batch=64",
        "supernet.epochs=6",
        "supernet.batch=64",
    ),
    *(
        "supernet.rate=0.1",
        "proxy.reserved=40",
        "proxy.tasks=30",
        "proxy.held_out_tasks=6",
        "proxy.task_sizes=[3,5]",
        'proxy.conditions=["plain"]',
    ),
    *("labels.architectures=150", "labels.images=30", "labels.calibration=50"),
    *("predictor.steps=60", "predictor.tasks=4", "predictor.architectures=32", "predictor.width=32"),
)
