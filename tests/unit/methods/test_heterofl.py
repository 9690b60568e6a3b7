"""HeteroFL: who trains which channels, and the average of what clients hold, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom import config
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.hardware import Hardware
from fedloom.core.messages import TRAIN, Report
from fedloom.spaces.networks import RESNET, WIDTHS
from fedloom.testing import Played

Tiny = Callable[..., Settings]
TIERS = ("hardware.gmacs=[100, 10]", "heterofl.widths=[1, 0.25]")


def play(tiny: Tiny, *more: str) -> Played:
    return Played(tiny("method=heterofl", "space=networks", *more))


def sent(played: Played, client: str) -> Any:
    instruction = played.method.instruct(played.state, client, TRAIN)
    return Architecture.parse(str(instruction.facts["architecture"])), instruction


def test_a_share_is_the_next_width_that_the_space_offers(tiny: Tiny) -> None:
    method = play(tiny).method
    for number, width in enumerate(WIDTHS):
        assert method.slice(0, width / WIDTHS[-1]).choices == (RESNET, number)
        assert method.slice(0, 0.9 * width / WIDTHS[-1]).choices == (RESNET, number)  # at least as wide
    other = play(tiny, "space=mobilenetv3", "heterofl.architecture=largest").method
    whole, half = np.array(other.slice(0, 1.0).choices), np.array(other.slice(0, 0.5).choices)
    assert np.array_equal(whole, other.tools.space.named["largest"].choices)
    assert set(half[20:40]) == {0} and np.array_equal(half[:20], whole[:20]) and np.array_equal(half[40:], whole[40:])


def test_entries_are_averaged_over_those_that_hold_them(tiny: Tiny) -> None:
    """Wide, wide, narrow: the first channels are a mean of three, the others of two, whatever their examples; the rest stays."""
    played = play(tiny, *TIERS, "clients=3", "participants=3")
    names = played.federation.names
    state = replace(played.state, tiers={names[0]: np.array(0), names[1]: np.array(0), names[2]: np.array(1)})
    reports = []
    for client, change, examples in zip(names, (1.0, 3.0, 8.0), (10, 90, 7), strict=True):
        instruction = played.method.instruct(state, client, TRAIN)
        update = {name: np.full_like(array, change) for name, array in instruction.arrays["weights"].items()}
        reports.append(Report(client, 0, {"update": update}, {"examples": examples, "tier": int(state.tiers[client])}))
    after = played.method.absorb(state, reports)
    narrow = played.tools.supernet.regions(played.method.slice(0, 0.25))
    for name, before in state.weights.items():
        moved = after.weights[name] - before
        if name not in narrow:  # of the other networks
            assert not moved.any()
            continue
        expected = np.full_like(before, (1 + 3) / 2)
        expected[narrow[name]] = (1 + 3 + 8) / 3
        assert np.allclose(moved, expected, rtol=0, atol=1e-5), name


def test_tiers_of_hardware_are_reported_once_and_kept(tiny: Tiny) -> None:
    played = play(tiny, *TIERS, "participants=3")
    client, method = played.federation.names[0], played.method
    assert set(method.uploads) == {"update", "examples", "tier"}
    architecture, instruction = sent(played, client)
    assert architecture == method.slice(0, 0.25)  # nobody knows yet what it can do
    site = replace(played.site(client), hardware=Hardware(tier=0))
    report = method.answer(instruction, site).report
    assert report.facts["tier"] == 0
    played.state = method.absorb(played.state, [report])
    assert sent(played, client)[0] == method.slice(0, 1.0)
    assert sent(played, played.federation.names[1])[0] == method.slice(0, 0.25)


def test_without_tiers_each_client_draws_a_width_for_the_whole_run(tiny: Tiny) -> None:
    played = play(tiny, "clients=40", "split.size=4", "split.test_size=2")
    drawn = {client: sent(played, client)[0] for client in played.federation.names}
    assert set(drawn.values()) == {played.method.slice(0, share) for share in (1, 0.5, 0.25, 0.125, 0.0625)}
    played.state = replace(played.state, round=3)
    assert drawn == {client: sent(played, client)[0] for client in played.federation.names}
    assert set(played.method.uploads) == {"update", "examples"}
    client = played.federation.names[0]
    assert played.method.farewell(played.state, client).facts["architecture"] == drawn[client].id


def test_widths_must_fit_the_tiers(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"heterofl\.widths has 1 numbers for 2 tiers.*Give one for each"):
        tiny("method=heterofl", "hardware.gmacs=[1, 2]", "heterofl.widths=[1]")
    with pytest.raises(InvalidConfig, match=r"heterofl\.widths is empty.*\[1, 0\.5"):
        play(tiny, "heterofl.widths=[]")


def test_a_space_without_widths_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="heterofl"):
        config.load("quickstart", ["method=heterofl", "space=darts"])
