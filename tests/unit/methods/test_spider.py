"""SPIDER: when it searches, what it keeps, and how far the local supernet may go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.assemble import new_run, reopen_run, resume_run
from fedloom.config import Settings, load
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import payload_bytes
from fedloom.core.seeds import rng
from fedloom.engine.run import Watcher
from fedloom.maths.perturbation import decided
from fedloom.methods.spider import Spider, SpiderSettings
from fedloom.testing import Played
from fedloom.training.mixtures import Mixtures
from fedloom.training.two_supernets import OwnSupernet
from support.checks import everything as everything_in

Tiny = Callable[..., Settings]
OWN = "method=spider"


def everything(played: Played) -> np.ndarray:
    offered: np.ndarray = played.method.mixtures.offered
    return offered.copy()


# -- the schedule ---------------------------------------------------------------------------
def due(tiny: Tiny, *changes: str) -> Callable[[int], tuple[int, int]]:
    due: Callable[[int], tuple[int, int]] = Played(tiny(OWN, "spider.edges=1", *changes)).method._due
    return due


def test_the_papers_schedule_decides_an_edge_at_round_40_and_the_last_at_300(tiny: Tiny) -> None:
    of = due(tiny, "spider.warmup=30", "spider.recovery=20")
    assert [of(number) for number in (0, 20, 39, 40, 59, 60, 299, 300, 999)] == [(edges, 0) for edges in (0, 0, 0, 1, 1, 2, 13, 14, 14)]


def test_the_authors_prune_nodes_at_rounds_300_320_and_340(tiny: Tiny) -> None:
    of = due(tiny, "spider.warmup=30", "spider.recovery=20", "spider.prune=true", "darts.operations=s2n")
    assert [of(number) for number in (299, 300, 319, 320, 340, 999)] == [(13, 0), (14, 1), (14, 1), (14, 2), (14, 3), (14, 3)]


def test_milenas_decides_all_edges_at_once(tiny: Tiny) -> None:
    changes = ("spider.searcher=milenas", "spider.prune=true", "darts.operations=s2n")
    of = due(tiny, "spider.recovery=20", *changes)
    assert [of(number) for number in (399, 400, 419, 420, 999)] == [(0, 0), (14, 1), (14, 1), (14, 2), (14, 3)]
    many = due(tiny, "spider.recovery=1", "spider.edges=2", "spider.milenas_rounds=3", *changes)
    assert [many(number) for number in (2, 3, 4)] == [(0, 0), (14, 2), (14, 3)]


def test_missed_searches_are_made_up_for(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "spider.warmup=0", "spider.recovery=1", "spider.edges=3", "participants=3"))
    for instruction in played.method.plan(replace(played.state, round=2), played.federation.names)[:1]:
        answer = played.answer(instruction)
        kept = answer.memory.arrays["kept"].astype(bool)
        assert decided(kept).sum(1).tolist() == [9, 9] and answer.diary.notes["decided_edges"] == 18
        assert answer.diary.evaluated_architectures == 2 * 9 * 2


# -- the choice --------------------------------------------------------------------------------
@pytest.mark.parametrize("operations", ["s2", "full"])
def test_the_operation_that_is_missed_most_stays(tiny: Tiny, operations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every edge one operation is worth a point of accuracy; the others nothing."""
    played = Played(tiny(OWN, f"darts.operations={operations}"))
    start = everything(played)
    useful = np.array([rng("useful", edge).choice(np.flatnonzero(start[0, 0])) for edge in range(28)]).reshape(2, 14)

    def score(self: Mixtures, site: ClientSite, weights: Any, kept: np.ndarray) -> tuple[float, float]:
        return float(np.take_along_axis(kept, useful[..., None], 2).sum()) / 100, 0.0

    monkeypatch.setattr(Mixtures, "score", score)
    own, tried = played.method._searched(played.site("client-000"), OwnSupernet({}, start), 14, 0, rng(0))
    assert decided(own.kept).all() and np.array_equal(own.kept.argmax(-1), useful) and tried == start.sum()
    assert np.array_equal(start, everything(played))  # untouched
    some, _ = played.method._searched(played.site("client-000"), OwnSupernet({}, start), 5, 0, rng(0))
    assert decided(some.kept).sum(1).tolist() == [5, 5]


