"""A search space of the tests that is a plugin."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "plugins"
TOY = str(FOLDER / "toy_supernet.py")  # brings its space with it


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
