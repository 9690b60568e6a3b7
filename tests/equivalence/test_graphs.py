"""A captured training step does what the eager step does, and masked training what sliced training does. Needs a GPU: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import spaces, supernets  # noqa: F401 - fills the registries
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import Supernet, Weights, make_supernet
from fedloom.training import graphs
from fedloom.training.adaptation import Adaptation
from fedloom.training.holds import Pull
from fedloom.training.local import NetworkJob, Trainer, beside, one_of
from fedloom.training.objectives import Modules, NearMean
from fedloom.training.packed import Packed
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings
from fedloom.training.scoring import Scorer

pytestmark = pytest.mark.gpu
PIXELS = Pixels((0.5,) * 3, (0.25,) * 3)
SETTINGS = replace(TrainingSettings(), calibration=60)


@pytest.fixture(params=list(SPACES))
def supernet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Supernet[Any]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # rounding of TF32 would hide a wrong step
    monkeypatch.setattr(graphs, "WORTH_A_GRAPH", 2)  # the first step is eager, the second captured
    return make_supernet(request.param, SPACES[request.param].settings.tiny(), ImageShape(3, 32, 10))


@pytest.fixture
def maskable(supernet: Supernet[Any]) -> Supernet[Any]:
    if type(supernet).masked is Supernet.masked:
        pytest.skip(f"{supernet.space.name} has no masked execution")
    return supernet


def examples_of(count: int) -> Examples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8).cuda()
    return Examples(images, torch.randint(0, 10, (count,), generator=generator).cuda())


def distance(one: Weights, other: Weights, start: Weights) -> float:
    """By the length of the whole move; entry by entry rectifiers at their switch would decide (see test_masked)."""
    first, second, before = (torch.cat([weights[name].flatten() for name in one]) for weights in (one, other, start))
    return float((first - second).norm() / (first - before).norm())


def test_replayed_steps_equal_eager_steps(supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = supernet.space.named["medium"]
    plain = {name: tensor.cuda() for name, tensor in supernet.plain(supernet.initial(0), architecture).items()}
    trainer = Trainer(supernet, SETTINGS, PIXELS)

    def trained(examples: Examples) -> Weights:
        return trainer.train_network(plain, architecture, examples, [0.02, 0.01], np.random.default_rng(0)).weights

    for examples in (examples_of(120), examples_of(30)):  # another batch size is another graph
        replayed, again = trained(examples), trained(examples)
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "WORTH_A_GRAPH", 10**9)
            assert distance(trained(examples), replayed, plain) < 0.05
        assert distance(replayed, again, plain) < 0.05


def jobs_of(kind: str, supernet: Supernet[Any], plain: Weights) -> list[NetworkJob]:
    """Two clients' training by a method on one fixed network."""
    near = {name: tensor + 0.01 for name, tensor in plain.items()}
    slope = {name: torch.full_like(tensor, 1e-3) for name, tensor in plain.items()}
    weight, _ = supernet.classifier(plain)
    nothing = torch.zeros(plain[weight].shape[1], device=plain[weight].device)
    beside = {NearMean.SHIFT: nothing, NearMean.MEAN: nothing + 0.1}
    body = {name: tensor for name, tensor in plain.items() if not supernet.in_head(name)}
    pool = {f"module{number}/{name}": plain[name] * (1 + number) for number in range(3) for name in plain if name not in body}
    gates = {Modules.GATES: torch.tensor([0.1, -0.1, 0.05], device=plain[weight].device)}
    changes: dict[str, Any] = {
        "fedprox": {"pull": Pull(near, 0.5)},
        "scaffold": {"pull": Pull(near, 0.0, slope)},
        "fedrep": {"part": "head"},
        "fedbabu": {"part": "body"},
        "perfedavg": {"adaptation": Adaptation(0.01)},
        "perfedavg, Hessian-free": {"adaptation": Adaptation(0.01, 1e-2)},
        "dbe": {"plain": {**plain, **beside}, "objective": NearMean(50.0)},
        "fedmn": {"plain": {**body, **pool, **gates}, "objective": Modules(3)},
    }
    medium, rates = supernet.space.named["medium"], [0.02, 0.01]
    usual = (NetworkJob(plain, medium, examples_of(count), rates, np.random.default_rng(count)) for count in (120, 100))
    return [replace(job, **changes[kind]) for job in usual]