# -- training -------------------------------------------------------------------------------------
def trained(tiny: Tiny, sharing: float, *changes: str) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """What a client received, and its local supernet after training."""
    played = Played(tiny(OWN, f"spider.sharing={sharing}", "training.rate=0.01", "training.weight_decay=0", *changes))
    instruction = played.method.plan(played.state, played.federation.names)[0]
    answer = played.answer(instruction)
    local = {name.removeprefix("local/"): array for name, array in answer.memory.arrays.items() if name.startswith("local/")}
    return instruction.arrays["weights"], local, answer.memory.arrays["kept"].astype(bool)


def distance(one: Any, other: Any) -> float:
    return float(np.sqrt(sum(((one[name] - other[name]) ** 2).sum() for name in one)))


def test_a_strong_regulariser_holds_the_local_supernet_at_the_shared_one(tiny: Tiny) -> None:
    free, held = (distance(*trained(tiny, sharing, "training.momentum=0", "training.epochs=8")[:2]) for sharing in (0.0, 100.0))
    assert 0 < held < 0.5 * free  # rate times lambda is 1: each step begins at the shared one again


def test_without_one_it_does_not_depend_on_the_shared_one(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "spider.sharing=0"))
    first = played.method.plan(played.state, played.federation.names)[0]
    memory = played.answer(first).memory
    site = replace(played.site(first.client), memory=memory)
    moved = {name: array + 1 for name, array in played.state.weights.items()}
    ends = []
    for weights in (played.state.weights, moved):
        ends.append(played.method.answer(replace(first, round=1, arrays={"weights": weights}), site).memory.arrays)
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_operations_that_are_lost_rest(tiny: Tiny) -> None:
    """And both models have the same parameters in the same order, whatever was decided."""
    received, local, kept = trained(tiny, 0.01, "spider.edges=14")
    assert decided(kept).all() and list(local) == list(received)
    played = Played(tiny(OWN))
    space = played.method.tools.space
    there = {name for part in space.mixture_parts(kept) for name in part.shapes} | {"classifier.weight", "classifier.bias"}
    gone = [name for name in received if name not in there]
    assert gone and all(np.array_equal(local[name], received[name]) for name in gone)
    moved = [name for name in there if not np.array_equal(local[name], received[name])]
    assert len(moved) > 0.9 * len(there)


def test_the_supernet_travels_and_nothing_of_the_local_one_does(tiny: Tiny) -> None:
    played = Played(tiny(OWN))
    instruction = played.method.plan(played.state, played.federation.names)[0]
    answer = played.answer(instruction)
    assert payload_bytes(instruction) == 4 * sum(array.size for array in played.state.weights.values())
    assert set(answer.report.arrays) == {"update"} and set(answer.report.facts) == {"examples"}
    local = {array.tobytes() for name, array in answer.memory.arrays.items() if array.ndim > 1}
    assert not local & {array.tobytes() for array in answer.report.arrays["update"].values()}


def test_validation_images_join_once_all_edges_are_decided(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def images(*changes: str) -> int:
        played = Played(tiny(OWN, "training.batch=2", *changes))
        instruction = played.method.plan(played.state, played.federation.names)[0]
        seen = []
        batches = type(played.method.tools.trainer).batches

        def listen(self: Any, examples: Any, rates: Any, *more: Any) -> Any:
            seen.extend([len(examples)] * bool(rates))
            return batches(self, examples, rates, *more)

        with monkeypatch.context() as patch:
            patch.setattr(type(played.method.tools.trainer), "batches", listen)
            played.answer(instruction)
        data = played.site(instruction.client).data
        return max(seen) - len(data.train) - len(data.validation)

    assert images("spider.edges=14") == 0 and images("spider.edges=13") < 0
    assert images("spider.edges=14", "spider.join_validation=false") < 0
    assert images("spider.edges=14", "protocol=paper") == 0  # the paper joins them, and never searched on test images


def test_a_client_counts_the_images_that_it_trained_on(tiny: Tiny) -> None:
    for edges, joined in ((14, True), (13, False)):
        played = Played(tiny(OWN, f"spider.edges={edges}"))
        instruction = played.method.plan(played.state, played.federation.names)[0]
        data = played.site(instruction.client).data
        assert played.answer(instruction).report.facts["examples"] == len(data.train) + joined * len(data.validation)


def test_every_mixture_that_is_tried_takes_time(tiny: Tiny) -> None:
    played = Played(tiny(OWN))
    site, mixtures, kept = played.site("client-000"), played.method.mixtures, everything(played)
    for number in (1, 2):
        mixtures.score(site, played.method.tools.tensors(played.state.weights), kept)
        assert site.work.scored_macs == number * len(site.data.validation) * mixtures.macs(kept) > 0


def test_test_images_decide_no_edge_under_the_papers_protocol(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "protocol=paper", "spider.edges=14", "training.finetune_epochs=0"))
    site = played.site("client-000")
    own = OwnSupernet(played.method.tools.tensors(played.state.weights), everything(played))
    turned = replace(site.data, test=replace(site.data.test, labels=(site.data.test.labels + 1) % 10, images=255 - site.data.test.images))
    without = replace(site.data, validation=replace(site.data.validation, labels=(site.data.validation.labels + 1) % 10))
    kept, same, other = (
        played.method._searched(replace(site, data=data), own, 14, 0, rng(0))[0].kept for data in (site.data, turned, without)
    )
    assert np.array_equal(kept, same) and not np.array_equal(kept, other)


