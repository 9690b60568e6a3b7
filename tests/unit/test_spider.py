"""SPIDER: when it searches, what it keeps, and how far the local supernet may go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.config import Settings, load
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import payload_bytes
from fedloom.core.seeds import rng
from fedloom.methods.spider import Spider, decided
from played import Played

Tiny = Callable[..., Settings]
OWN = "method=spider"


def everything(played: Played) -> np.ndarray:
    return np.broadcast_to(played.method._offered, (2, 14, len(played.method._offered))).copy()


# -- the schedule ---------------------------------------------------------------------------
def test_the_papers_schedule_decides_an_edge_at_round_40_and_the_last_at_300(tiny: Tiny) -> None:
    method = Played(tiny(OWN, "spider.warmup=30", "spider.recovery=20", "spider.edges=1")).method
    assert [method._due(number) for number in (0, 20, 39, 40, 59, 60, 299, 300, 999)] == [0, 0, 0, 1, 1, 2, 13, 14, 14]


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

    def score(self: Spider, site: ClientSite, weights: Any, kept: np.ndarray) -> tuple[float, float]:
        return float(np.take_along_axis(kept, useful[..., None], 2).sum()) / 100, 0.0

    monkeypatch.setattr(Spider, "_score", score)
    kept, tried = played.method._searched(played.site("client-000"), {}, start, 14, rng(0))
    assert decided(kept).all() and np.array_equal(kept.argmax(-1), useful) and tried == start.sum()
    assert np.array_equal(start, everything(played))  # untouched
    some, _ = played.method._searched(played.site("client-000"), {}, start, 5, rng(0))
    assert decided(some).sum(1).tolist() == [5, 5]


def test_equal_accuracies_are_told_apart_by_loss(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tiny(OWN))
    monkeypatch.setattr(
        Spider, "_score", lambda self, site, weights, kept: (0.5, float(kept[..., 1].sum()))
    )  # without the first: least loss
    kept, _ = played.method._searched(played.site("client-000"), {}, everything(played), 14, rng(0))
    assert kept[..., 1].all() and not kept[..., 0].any()


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
    space = played.method.bench.space
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
        batches = type(played.method.bench.trainer).batches

        def listen(self: Any, examples: Any, *more: Any) -> Any:
            seen.append(len(examples))
            return batches(self, examples, *more)

        with monkeypatch.context() as patch:
            patch.setattr(type(played.method.bench.trainer), "batches", listen)
            played.answer(instruction)
        data = played.site(instruction.client).data
        return seen[0] - len(data.train) - len(data.validation)

    assert images("spider.edges=14") == 0 and images("spider.edges=13") < 0
    assert images("spider.edges=14", "spider.join_validation=false") < 0


# -- mixtures ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("operations", ["s2", "full"])
def test_what_is_not_present_is_as_if_its_coefficient_were_zero(tiny: Tiny, operations: str) -> None:
    bench = Played(tiny(OWN, f"darts.operations={operations}")).method.bench
    weights = {name: tensor for name, tensor in bench.supernet.initial(0).items()}
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    present = rng("present").random((2, 14, len(bench.space.operations))) < 0.5
    ones = torch.ones(present.shape)
    some = bench.supernet.mixture(images, weights, ones, present=present)
    assert torch.allclose(some, bench.supernet.mixture(images, weights, torch.from_numpy(present).float()), atol=1e-5)
    assert not torch.allclose(some, bench.supernet.mixture(images, weights, ones), atol=1e-3)


@pytest.mark.parametrize("operations", ["s2", "full"])
def test_a_mixture_of_one_operation_each_costs_what_the_architecture_does(tiny: Tiny, operations: str) -> None:
    space = Played(tiny(OWN, f"darts.operations={operations}")).method.bench.space
    for number in range(10):
        architecture = space.sample(rng("cost", number))
        present = np.eye(len(space.operations), dtype=bool)[np.array(architecture.choices)].reshape(2, 14, -1)
        assert space.mixture_cost(present) == space.cost(architecture)
    assert space.mixture_cost(np.ones((2, 14, len(space.operations)), bool)).parameters == sum(
        tensor.numel() for tensor in Played(tiny(OWN, f"darts.operations={operations}")).method.bench.supernet.initial(0).values()
    )


# -- settings -----------------------------------------------------------------------------------------
def test_what_it_is_not_defined_on_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"spider is not defined on nasvit\. Set space=darts"):
        tiny(OWN, "space=nasvit")
    with pytest.raises(InvalidConfig, match=r"spider decides edge by edge and cannot keep a budget. Remove budget"):
        Played(tiny(OWN, "budget.parameters=1e9"))


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
    source.write_text("when = 3\n")
    with pytest.raises(InvalidConfig, match="when must hold tables by the names of methods"):
        load(str(source))
