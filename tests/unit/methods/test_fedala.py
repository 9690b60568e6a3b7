"""FedALA: the mix of one's own and the shared classifier, by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientMemory
from fedloom.core.seeds import rng
from fedloom.methods.fedala import LOSSES, MOST, mixed, remixed
from fedloom.methods.fixed import Visit
from fedloom.testing import Played

ONE_BATCH = ("training.batch=100", "training.schedule=constant", "training.rate=0.1", "training.crop=0", "participants=3")


def play(tiny: Callable[..., Settings], *changes: str) -> Played:
    return Played(tiny("method=fedala", *ONE_BATCH, *changes))


def test_a_mix_of_two_weights() -> None:
    own, shared = {"w": torch.tensor([1.0, 1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0, 1.0])}
    mix = {"w": torch.tensor([1.0, 0.25, 0.5])}
    assert mixed(own, shared, mix)["w"].tolist() == [3.0, 1.5, 1.0]
    after = remixed(own, shared, mix, {"w": torch.tensor([0.1, -0.5, 9.0])}, 1.0)["w"]
    assert after.tolist() == pytest.approx([0.8, 1.0, 0.5])  # 1 - 0.1 · 2; 0.25 + 0.5 · 2, kept at 1; nothing to mix


def test_the_first_round_is_fedavg_and_remembers_the_classifier(tiny: Callable[..., Settings]) -> None:
    plainly, played = Played(tiny("method=fedavg", *ONE_BATCH)), play(tiny)
    for one, other in zip(plainly.round(), played.round(), strict=True):
        received = played.instructions[0].arrays["weights"]
        for name, update in one.report.arrays["update"].items():
            assert np.array_equal(other.report.arrays["update"][name], update), name
        assert set(other.memory.arrays) == {"own/classifier.weight", "own/classifier.bias"}
        for name in ("classifier.weight", "classifier.bias"):
            assert other.memory.arrays[f"own/{name}"] == pytest.approx(received[name] + one.report.arrays["update"][name], abs=1e-6)


def visit_of(played: Played, memory: ClientMemory | None = None) -> Visit:
    instruction = played.method.plan(played.state, played.federation.names)[0]
    architecture = Architecture.parse(str(instruction.facts["architecture"]))
    return Visit(instruction, played.site(instruction.client, memory), architecture, played.tools.tensors(instruction.arrays["weights"]))


@pytest.mark.parametrize("part", ["head", "whole"])
def test_a_later_mix_takes_one_epoch(tiny: Callable[..., Settings], part: str) -> None:
    """One batch of half the images: against the gradient at the mixed network."""
    played = play(tiny, f"fedala.part={part}", "fedala.share=0.5", "fedala.rate=30")
    played.round()
    visit = visit_of(played)
    names = [name for name in visit.received if part == "whole" or name.startswith("classifier.")]
    known = played.memories[visit.instruction.client].arrays
    before = {name: torch.full(tuple(visit.received[name].shape), 0.5) for name in names}
    memory = ClientMemory({**known, **{f"mix/{name}": tensor.numpy() for name, tensor in before.items()}})
    start = played.method.start_of(visit_of(played, memory))

    own, train = {name: torch.tensor(known[f"own/{name}"]) for name in names}, visit.site.data.train
    draw = rng(visit.instruction.seed, "mix")
    chosen = torch.as_tensor(draw.choice(len(train), round(len(train) / 2), replace=False))
    order = chosen[torch.as_tensor(draw.permutation(len(chosen)))]
    network = {name: tensor.clone().requires_grad_() for name, tensor in {**visit.received, **mixed(own, visit.received, before)}.items()}
    logits = played.tools.supernet.forward(played.tools.pixels.normalise(train.images[order]), network, visit.architecture)
    F.cross_entropy(logits, train.labels[order]).backward()
    moved = 0.0
    for name, tensor in own.items():
        gradient = network[name].grad
        assert gradient is not None
        expected = (0.5 - 30 * gradient * (visit.received[name] - tensor)).clamp(0, 1)
        assert torch.allclose(start.mix[name], expected, atol=1e-4), name
        assert torch.allclose(start.weights[name], tensor + expected * (visit.received[name] - tensor), atol=1e-5)
        moved = max(moved, float((expected - 0.5).abs().max()))
    assert moved > 1e-3
    assert all(start.weights[name] is visit.received[name] for name in visit.received if name not in names)
    assert start.macs == len(order) * played.tools.space.cost(visit.architecture).macs


def test_the_first_mix_is_learnt_until_the_loss_is_steady(tiny: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    played = play(tiny)
    played.round()
    visit = visit_of(played)
    once = played.tools.space.cost(visit.architecture).macs * round(0.8 * len(visit.site.data.train))
    assert played.method.start_of(visit).macs == (LOSSES + 1) * once  # of one batch, whose loss hardly moves
    monkeypatch.setattr("fedloom.methods.fedala.STEADY", 0.0)
    assert played.method.start_of(visit).macs == MOST * once
    played.round()
    known = played.memories[visit.instruction.client]
    assert played.method.start_of(visit_of(played, known)).macs == once and "mix/classifier.bias" in known.arrays


def test_the_end_is_mixed_too(tiny: Callable[..., Settings]) -> None:
    """Without fine-tuning the personal classifier is the mix, and what was not mixed is shared."""
    played = play(tiny, "training.finetune_epochs=0")
    (first, *_) = played.round()
    answer = played.farewell(first.report.client)
    assert answer.model is not None and answer.memory == first.memory and answer.diary.trained_macs > 0
    shared, own = played.state.weights["classifier.weight"], first.memory.arrays["own/classifier.weight"]
    found = answer.model.arrays["classifier.weight"]
    low, high = np.minimum(shared, own) - 1e-6, np.maximum(shared, own) + 1e-6
    assert ((low <= found) & (found <= high)).all() and not np.array_equal(found, shared)
    body = next(name for name in played.state.weights if not name.startswith("classifier."))
    assert np.array_equal(answer.model.arrays[body], played.state.weights[body])