# -- milenas ------------------------------------------------------------------------------------
MILENAS = ("spider.searcher=milenas", "spider.milenas_rounds=1", "training.weight_decay=0")


def test_every_step_moves_the_weights_of_operations_by_both_gradients(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients by coefficients are (1, 0) on training and (0, 2) on validation images in every step: with alpha = 0 at the start
    p = (1/2, 1/2), and by alpha they are (1/4, -1/4) and (-1/2, 1/2), so a step is rate (-1/4, 1/4) with weight 1."""
    played = Played(tiny(OWN, *MILENAS, "training.batch=4", "spider.milenas_rate=0.1"))
    steps = []
    both = Mixtures.gradient_of_both

    def on_train(self: Mixtures, *given: Any) -> Any:
        steps.append(given[-1])
        return both(self, *given)[0], np.broadcast_to([1.0, 0.0], (2, 14, 2))

    monkeypatch.setattr(Mixtures, "gradient_of_both", on_train)
    monkeypatch.setattr(Mixtures, "gradient_of_coefficients", lambda *given: np.broadcast_to([0.0, 2.0], (2, 14, 2)))
    instruction = played.method.plan(played.state, played.federation.names)[0]
    alphas = played.answer(instruction).memory.arrays["alphas"]
    assert len(steps) == 2 and np.allclose(steps[0], 0.5)
    first = 0.1 * 0.25
    p = np.exp(first) / (np.exp(first) + np.exp(-first))  # of the first operation, whose alpha rose
    assert np.allclose(steps[1], [p, 1 - p])
    second = 0.1 * p * (1 - p)  # (1 - 2) p (1 - p), against the gradient
    assert np.allclose(alphas, [first + second, -first - second])


def test_gradients_by_coefficients_are_those_of_the_losses(tiny: Tiny) -> None:
    played = Played(tiny(OWN, *MILENAS))
    mixtures, data = played.method.mixtures, played.site("client-000").data
    weights = {name: tensor.double() for name, tensor in played.method.tools.tensors(played.state.weights).items()}
    images, kept = played.method.tools.pixels.normalise(data.train.images).double(), everything(played)
    given = rng("given").random(kept.shape)

    def found(given: np.ndarray) -> float:
        logits = mixtures.logits(images, weights, kept, coefficients=torch.tensor(given))
        smoothing = played.method.tools.training.label_smoothing
        return float(torch.nn.functional.cross_entropy(logits, data.train.labels, label_smoothing=smoothing))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mixtures, "_tensor", lambda self, table: torch.tensor(table))
        packed, gradient = mixtures.gradient_of_both(weights, images, data.train.labels, kept, given)
        assert np.allclose(mixtures.gradient_of_coefficients(weights, images, data.train.labels, kept, given), gradient, rtol=1e-9)
    assert packed.isfinite().all() and packed.abs().max() > 0
    for place in ((0, 0, 0), (0, 5, 1), (1, 13, 0), (1, 7, 1)):
        step = np.zeros_like(given)
        step[place] = 1e-7
        assert gradient[place] == pytest.approx((found(given + step) - found(given - step)) / 2e-7, rel=1e-3, abs=1e-6)


def test_milenas_keeps_the_one_useful_operation(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls with the coefficient of one operation on every edge and rises with the others'."""
    played = Played(tiny(OWN, *MILENAS, "darts.operations=full"))
    offered = everything(played)
    useful = np.array([rng("useful", edge).choice(np.flatnonzero(offered[0, 0])) for edge in range(28)]).reshape(2, 14)
    slope = np.where(np.arange(8) == useful[..., None], -1.0, 1.0)
    both = Mixtures.gradient_of_both
    monkeypatch.setattr(Mixtures, "gradient_of_both", lambda self, *given: (both(self, *given)[0], slope))
    monkeypatch.setattr(Mixtures, "gradient_of_coefficients", lambda *given: slope)
    instruction = played.method.plan(played.state, played.federation.names)[0]
    first = played.answer(instruction)
    assert first.diary.notes["decided_edges"] == 0 and first.diary.notes["phase"] == 2
    assert first.diary.architecture.endswith("-".join(map(str, useful.reshape(-1))))
    played.memories[instruction.client] = first.memory
    second = played.answer(replace(instruction, round=1))
    assert np.array_equal(second.memory.arrays["kept"].argmax(-1), useful) and second.diary.notes["phase"] == 3
    assert np.array_equal(second.memory.arrays["alphas"], first.memory.arrays["alphas"])  # they rest from here on


# -- pruning -------------------------------------------------------------------------------------
@pytest.mark.parametrize("searcher", ["perturbation", "milenas"])
def test_pruning_leaves_two_inputs_to_every_node(tiny: Tiny, searcher: str) -> None:
    changes = ("darts.operations=s2n", "spider.prune=true", "spider.edges=14", "spider.milenas_rounds=1")
    played = Played(tiny(OWN, f"spider.searcher={searcher}", *changes, "participants=3"))
    notes = [played.round()[0].diary.notes for _ in range(2)]
    assert notes[-1]["absent_edges"] == 2 * (14 - 8) and notes[-1]["phase"] == 3 and notes[-1]["decided_edges"] == 28
    final = played.farewell("client-000")
    space = played.method.tools.space
    architecture = space.find(final.diary.architecture, rng(0))
    space.genotype(architecture)  # refuses nodes without exactly two inputs
    assert all(name != "none" for pair in (space.genotype(architecture).normal, space.genotype(architecture).reduce) for name, _ in pair)


def test_validation_images_wait_for_the_pruning(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "darts.operations=s2n", "spider.prune=true", "spider.edges=14", "spider.recovery=1"))
    method, kept = played.method, everything(played)
    kept[..., 2] = False
    assert decided(kept).all() and not method._over(kept)
    kept[:, [2, 5, 6, 9, 10, 11]] = False  # one of three, two of four, three of five inputs
    assert method._over(kept)


