"""The diffusion model of a client: loaded once, and guided by nothing but the client's training images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.core.client_site import ClientData, ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.core.sharing import sharing
from fedloom.search.candidates import Candidates
from fedloom.search.diffusion import Diffusion
from fedloom.spaces.base import ImageShape
from fedloom.spaces.budget import BudgetSettings, bounded
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.testing.executions import PIXELS, SLICED, examples_of
from fedloom.training.tools import Tools
from support.untrained import FakeGenerator, fake_generator, loading

SUPERNET = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings.tiny(), ImageShape(1, 8, 3)))
TOOLS = Tools(SUPERNET.space, SUPERNET, SLICED, PIXELS, 3, 3, "clean", torch.device("cpu"))
TRAIN, OTHERS = examples_of(SUPERNET, 12), examples_of(SUPERNET, 12, seed=1)


def diffusion_of(guidance: float, tools: Tools = TOOLS) -> Diffusion:
    return Diffusion(tools, "", "", "", 0, guidance)


def site_of() -> ClientSite:
    return ClientSite("client-000", ClientData(TRAIN, OTHERS, OTHERS))


@pytest.mark.parametrize(("guidance", "strength", "guided"), [(-1, None, True), (2.5, 2.5, True), (0, 0, False)])
def test_guidance_is_by_the_training_images_and_as_strong_as_it_says(guidance: float, strength: float | None, guided: bool) -> None:
    with fake_generator() as loaded:
        diffusion, site = diffusion_of(guidance), site_of()
        drawn = diffusion.draw_for(site)(5, rng("draw"))
    ((count, task, used),) = loaded[0].calls
    assert (count, len(drawn), used) == (5, 5, strength) and diffusion.guided == guided == (task is not None)
    if task is not None:
        assert torch.equal(task, FakeGenerator(SUPERNET.space).task(TRAIN.images, TRAIN.labels))  # type: ignore[arg-type]
    assert not site.clock.seconds  # it may draw beside other work: who waits for it counts


def test_a_generator_without_a_predictor_says_so() -> None:
    with fake_generator(guided=False) as loaded:
        diffusion = diffusion_of(-1)
        diffusion.draw_for(site_of())(5, rng("draw"))
        assert not diffusion.guided and loaded[0].calls[0][1] is None
        with pytest.raises(InvalidConfig, match=r"perfedsde.guidance is 5, but the generator of .* no predictor"):
            _ = diffusion_of(5).generator


def test_it_is_loaded_by_who_draws_once_and_for_the_whole_space() -> None:
    within = replace(TOOLS, space=bounded(SUPERNET.space, BudgetSettings(macs=1e9), 8, lambda architecture: 0.0))
    asked: list[tuple[Any, ...]] = []

    def load(*given: Any) -> FakeGenerator:
        asked.append(given)
        return FakeGenerator(given[0])

    with loading(load), sharing():
        mine = Diffusion(within, "mine.safetensors", "theirs", "pc", 7, -1)
        assert asked == []
        assert mine.generator is mine.generator is replace(mine).generator
    assert asked == [(SUPERNET.space, "mine.safetensors", "theirs", torch.device("cpu"), "pc", 7, True)]


@pytest.mark.parametrize("guidance", [-1, 0])
def test_candidates_are_drawn_at_once_for_all_iterations(guidance: float) -> None:
    with fake_generator() as loaded:
        site = site_of()
        source = Candidates(SUPERNET.space, "diffusion", "none", offspring=4, count=30, mutation=0.1, clock=site.clock)
        candidates = source.drawn_by(diffusion_of(guidance), site, 3, rng("generator"))
        found = [candidates.choose([], rng("choose", turn)) for turn in range(3)]
        assert [count for count, _, _ in loaded[0].calls] == [3 * 4]
        again = diffusion_of(guidance).draw_for(site)(3 * 4, rng("generator"))
    assert [one for some in found for one in some] == again
    assert candidates.notes["guided"] == (guidance != 0) and "guided" not in source.notes
    assert set(site.clock.seconds) == {"generate"}
