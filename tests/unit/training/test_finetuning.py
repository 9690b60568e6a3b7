"""Which of several fine-tuned networks a client keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.core.client_site import ClientData, ClientSite, Examples, PersonalModel
from fedloom.core.errors import InvalidData
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.base import Weights
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.testing.executions import PIXELS
from fedloom.testing.nets import CLOSE, weights_of
from fedloom.training.finetuning import Finalist
from fedloom.training.recipe import TrainingSettings
from fedloom.training.scoring import NetworkRequest, Scorer
from fedloom.training.tools import Tools

SUPERNET = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings.tiny(), ImageShape(1, 8, 3)))
SPACE = SUPERNET.space
EVIDENCE = TrainingSettings(batch=8, crop=0, flip=False, cutout=0, finetune_epochs=4, finetune_rates=(0.05,), choice="evidence")
RUINOUS, USELESS, USEFUL = 1e6, 1e-9, 0.05  # rates


def examples_of(count: int, seed: int = 0) -> Examples:
    """Three classes of other brightness."""
    labels = np.arange(count) % 3
    images = np.random.default_rng(seed).normal(128, 20, (count, 1, 8, 8)) + 80 * (labels[:, None, None, None] - 1)
    return Examples(torch.from_numpy(np.clip(images, 0, 255).astype(np.uint8)), torch.from_numpy(labels))


def site_of(validation: int = 24) -> ClientSite:
    return ClientSite("client-0", ClientData(examples_of(40), examples_of(validation, seed=1), examples_of(15, seed=2)))


def tools_of(**changes: Any) -> Tools:
    return Tools(SPACE, SUPERNET, replace(EVIDENCE, **changes), PIXELS, 3, 3, "clean", torch.device("cpu"))


def fresh(name: str = "smallest") -> Finalist:
    return Finalist(SPACE.named[name], SUPERNET.plain(SUPERNET.initial(0), SPACE.named[name]))


def is_same(model: PersonalModel, weights: Weights) -> bool:
    return all(np.array_equal(model.arrays[name], tensor.numpy()) for name, tensor in weights.items())


def is_untuned(model: PersonalModel, network: Finalist) -> bool:
    return is_same(model, network.plain)


# -- the choice of a rate ----------------------------------------------------------
@pytest.mark.parametrize(
    ("rates", "evidence", "chosen"),
    [
        ((USEFUL, USELESS), 1.0, USEFUL),
        ((USELESS, USEFUL), 1.0, USEFUL),  # clearly better than the first
        ((USELESS, USEFUL), 1e9, USELESS),  # no evidence is enough
        ((USELESS,), 1.0, USELESS),  # and not untuned, which is as good
        ((0.0, USELESS), 1e9, 0.0),  # the first is untuned
        ((RUINOUS, USEFUL), 1e9, USEFUL),  # what diverged is left without evidence
        ((RUINOUS,), 1e9, 0.0),
        ((), 1.0, 0.0),
    ],
)
def test_the_first_rate_is_left_for_evidence_only(rates: tuple[float, ...], evidence: float, chosen: float) -> None:
    tools = tools_of(finetune_rates=rates, evidence=evidence)
    model, diary = tools.personalise(site_of(), *fresh()[:2], seed=0)
    assert diary.notes["finetune_rate"] == chosen and diary.notes["left_prior"] == diary.notes["finalist"] == 0
    assert is_untuned(model, fresh()) == (chosen == 0)
    assert "prior_loss" in diary.notes and diary.notes["prior_loss"] == diary.notes["chosen_loss"]


def test_one_validation_image_is_no_evidence() -> None:
    _, diary = tools_of(finetune_rates=(USELESS, USEFUL), evidence=0.1).personalise(site_of(validation=1), *fresh()[:2], seed=0)
    assert diary.notes["finetune_rate"] == USELESS


def test_accuracy_alone_leaves_no_notes() -> None:
    _, diary = tools_of(choice="accuracy").personalise(site_of(), *fresh()[:2], seed=0)
    assert diary.notes == {}


# -- finalists ---------------------------------------------------------------------
@cache
def learned() -> Finalist:
    """A network that knows the task, so that others are worse whatever they are tuned at."""
    tools, network = tools_of(), fresh("medium")
    trained = tools.trainer.train_network(
        network.plain, network.architecture, examples_of(60, seed=5), [0.05] * 8, np.random.default_rng(0)
    )
    return Finalist(network.architecture, trained.weights)


@pytest.mark.parametrize("choice", ["accuracy", "evidence"])
def test_a_clearly_better_finalist_wins_wherever_it_stands(choice: str) -> None:
    good, tools = learned(), tools_of(choice=choice, finetune_rates=(1e-4,))
    alone = {one.architecture: tools.personalise(site_of(), *one[:2], seed=0)[1] for one in (fresh(), good, fresh("largest"))}
    for finalists, place in (([fresh(), good, fresh("largest")], 1), ([good, fresh()], 0)):
        site = site_of()
        model, diary = tools.personalise(site, *finalists[0][:2], seed=0, others=finalists[1:])
        assert model.architecture == diary.architecture == good.architecture.id
        assert diary.notes["finalist"] == place and diary.notes["left_prior"] == float(place > 0)
        assert (diary.notes["chosen_loss"] < diary.notes["prior_loss"]) == (place > 0)
        each = [SPACE.cost(finalist.architecture).macs for finalist in finalists]
        assert diary.trained_macs == 4 * 5 * 8 * sum(each)  # epochs, steps, batch
        assert diary.peak_memory_mb == max(alone[finalist.architecture].peak_memory_mb for finalist in finalists)


def test_the_prior_is_left_for_evidence_against_its_own_best_rate() -> None:
    """The same network again can be as good only: tuned at another rate than the prior's first it would be clearly better than that."""
    tools = tools_of(finetune_rates=(USELESS, USEFUL))
    model, diary = tools.personalise(site_of(), *fresh()[:2], seed=0, others=[fresh(), fresh()])
    alone, _ = tools.personalise(site_of(), *fresh()[:2], seed=0)
    assert diary.notes["left_prior"] == 0 and diary.notes["finetune_rate"] == USEFUL
    assert all(np.array_equal(model.arrays[name], array) for name, array in alone.arrays.items())
    better, diary = tools_of(finetune_rates=(1e-4,), evidence=1e9).personalise(site_of(), *fresh()[:2], seed=0, others=[learned()])
    assert diary.notes["left_prior"] == 0 and better.architecture == fresh().architecture.id
    assert diary.notes["chosen_loss"] == diary.notes["prior_loss"]