@pytest.mark.parametrize(
    "changes",
    [*(pytest.param(("milenas", size), marks=pytest.mark.slow, id=f"milenas-{size}") for size in "21"), ("perturbation", "1")],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    tiny: Tiny, nobody: Watcher, tmp_path: Path, changes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher, rounds = changes
    more = ("darts.operations=s2n", "spider.prune=true", "participants=3", "rounds=3", "spider.edges=7", f"spider.milenas_rounds={rounds}")
    settings, answer = tiny(OWN, f"spider.searcher={searcher}", *more), Spider.answer
    new_run(settings, tmp_path / "whole", nobody)
    calls = []

    def stop(self: Spider, *given: Any) -> Any:
        calls.append(given)
        if len(calls) in (5, 8, 12):  # in the second and third round and among the farewells
            raise KeyboardInterrupt
        return answer(self, *given)

    monkeypatch.setattr(Spider, "answer", stop)
    with pytest.raises(KeyboardInterrupt):
        new_run(settings, tmp_path / "stopped", nobody)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            resume_run(tmp_path / "stopped", nobody)
    resume_run(tmp_path / "stopped", nobody)
    whole, stopped = (everything_in(tmp_path / name) for name in ("whole", "stopped"))
    same = [name for name in whole if name.endswith(".safetensors")]
    assert sorted(whole) == sorted(stopped) and len(same) > 6 and all(whole[name] == stopped[name] for name in same)


# -- mixtures ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("operations", ["s2", "full"])
def test_what_is_not_present_is_as_if_its_coefficient_were_zero(tiny: Tiny, operations: str) -> None:
    tools = Played(tiny(OWN, f"darts.operations={operations}")).method.tools
    weights = {name: tensor for name, tensor in tools.supernet.initial(0).items()}
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    present = rng("present").random((2, 14, len(tools.space.operations))) < 0.5
    ones = torch.ones(present.shape)
    some = tools.supernet.mixture(images, weights, ones, present=present)
    assert torch.allclose(some, tools.supernet.mixture(images, weights, torch.from_numpy(present).float()), atol=1e-5)
    assert not torch.allclose(some, tools.supernet.mixture(images, weights, ones), atol=1e-3)


@pytest.mark.parametrize("operations", ["s2", "full"])
def test_a_mixture_of_one_operation_each_costs_what_the_architecture_does(tiny: Tiny, operations: str) -> None:
    space = Played(tiny(OWN, f"darts.operations={operations}")).method.tools.space
    for number in range(10):
        architecture = space.sample(rng("cost", number))
        present = np.eye(len(space.operations), dtype=bool)[np.array(architecture.choices)].reshape(2, 14, -1)
        assert space.mixture_cost(present) == space.cost(architecture)
    assert space.mixture_cost(np.ones((2, 14, len(space.operations)), bool)).parameters == sum(
        tensor.numel() for tensor in Played(tiny(OWN, f"darts.operations={operations}")).method.tools.supernet.initial(0).values()
    )


# -- settings -----------------------------------------------------------------------------------------
def test_what_it_is_not_defined_on_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"spider is not defined on nasvit\. Set space=darts"):
        tiny(OWN, "space=nasvit")
    with pytest.raises(InvalidConfig, match=r"spider decides edge by edge and cannot keep a budget. Remove budget"):
        Played(tiny(OWN, "budget.parameters=1e9"))
    with pytest.raises(InvalidConfig, match=r"spider.prune leaves edges out, and .* no operation none .* Set darts.operations=s2n"):
        Played(tiny(OWN, "spider.prune=true"))