KINDS = ["fedprox", "scaffold", "fedrep", "fedbabu", "perfedavg", "perfedavg, Hessian-free", "dbe", "fedmn"]


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_of_every_method_equal_eager_steps(kind: str, supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks in a stack, the second time by the graph that the first left."""
    plain = {name: tensor.cuda() for name, tensor in supernet.plain(supernet.initial(0), supernet.space.named["medium"]).items()}
    trainer = Trainer(supernet, replace(SETTINGS, precision="full"), PIXELS)

    def trained() -> list[Weights]:
        return [one.weights for one in trainer.train_networks(jobs_of(kind, supernet, plain))]

    replayed, again, starts = trained(), trained(), [job.plain for job in jobs_of(kind, supernet, plain)]
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "WORTH_A_GRAPH", 10**9)
        eager = Trainer(supernet, replace(SETTINGS, precision="full"), PIXELS).train_networks(jobs_of(kind, supernet, plain))
    for one, other, third, start in zip(replayed, again, eager, starts, strict=True):
        assert distance(third.weights, one, start) < 0.05 and distance(one, other, start) < 0.05


@pytest.mark.parametrize("optimiser", ["sgd", "nesterov", "adamw"])
def test_a_replayed_step_of_an_optimiser_is_its_eager_step(optimiser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its moments move as well, and its counts of steps."""
    start = {"weights": torch.linspace(-1, 1, 12, device="cuda").double().reshape(3, 4)}
    mask = torch.arange(16, device="cuda") % 3 > 0  # 12 weights and a gap of 4

    def step(place: graphs.WeightsInTraining, images: torch.Tensor, rate: torch.Tensor | float) -> None:
        place.move(place.weights.flat * images, rate, mask)

    ends = []
    for worth in (2, 10**9):
        monkeypatch.setattr(graphs, "WORTH_A_GRAPH", worth)
        place = graphs.WeightsInTraining(Packed.of(start), replace(SETTINGS, optimiser=optimiser))
        for number in range(5):
            place.run(step, "step", torch.full((), 1.0 + number, device="cuda"), 0.25)
        ends.append((place.weights.flat.clone(), place.momenta.clone()))
    for replayed, eager in zip(*ends, strict=True):
        assert torch.allclose(replayed, eager, rtol=1e-12, atol=0) and bool(replayed.any())


class Doubled(Pixels):
    """Pixels in float64: with float32 the first steps of random weights differ by up to 40 % of their length between two devices."""

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        return super().normalise(images).double()


@pytest.mark.parametrize("kind", ["archive", "fair", "taught"])
def test_masked_graphs_equal_sliced_steps(maskable: Supernet[Any], kind: str) -> None:
    weights = {name: tensor.cuda().double() for name, tensor in maskable.initial(0).items()}
    draw, pixels = rng("archive"), Doubled(PIXELS.mean, PIXELS.std)
    archive = [maskable.space.sample(draw) for _ in range(6)]
    subnets = maskable.space.fair if kind == "fair" else one_of(archive)
    taught = kind == "taught"
    subnets = beside(maskable.space.named["medium"], subnets) if taught else subnets
    settings = replace(SETTINGS, precision="full")  # here float64
    sliced, masked = (Trainer(maskable, replace(settings, execution=execution), pixels) for execution in ("sliced", "masked"))
    for examples in (examples_of(50), examples_of(30)):  # one step: more would compare how rounding grows
        expected = sliced.train_supernet(weights, subnets, examples, [0.02], np.random.default_rng(0), taught)
        for _ in range(3):  # eager, captured, replayed; the captured rate is a float32
            found = masked.train_supernet(weights, subnets, examples, [0.02], np.random.default_rng(0), taught)
            assert found.steps == expected.steps
            assert distance(expected.weights, found.weights, weights) < 1e-5


def test_masked_scores_equal_sliced_scores(maskable: Supernet[Any]) -> None:
    weights = {name: tensor.cuda() for name, tensor in maskable.initial(0).items()}
    draw, examples = rng("scores"), examples_of(100)
    architectures = [maskable.space.sample(draw) for _ in range(30)]
    sliced, masked = (
        Scorer(maskable, replace(SETTINGS, execution=execution), PIXELS).score_subnets(weights, architectures, examples, examples)
        for execution in ("sliced", "masked")
    )
    for one, other in zip(sliced, masked, strict=True):
        assert other.score.loss == pytest.approx(one.score.loss, rel=1e-3)
