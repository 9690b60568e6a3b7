"""Networks that begin alike are scored without computing that twice, and score what each of them scores alone, for every supernet.

One by one the scores are equal bit for bit. In groups sums are added in another order: logits agree within 1e-5 of the largest.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.spaces.base import SearchSpace
from fedloom.supernets import darts_many
from fedloom.supernets.base import Supernet
from fedloom.supernets.chain import Chain
from fedloom.supernets.normalisation import Statistics
from fedloom.testing.executions import PIXELS, SLICED, examples_of
from fedloom.testing.nets import images_of, weights_of
from fedloom.testing.spaces import Given
from fedloom.training import prefixes, scoring
from fedloom.training.many import groups
from fedloom.training.prefixes import Groups, Network, grow, nodes_below, one_by_one
from fedloom.training.recipe import TrainingSettings
from fedloom.training.scoring import Request, Scored, Scorer

LOGITS = 1e-5
ROWS, IMAGES = 12, 18
WALKS: dict[str, tuple[float, float, list[int]]] = {  # bytes held, bytes of a call, images in each part
    "at once": (8e9, 4e9, [ROWS + IMAGES]),
    "tree after tree": (1, 4e9, [ROWS + IMAGES]),
    "node after node": (8e9, 1, [ROWS + IMAGES]),
    "images in parts": (8e9, 4e9, [ROWS + 7, 7, 4]),
}
TwoClients = list[tuple[dict[int, dict[str, Tensor]], dict[Network, Tensor]]]  # weights of each client, logits of each network alone
needs_chain = pytest.mark.usefixtures("has_chain")
needs_groups = pytest.mark.usefixtures("has_groups")


def populations(space: SearchSpace) -> dict[str, list[Architecture]]:
    """Random ones and relatives of one of them, some twice; one; the same several times."""
    draw = rng("populations")
    random = [*space.named.values(), *(space.sample(draw) for _ in range(4))]
    relatives = [space.mutate(random[-1], draw, 0.0) for _ in range(4)]
    return {"mixed": [*random, *relatives, random[1], relatives[2], random[1]], "one": random[-1:], "same": random[-1:] * 3}


def networks_of(supernet: Supernet[Any], architectures: list[Architecture], client: int = 0) -> list[Network]:
    return [Network(client, place, supernet.pieces(architecture)) for place, architecture in enumerate(architectures)]


def prefixes_of(supernet: Supernet[Any], architectures: list[Architecture]) -> Counter[Any]:
    """How many nodes there are with each piece."""
    chains = [supernet.pieces(architecture) for architecture in architectures]
    return Counter(prefix[-1] for prefix in {chain[: end + 1] for chain in chains for end in range(len(chain))})


def seen_by_two(supernet: Supernet[Any]) -> dict[int, Tensor]:
    """Images of each client."""
    return {client: images_of(supernet, ROWS + IMAGES, seed=client) for client in (0, 5)}


@torch.no_grad()
def alone(supernet: Supernet[Any], weights: dict[str, Tensor], architecture: Architecture, images: Tensor, rows: int = ROWS) -> Tensor:
    return supernet.forward(images, supernet.take(weights, architecture), architecture, Statistics(rows=rows))


def one_after_another(scorer: Scorer, request: Request) -> list[Tensor]:
    """(2,) accuracy and loss of each architecture, nothing shared."""
    images, calibration = scorer.pixels.normalise(request.examples.images), scorer.calibration_images(request.train)
    parts = scorer.logits(request.weights, request.architectures, images, calibration)
    return [scoring._measure(logits, request.examples.labels) for part in parts for logits in part]


def assert_all_run(groups: Groups, networks: list[Network]) -> None:
    found = [network for some, _ in groups.run(networks) for network in some]
    assert len(found) == len(networks) and set(found) == set(networks)


class InGroups(Scorer):
    """As on a GPU."""

    def grouped(self, device: torch.device) -> bool:
        return True


def check_same_ranking(ones: list[Scored], others: list[Scored], images: int) -> None:
    """Of two that differ by more than an image on the edge or, with equal accuracies, by more than rounding, the same is better."""
    pairs = list(zip(ones, others, strict=True))
    for one, other in pairs:
        assert one.architecture == other.architecture
        assert other.score.loss == pytest.approx(one.score.loss, rel=1e-4)
        assert abs(other.score.accuracy - one.score.accuracy) <= 1.01 / images
    for first, second in combinations(pairs, 2):
        (a, x), (b, y) = ((one.score, other.score) for one, other in (first, second))
        equal = a.accuracy == b.accuracy and x.accuracy == y.accuracy
        if abs(a.accuracy - b.accuracy) > 2.01 / images or (equal and a.loss != pytest.approx(b.loss, rel=1e-4)):
            assert (a.rank < b.rank) == (x.rank < y.rank)


class PrefixContract(Given):
    """A network is the chain of its pieces, and scoring makes use of it."""

    @pytest.fixture
    def has_chain(self, supernet: Supernet[Any]) -> None:
        if not isinstance(supernet, Chain):
            pytest.skip("networks of this supernet are one piece; a chain is optional")

    @pytest.fixture
    def has_groups(self, supernet: Supernet[Any]) -> None:
        if not supernet.in_groups:
            pytest.skip("networks of this supernet run one by one; groups are optional")

    @pytest.fixture(scope="class")
    @staticmethod
    def two_clients(supernet: Supernet[Any]) -> TwoClients:
        """With weights of their own, and with the same; made once."""
        ours, theirs, images = weights_of(supernet), weights_of(supernet, seed=1), seen_by_two(supernet)
        mixed = populations(supernet.space)["mixed"]
        architectures: dict[Network, Architecture] = {}
        for client, own in ((0, mixed), (5, mixed[3:9])):
            architectures.update(zip(networks_of(supernet, own, client), own, strict=True))
        made: TwoClients = []
        for weights in ({0: ours, 5: theirs}, {0: ours, 5: ours}):
            logits = {one: alone(supernet, weights[one.client], own, images[one.client])[ROWS:] for one, own in architectures.items()}
            made.append((weights, logits))
        return made

    @torch.no_grad()
    def test_one_piece_after_another_is_the_network(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 9)
        for architecture in populations(supernet.space)["mixed"]:
            whole, parts = Statistics(rows=6), Statistics(rows=6)
            expected = supernet.forward(images, supernet.take(weights, architecture), architecture, whole)
            x = images
            for piece in supernet.pieces(architecture):
                x = supernet.run_piece(piece, x, supernet.take_piece(weights, piece), parts)
                assert len(supernet.pieces(architecture)) == 1 or x[0].numel() == supernet.piece_gives(piece)
            assert torch.equal(x, expected)
            assert set(parts) == set(whole)
            assert all(torch.equal(parts[name][side], whole[name][side]) for name in whole for side in (0, 1))

    def test_regions_and_costs_are_those_of_the_pieces(self, supernet: Supernet[Any]) -> None:
        for architecture in populations(supernet.space)["mixed"]:
            pieces = supernet.pieces(architecture)
            parts = [supernet.piece_regions(piece) for piece in pieces]
            assert sum(map(len, parts)) == len(supernet.regions(architecture))  # none in two pieces
            assert {name: region for part in parts for name, region in part.items()} == supernet.regions(architecture)
            costs, whole = [supernet.piece_cost(piece) for piece in pieces], supernet.space.cost(architecture)
            for what in ("parameters", "macs", "activations"):
                assert sum(getattr(cost, what) for cost in costs) == getattr(whole, what), what

    @torch.no_grad()
    def test_scores_one_by_one_are_those_of_each_network_alone(self, supernet: Supernet[Any]) -> None:
        """Bit for bit, in the order of the request."""
        weights, examples, train = weights_of(supernet), examples_of(supernet, IMAGES), examples_of(supernet, 40, seed=1)
        scorer = Scorer(supernet, SLICED, PIXELS)
        for architectures in populations(supernet.space).values():
            request = Request(weights, architectures, examples, train)
            scored = scorer.score_subnets(weights, architectures, examples, train)
            assert [one.architecture for one in scored] == architectures
            assert [[one.score.accuracy, one.score.loss] for one in scored] == torch.stack(one_after_another(scorer, request)).tolist()

    def test_auto_runs_in_groups_on_a_gpu(self, supernet: Supernet[Any]) -> None:
        def grouped(execution: str, device: str) -> bool:
            return Scorer(supernet, TrainingSettings(execution=execution), PIXELS).grouped(torch.device(device))

        assert grouped("auto", "cuda") == supernet.in_groups
        assert not any(grouped(*other) for other in (("auto", "cpu"), ("sliced", "cuda"), ("masked", "cuda")))

    @torch.no_grad()
    def test_a_piece_after_others_runs_once(self, supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        weights, images = weights_of(supernet), images_of(supernet, ROWS + 2)
        run, ran = supernet.run_piece, Counter[Any]()

        def listen(piece: Any, *given: Any) -> Tensor:
            ran[piece] += 1
            return run(piece, *given)

        monkeypatch.setattr(supernet, "run_piece", listen)
        for architectures in populations(supernet.space).values():
            networks, expected = networks_of(supernet, architectures), prefixes_of(supernet, architectures)
            assert Counter(node.piece for node in nodes_below(grow(networks))) == expected
            ran.clear()
            found = [network.place for network, _ in one_by_one(supernet, weights, networks, images, ROWS)]
            assert sorted(found) == [*range(len(architectures))] and ran == expected
            if isinstance(supernet, Chain):
                ran.clear()
                assert_all_run(Groups(supernet, {0: weights}, {0: [images]}, ROWS), networks)
                assert ran == Counter(set(expected))  # one call for all nodes with a piece
                ran.clear()
                with monkeypatch.context() as patch:
                    patch.setattr(prefixes, "CALL_BYTES", 1)
                    assert_all_run(Groups(supernet, {0: weights}, {0: [images]}, ROWS), networks)
                assert ran == expected  # a call for each of them

    @torch.no_grad()
    def test_one_by_one_holds_what_is_needed_later(self, supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The outputs at which ways part, and the newest."""
        weights, images = weights_of(supernet), images_of(supernet, ROWS + 2)
        run, alive, most = supernet.run_piece, weakref.WeakSet[Tensor](), [0]

        def listen(*given: Any) -> Tensor:
            most[0] = max(most[0], len(alive))
            alive.add(output := run(*given))
            return output

        monkeypatch.setattr(supernet, "run_piece", listen)
        for architectures in populations(supernet.space).values():
            networks, most[0] = networks_of(supernet, architectures), 0
            deque(one_by_one(supernet, weights, networks, images, ROWS), maxlen=0)
            forks: dict[Any, int] = {}  # above a node, itself included
            for node in nodes_below(grow(networks)):
                forks[node] = forks.get(node.parent, 0) + (len(node.children) > 1)
            assert most[0] <= max(forks.values()) + 1 and not alive

    @needs_chain
    @torch.no_grad()
    def test_groups_hold_one_output_on_each_way(self, supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        weights, images = weights_of(supernet), images_of(supernet, ROWS + 2)
        networks = networks_of(supernet, populations(supernet.space)["mixed"])
        run, roots, held = supernet.run_piece, grow(networks), [0]

        def holding() -> int:
            return sum(node.output is not None for node in nodes_below(roots))

        def listen(*given: Any) -> Tensor:
            held.append(holding())
            return run(*given)

        monkeypatch.setattr(supernet, "run_piece", listen)
        monkeypatch.setattr(prefixes, "trees", lambda *_: [roots])
        assert_all_run(Groups(supernet, {0: weights}, {0: [images]}, ROWS), networks)
        assert 1 < max(held) <= len({network.pieces for network in networks}) and holding() == 0
        assert all(root.output is None for root in roots)

    @needs_groups
    @torch.no_grad()
    @pytest.mark.parametrize("few", [None, 0, 10**9], ids=["by vmap", "by piece", "by kind"])
    @pytest.mark.parametrize(("held", "call", "split"), WALKS.values(), ids=WALKS)
    def test_logits_in_groups(
        self,
        supernet: Supernet[Any],
        held: float,
        call: float,
        split: list[int],
        few: int | None,
        two_clients: TwoClients,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of two clients with weights of their own, and of two that share them."""
        monkeypatch.setattr(prefixes, "HELD_BYTES", held)
        monkeypatch.setattr(prefixes, "CALL_BYTES", call)
        monkeypatch.setattr(darts_many, "CALL_BYTES", call)
        if few is not None:
            if not supernet.takes_groups:
                pytest.skip("vmap gives it its groups")
            monkeypatch.setattr(prefixes, "WITHOUT_KERNELS", True)
            monkeypatch.setattr(prefixes, "FEW", few)
        for weights, expected in two_clients:
            parts = {client: images.split(split) for client, images in seen_by_two(supernet).items()}
            found: dict[Network, Tensor] = {}
            for some, logits in groups(supernet, weights, parts, ROWS).run([*expected]):
                found.update(zip(some, logits, strict=True))
            assert set(found) == set(expected)
            for network, logits in expected.items():
                assert float((found[network] - logits).abs().max()) <= LOGITS * float(logits.abs().max())

    @needs_groups
    def test_scores_in_groups(self, supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Requests with other numbers of images run apart, and all come back in order."""
        ours, theirs = weights_of(supernet), weights_of(supernet, seed=1)
        many, few, train = examples_of(supernet, 30), examples_of(supernet, 11, seed=2), examples_of(supernet, 40, seed=1)
        given = populations(supernet.space)
        requests = [
            Request(ours, given["mixed"], many, train),
            Request(ours, given["one"], few, train),
            Request(theirs, given["mixed"][4:], many, train),
            Request(ours, [], many, train),
            Request(theirs, given["same"], many, examples_of(supernet, 5, seed=3)),
        ]
        one_by_one, in_groups = (kind(supernet, SLICED, PIXELS) for kind in (Scorer, InGroups))
        for chunk in (1000, 8):
            monkeypatch.setattr(scoring, "CHUNK", chunk)
            for ones, others, request in zip(one_by_one.score_many(requests), in_groups.score_many(requests), requests, strict=True):
                check_same_ranking(ones, others, len(request.examples))
        assert one_by_one.score_many([]) == in_groups.score_many([]) == []
