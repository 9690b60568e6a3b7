"""Logits of many networks of one supernet, in which everything that networks have in common from their beginning is computed once.

A network is a chain of pieces (``Supernet.pieces``). Activations and normalisation statistics up to a piece depend on the pieces up to
there, so the networks of a population are a tree: a node is a piece after given others, and runs once.

Two walks. *One by one*: depth first, the operations and shapes of ``forward``, so equal to it bit for bit. *In groups*, for GPUs: all
nodes with the same piece, or of the same kind, run as one call, of one client or of several; equal up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedloom.supernets import fused
from fedloom.supernets.base import Piece, Supernet, Weights
from fedloom.supernets.elastic import sent
from fedloom.supernets.normalisation import Statistics
from fedloom.training.packed import Packed
from fedloom.training.peak import allowed_bytes

# Bounds of a walk in groups; they change memory and speed, not results.
HELD_BYTES = 8e9  # what nodes have computed for those that follow, on a CPU
CALL_BYTES = 4e9  # activations inside one call, on a CPU
HELD_SHARE = 0.2  # the same as shares of a GPU's memory
CALL_SHARE = 0.1
FEW = 20  # pieces of networks for each different one: below, they run by kind
WITHOUT_KERNELS = False  # tests: networks in groups as on a GPU
KEPT_WHOLE = 2  # outputs of one call are one tensor, which lives until all of it has been used

Moments = dict[str, tuple[Tensor, Tensor]]  # means and variances by layer


@dataclass(frozen=True, eq=False)
class Network:
    """One of those to run: whose weights and images, its place among that client's, and its pieces."""

    client: int
    place: int
    pieces: tuple[Piece, ...]


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A piece after those of its parents. The root of a tree has none, and stands for the images of one client."""

    piece: Piece
    number: int  # of its piece
    kind: int  # those of one kind run together
    parent: Node | None
    client: int
    children: dict[int, Node] = field(default_factory=dict)  # by the number of their piece
    ends: list[Network] = field(default_factory=list)  # those whose last piece this is
    # of a walk in groups
    output: Tensor | None = None  # (n, …), while children need it; channels last where pieces take groups
    asked: int = 0  # children that still need it
    measured: Moments = field(default_factory=dict)  # of its normalisations, where they serve for further images

    def taken(self) -> Tensor:
        """What the parent gave; the last child leaves nothing behind."""
        assert self.parent is not None and self.parent.output is not None
        output = self.parent.output
        self.parent.asked -= 1
        if not self.parent.asked:
            self.parent.output = None
        return output


def grow(networks: Iterable[Network], kind: Callable[[Piece], Hashable] | None = None) -> list[Node]:
    """The roots of the trees that these networks are, one for each client. kind: by which nodes run together; default: their piece."""
    roots: dict[int, Node] = {}
    numbers: dict[Piece, int] = {}
    kinds: dict[Hashable, int] = {}
    known: dict[int, tuple[int, int]] = {}  # number and kind by the object itself: to hash its fields takes longer than the rest
    for network in networks:
        if network.client not in roots:
            roots[network.client] = Node(None, -1, -1, None, network.client)
        node = roots[network.client]
        for piece in network.pieces:
            if id(piece) not in known:
                number = numbers.setdefault(piece, len(numbers))
                known[id(piece)] = number, kinds.setdefault(kind(piece), len(kinds)) if kind else number
            number, own = known[id(piece)]
            following = node.children.get(number)
            if following is None:
                following = node.children[number] = Node(piece, number, own, node, network.client)
            node = following
        node.ends.append(network)
    return list(roots.values())


def nodes_below(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node but the roots, parents before children and neighbours in the tree close to each other."""
    waiting = [child for root in reversed(roots) for child in reversed(root.children.values())]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children.values())


# -- one by one ---------------------------------------------------------------------------------------------------
def one_by_one(
    supernet: Supernet[Any], weights: Weights, networks: Sequence[Network], images: Tensor, rows: int
) -> Iterator[tuple[Network, Tensor]]:
    """(n, classes) logits of each network of one client, in the order of the tree.

    images: (n, c, h, w), of which the first ``rows`` measure the statistics. What a node gives is dropped when its last child has it.
    """
    take = cache(lambda piece: supernet.take_piece(weights, piece))
    (root,) = grow(networks)
    waiting = [(child, images) for child in reversed(root.children.values())]
    while waiting:
        node, x = waiting.pop()
        x = supernet.run_piece(node.piece, x, take(node.piece), Statistics(rows=rows))
        for network in node.ends:
            yield network, x
        waiting += [(child, x) for child in reversed(node.children.values())]