def test_the_papers_setting() -> None:
    settings = load("spider-cifar10")
    assert (settings.clients, settings.participants, settings.rounds, settings.protocol) == (8, 8, 1000, "clean")
    assert settings.components["darts"].operations == "s2" and settings.training.finetune_epochs == 0
    assert settings.components["spider"] == SpiderSettings()  # the defaults are the paper's
    assert load("spider-cifar100").data.name == "cifar100"
    assert replace(load("spider-cifar100"), data=settings.data) == settings


@pytest.mark.slow
def test_tests_of_their_own_survive_a_resume(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    settings = tiny(OWN, "split.rule=label", "split.alpha=5", "split.test=0.2", "split.validation=0.25")
    new_run(settings, tmp_path / "run", nobody)
    federation = reopen_run(tmp_path / "run").federation
    sizes = [len(part) for part in vars(federation.data_of("client-000")).values()]
    assert [round(size / sum(sizes), 2) for size in sizes] == [0.6, 0.2, 0.2]


def test_a_source_may_say_more_for_a_method(tmp_path: Path) -> None:
    source = tmp_path / "mine.toml"
    source.write_text(
        'rounds = 5\n[training]\nrate = 0.3\n[when.spider]\nspace = "darts"\nrounds = 7\n[when.spider.training]\nepochs = 2\n'
    )
    usual, special = load(str(source)), load(str(source), [OWN])
    assert (usual.space, usual.rounds, usual.training.rate, usual.training.epochs) == ("mobilenetv3", 5, 0.3, 5)
    assert (special.space, special.rounds, special.training.rate, special.training.epochs) == ("darts", 7, 0.3, 2)
    assert load(str(source), [OWN, "rounds=9"]).rounds == 9  # what is said last wins
    source.write_text('method = "spider"\n[when.spider]\nspace = "darts"\n')
    assert load(str(source)).space == "darts"
    source.write_text("[when.spidr]\nrounds = 7\n")
    with pytest.raises(InvalidConfig, match=r"\[when\.spidr\] names no method\. Did you mean 'spider'\?"):
        load(str(source))
    source.write_text("when = 3\n")
    with pytest.raises(InvalidConfig, match="when must hold tables by the names of methods"):
        load(str(source))
