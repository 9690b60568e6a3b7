"""Generators from the command line: train one for a space, draw architectures from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom import config
from fedloom.assemble.environment import usable_device
from fedloom.config import space_settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.seeds import rng
from fedloom.data.readers import DATASETS, Dataset, DataSettings, read
from fedloom.generator.files import load_generator
from fedloom.generator.generator import STRONGEST, AnyGenerator
from fedloom.generator.pretrain import Pretraining, PretrainSettings, Progress
from fedloom.generator.proxy import make_proxy
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import Supernet, make_supernet

PROXY_DATA = "tinyimagenet"  # public, and no data set that methods are compared on
ANY_IMAGE = ImageShape(3, 32, 10)  # genes do not depend on it


@dataclass(frozen=True)
class Plan:
    """What ``fedloom pretrain`` was asked for."""

    space: str
    space_settings: Any
    data: DataSettings
    settings: PretrainSettings

    def supernet(self, image: ImageShape) -> Supernet[Any]:
        return make_supernet(self.space, self.space_settings, image)


def plan(space: str, overrides: Sequence[str]) -> Plan:
    """Settings of the stages by their names (denoiser.steps=…), of the data (data.folder=…) and of the space (mobilenetv3.width=…)."""
    SPACES[space]  # refuses an unknown name
    table = config.table_of([f"data.name={PROXY_DATA}", *overrides])
    own, data = table.pop(space, {}), table.pop("data")
    if other := [name for name in table if name in SPACES]:
        raise InvalidConfig(f"{other[0]} is not {space}, the space that gets a generator", key=other[0])
    return Plan(
        space,
        config.fill(SPACES[space].settings, own, space),
        config.fill(DataSettings, data, "data"),
        config.fill(PretrainSettings, table),
    )


def pretrain(work: Plan, folder: Path, device: str, progress: Progress) -> AnyGenerator:
    where = usable_device(device, "--device")
    training = Pretraining(work.supernet(ANY_IMAGE).space, work.settings, folder, where, progress)
    proxy = make_proxy(read(work.data), work.settings.proxy, where) if work.settings.guided else None
    return training.run(lambda proxy: work.supernet(proxy.image), proxy)


def generate(
    space: str,
    overrides: Sequence[str],
    count: int,
    seed: int,
    data: str,
    file: str = "",
    features: str = "",
    strength: float | None = None,
    sampler: str = "",
    steps: int = 0,
) -> tuple[AnyGenerator, list[Architecture]]:
    """Architectures of a space: for the images of a folder or a data set, or of the whole space if ``data`` is empty."""
    if not data and (strength is not None or features):
        which = "--strength" if strength is not None else "--features"
        raise InvalidConfig(f"{which} needs images that guide. Name them with --data")
    if strength is not None and not 0 <= strength <= STRONGEST:
        raise InvalidConfig(f"--strength {strength:g} is not between 0 and {STRONGEST:g}")
    chosen = make_supernet(space, space_settings(space, overrides), ANY_IMAGE).space
    generator = load_generator(chosen, file, features, usable_device("auto"), sampler, steps, guided=bool(data))
    task = None
    if data:
        if not generator.guided:
            raise InvalidConfig(
                f"This generator of {space} has no predictor, so data cannot guide it. Leave --data out, or train one with it"
            )
        pool = _images(data).train
        task = generator.task(torch.from_numpy(pool.images), torch.from_numpy(pool.labels))
    return generator, generator.draw(count, rng(seed, "generate"), task, strength)


def _images(data: str) -> Dataset:
    """A data set by name, in the folder ``data``, or a folder of images."""
    named = [name for name in DATASETS if name not in ("folder", "sites")]  # which need to be told where
    if data in named:
        return read(DataSettings(name=data))
    if not Path(data).is_dir():
        names = ", ".join(named)
        raise InvalidData(f"--data {data} is neither a folder of class folders nor a data set ({names})", place=data)
    return read(DataSettings(name="folder", folder=data))