def test_a_prior_that_diverged_is_left() -> None:
    broken = Finalist(fresh().architecture, {name: tensor * np.nan for name, tensor in fresh().plain.items()})
    model, diary = tools_of(evidence=1e9).personalise(site_of(), *broken[:2], seed=0, others=[fresh("medium")])
    assert model.architecture == SPACE.named["medium"].id and diary.notes["left_prior"] == 1
    assert "prior_loss" not in diary.notes  # it is not finite


def test_other_finalists_are_tuned_at_the_priors_rate_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, calls = tools_of(finetune_rates=(USEFUL, USELESS)), []
    for owner, name in ((tools.trainer, "train_networks"), (tools.scorer, "score_networks")):
        asked = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda some, asked=asked: (calls.append(len(some)), asked(some))[1])
    tools.personalise(site_of(), *fresh()[:2], seed=0, others=[fresh("medium"), fresh("largest")])
    assert calls == [2, 3, 2, 2, 1]  # the prior tuned, scored with the untuned one; the others tuned, scored; one tested


# -- validation images join ----------------------------------------------------------
@pytest.mark.parametrize("choice", ["accuracy", "evidence"])
def test_what_was_chosen_is_trained_once_more_on_all_images(choice: str) -> None:
    site, other, tools = site_of(), fresh("medium"), tools_of(rejoin=True, choice=choice, finetune_rates=(USELESS, USEFUL))
    before, honest = tools_of(choice=choice, finetune_rates=(USELESS, USEFUL)).personalise(site_of(), *fresh()[:2], seed=3, others=[other])
    model, diary = tools.personalise(site, *fresh()[:2], seed=3, others=[other])
    start = [fresh(), other][int(honest.notes["finalist"])]
    both = tools.joined(site)
    assert (
        len(both) == 40 + 24
        and torch.equal(both.images[40:], site.data.validation.images)
        and torch.equal(both.labels[:40], site.data.train.labels)
    )
    expected = tools.trainer.train_networks([tools.finetuning.job(start, USEFUL, both, 3)])[0]
    assert model.architecture == before.architecture == start.architecture.id and is_same(model, expected.weights)
    statistics = tools.scorer.calibrate(expected.weights, start.architecture, both)
    assert all(np.array_equal(model.arrays[f"{name}.running_mean"], mean.numpy()) for name, (mean, _) in statistics.items())
    assert diary.test_accuracy == tools.scorer.score_network(expected.weights, start.architecture, statistics, site.data.test).accuracy
    assert diary.validation_accuracy == honest.validation_accuracy and diary.notes == honest.notes
    assert diary.trained_macs == honest.trained_macs + expected.macs and "rejoin" in site.clock.seconds