# -- in groups ----------------------------------------------------------------------------------------------------
class Groups:
    """Walks over networks of several clients who have equally many images.

    weights: the supernet of each client. parts: the images of each client, (n, c, h, w) at a time; the first ``rows`` of its first part
    measure the statistics, which serve for all parts. Their precision is that of all activations.
    """

    def __init__(self, supernet: Supernet[Any], weights: Mapping[int, Weights], parts: Mapping[int, Sequence[Tensor]], rows: int) -> None:
        self.supernet, self.parts, self.rows = supernet, parts, rows
        one, *others = weights.values()
        self.shared = all(other is one for other in others)
        # as they are where all clients have the same ones, else (clients, …)
        self.weights = (Packed.of(one) if self.shared else Packed.stack(list(weights.values()))).to(next(iter(parts.values()))[0].dtype)
        self.row = {client: row for row, client in enumerate(weights)}
        self._rows: dict[tuple[int, ...], Tensor] = {}  # of nodes, on the device
        self._spans: dict[Hashable, Packed] = {}  # weights by kind of piece
        first = next(iter(parts.values()))[0]
        self.whole = supernet.takes_groups and (WITHOUT_KERNELS or fused.can_run(first))
        self.merged = False
        memory = allowed_bytes(first.device) if first.is_cuda else 0
        self.held, self.most = HELD_SHARE * memory or HELD_BYTES, CALL_SHARE * memory or CALL_BYTES

    def run(self, networks: Sequence[Network]) -> Iterator[tuple[list[Network], Tensor]]:
        """Some networks, and their logits on all images but those that measure: (some, n, classes)."""
        first, *others = next(iter(self.parts.values()))
        # Small groups wait for Python: there it pays to run pieces of one kind at once, though all then cost as much as the largest.
        pieces = [piece for network in networks for piece in network.pieces]
        self.merged = self.whole and len(pieces) < FEW * len(set({id(piece): piece for piece in pieces}.values()))
        most = self.held / (KEPT_WHOLE * first.element_size() * len(first))
        for roots in trees(self.supernet, networks, most, self.supernet.kind if self.merged else None):
            found: dict[Network, list[Tensor]] = {}
            for part in range(1 + len(others)):
                rows = 0 if part else self.rows
                for node, logits in self._walk(roots, part, rows):
                    for network in node.ends:
                        found.setdefault(network, []).append(logits[rows:])
            yield list(found), torch.stack([torch.cat(logits) for logits in found.values()])

    def _walk(self, roots: Sequence[Node], part: int, rows: int) -> Iterator[tuple[Node, Tensor]]:
        """The last nodes and their logits. A piece runs when all nodes that have it can: networks of different depths before a block
        still run it together."""
        waiting = Counter(node.kind for node in nodes_below(roots))
        ready: dict[int, list[Node]] = {}

        def give(node: Node, output: Tensor) -> None:
            node.output, node.asked = output, len(node.children)
            for child in node.children.values():
                ready.setdefault(child.kind, []).append(child)
                waiting[child.kind] -= 1

        for root in roots:
            give(root, self._kept(images := self.parts[root.client][part], 1))
        while ready:
            nodes = ready.pop(min(ready, key=lambda kind: waiting[kind]))  # none to wait for, unless a kind comes twice in a network
            several = min(self._at_once(piece, images) for piece in {node.number: node.piece for node in nodes}.values())
            for group in (nodes[start : start + several] for start in range(0, len(nodes), several)):
                outputs = self._call(group, rows)
                for node, output, kept in zip(group, outputs, self._kept(outputs, 2), strict=True):
                    if node.children:
                        give(node, kept)
                    if node.ends:
                        yield node, output

    def _kept(self, maps: Tensor, channels: int) -> Tensor:
        """As nodes keep them: for groups the channels come last, for all maps of a call at once."""
        return maps.movedim(channels, -1) if self.whole else maps

    def _call(self, nodes: Sequence[Node], rows: int) -> Tensor:
        """(nodes, n, …): what the pieces of these nodes, one or of one kind, make of what their parents gave."""
        piece, clients = nodes[0].piece, tuple(self.row[node.client] for node in nodes)
        alike = self.merged and self.supernet.kind(piece) != piece  # of one, too: all parts of the images see the same widths
        own, axis = self._whole(piece, clients) if alike else self._own(self.supernet.piece_regions(piece), clients)
        if self.whole:
            statistics = Statistics({} if rows else _stacked([node.measured for node in nodes]), rows)
            x = _together([node.taken() for node in nodes])
            if alike:
                outputs = self.supernet.run_alike([node.piece for node in nodes], x, own, statistics)
            else:
                outputs = self.supernet.run_piece(piece, x, own, statistics)
            return self._keep(nodes, outputs, statistics, rows)

        def one(x: Tensor, own: Weights, known: Moments) -> tuple[Tensor, Moments]:
            statistics = Statistics(known, rows)
            return self.supernet.run_piece(piece, x, own, statistics), dict(statistics) if rows else {}

        if len(nodes) == 1:  # the same without the cost of vmap
            output, measured = one(nodes[0].taken(), own, nodes[0].measured)
            outputs, measured = output[None], {name: (mean[None], variance[None]) for name, (mean, variance) in measured.items()}
        else:
            known = {} if rows else _stacked([node.measured for node in nodes])
            outputs, measured = torch.vmap(one, in_dims=(0, axis, 0))(torch.stack([node.taken() for node in nodes]), own, known)
        return self._keep(nodes, outputs, measured, rows)

    def _keep(self, nodes: Sequence[Node], outputs: Tensor, measured: Moments, rows: int) -> Tensor:
        """The outputs; moments stay with their nodes where further images need them."""
        if rows and len(self.parts[nodes[0].client]) > 1:
            for index, node in enumerate(nodes):
                node.measured = {name: (mean[index], variance[index]) for name, (mean, variance) in measured.items()}
        return outputs

    def _own(self, regions: Mapping[str, Any], rows: tuple[int, ...]) -> tuple[Weights, int | None]:
        """These weights of each node's client, and their axis of nodes; none where all nodes have the same."""
        if self.shared:
            return {name: self.weights[name][region] for name, region in regions.items()}, None
        if len(set(rows)) == 1:
            return {name: self.weights[name][rows[0]][region] for name, region in regions.items()}, None
        chosen = self._chosen(rows)
        return {name: self.weights[name][:, *region][chosen] for name, region in regions.items()}, 0

    def _whole(self, piece: Piece, rows: tuple[int, ...]) -> tuple[Weights, int | None]:
        """The same for pieces of a piece's kind. Their weights lie together, and one launch copies those of all nodes."""
        kind = self.supernet.kind(piece)
        if kind not in self._spans:
            self._spans[kind] = self.weights.span(self.supernet.kind_names(piece))
        span = self._spans[kind]
        if self.shared:
            return span, None
        if len(set(rows)) == 1:
            return Packed(span.flat[rows[0]], span.shapes), None
        return Packed(span.flat[self._chosen(rows)], span.shapes), 0

    def _chosen(self, rows: tuple[int, ...]) -> Tensor:
        if rows not in self._rows:
            self._rows[rows] = sent(torch.tensor(rows), self.weights.flat.device)
        return self._rows[rows]

    def _at_once(self, piece: Piece, images: Tensor) -> int:
        """How many nodes with this piece fit into one call; at least one."""
        return max(1, int(self.most // (images.element_size() * len(images) * self.supernet.piece_cost(piece).activations)))


def _together(maps: list[Tensor]) -> Tensor:
    """(nodes, n, c, h, w) of maps whose channels come last, as they do in memory; one of them without a copy."""
    return (maps[0][None] if len(maps) == 1 else torch.stack(maps)).movedim(-1, 2)


def trees(
    supernet: Supernet[Any], networks: Sequence[Network], most: float, kind: Callable[[Piece], Hashable] | None = None
) -> Iterator[list[Node]]:
    """Trees of all networks together, or of some after others where they would hold more than ``most`` numbers an image at once.

    Neighbours in the tree stay together, so little is computed twice.
    """
    roots = grow(networks, kind)
    nodes = list(nodes_below(roots))
    if len(networks) < 2 or _most_held(supernet, nodes) <= most:
        yield roots
        return
    ordered = [network for node in nodes for network in node.ends]
    for half in (ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]):
        yield from trees(supernet, half, most, kind)


def _most_held(supernet: Supernet[Any], nodes: Sequence[Node]) -> int:
    """Numbers an image that a walk may hold at once: at most one output on each way from a root to a last node."""
    gives: dict[int, int] = {}
    below: dict[Node | None, int] = dict.fromkeys(nodes, 0)
    roots = 0
    for node in reversed(nodes):  # children before parents
        if node.number not in gives:
            gives[node.number] = supernet.piece_gives(node.piece)
        held = max(below[node], gives[node.number])
        if node.parent in below:
            below[node.parent] += held
        else:
            roots += held
    return roots


def _stacked(measured: Sequence[Moments]) -> Moments:
    """Statistics of nodes with a leading axis of nodes."""
    means, variances = ({name: torch.stack([one[name][side] for one in measured]) for name in measured[0]} for side in (0, 1))
    return {name: (means[name], variances[name]) for name in means}