def test_the_stated_validation_accuracy_is_of_a_network_that_did_not_see_these_images() -> None:
    """Labels that nothing but learning them by heart can say."""
    data = site_of().data
    shuffled = replace(data.validation, labels=data.validation.labels.roll(1))
    site = ClientSite("client-0", replace(data, validation=shuffled, test=shuffled))
    tools = tools_of(rejoin=True, finetune_rates=(USEFUL,), finetune_epochs=15, evidence=1e9, label_smoothing=0.0)
    _, diary = tools.personalise(site, *fresh()[:2], seed=0)
    assert diary.validation_accuracy is not None and diary.test_accuracy is not None
    assert diary.validation_accuracy < 0.2 < 0.4 < diary.test_accuracy


def test_an_untuned_network_is_not_trained_again() -> None:
    site, tools = site_of(), tools_of(rejoin=True, finetune_rates=(RUINOUS,))
    model, diary = tools.personalise(site, *fresh()[:2], seed=0)
    assert is_untuned(model, fresh()) and "rejoin" not in site.clock.seconds
    assert diary.trained_macs == tools_of(finetune_rates=(RUINOUS,)).personalise(site_of(), *fresh()[:2], seed=0)[1].trained_macs


def test_a_client_without_validation_images_is_refused() -> None:
    with pytest.raises(InvalidData, match=r"client-0 has no validation images.*set training.rejoin=false"):
        tools_of(rejoin=True).personalise(site_of(validation=0), *fresh()[:2], seed=0)


# -- the loss of each image ----------------------------------------------------------
def requests_of(*each: bool) -> list[NetworkRequest]:
    """Networks of two architectures; each: which of them want it."""
    data, networks = site_of().data, ["smallest", "smallest", "medium", "smallest"]
    plains = [SUPERNET.plain(weights_of(SUPERNET, seed), SPACE.named[name]) for seed, name in enumerate(networks)]
    rows = zip(plains, networks, each, strict=True)
    return [NetworkRequest(plain, SPACE.named[name], data.train, (data.validation, data.test), wants) for plain, name, wants in rows]


def test_stacked_networks_have_the_losses_of_single_ones() -> None:
    requests = requests_of(*[True] * 4)
    one_by_one, stacked = (
        Scorer(SUPERNET, replace(EVIDENCE, execution=how), PIXELS).score_networks(requests) for how in ("sliced", "masked")
    )
    for alone, one, request in zip(one_by_one, stacked, requests, strict=True):
        for part, examples in enumerate(request.parts):
            assert alone.losses[part].shape == one.losses[part].shape == (len(examples),)
            assert torch.allclose(alone.losses[part], one.losses[part], **CLOSE)
            assert alone.losses[part].mean().item() == pytest.approx(alone.scores[part].loss)
            assert one.losses[part].std() > 0.01


@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_losses_come_to_those_who_want_them_and_change_no_score(execution: str) -> None:
    scorer = Scorer(SUPERNET, replace(EVIDENCE, execution=execution), PIXELS)
    found, usual = scorer.score_networks(requests_of(True, False, False, False)), scorer.score_networks(requests_of(*[False] * 4))
    assert [one.scores for one in found] == [one.scores for one in usual]
    assert [len(one.losses) for one in found] == [2, 0, 0, 0]


def test_losses_by_torch() -> None:
    request = requests_of(*[True] * 4)[0]
    scorer = Scorer(SUPERNET, EVIDENCE, PIXELS)
    (found,) = scorer.score_networks([request])
    statistics = scorer.calibrate(request.plain, request.architecture, request.train)
    with torch.no_grad():
        logits = SUPERNET.forward(PIXELS.normalise(request.parts[1].images), request.plain, request.architecture, statistics)
    expected = [F.cross_entropy(own[None], label[None]).item() for own, label in zip(logits, request.parts[1].labels, strict=True)]
    assert found.losses[1].tolist() == pytest.approx(expected)
