"""Genotypes: derived cells of the DARTS space (Liu et al., ICLR 2019, section 2.4) and the text their authors print them as."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import InvalidArchitecture

OPERATIONS = ("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5")
INPUTS, NODES = 2, 4  # states 0 and 1 are the inputs of a cell, states 2 to 5 its nodes
EDGES = tuple((source, INPUTS + node) for node in range(NODES) for source in range(INPUTS + node))  # states, in the order of the genes
STATES = (*(f"input {number}" for number in range(INPUTS)), *(f"node {number + 1}" for number in range(NODES)))
KINDS = ("normal", "reduction")
CONCATENATED = tuple(range(INPUTS, INPUTS + NODES))
EXAMPLE = "Genotype(normal=[('sep_conv_3x3', 1), …], normal_concat=range(2, 6), reduce=[…], reduce_concat=range(2, 6))"

Pairs = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Genotype:
    """Two cells, each as (operation, source state) pairs, two per node in the order of the nodes, and the states that are its output.

    >>> text = str(derive(np.eye(14, 8, 4), np.eye(14, 8, 1)))
    >>> Genotype.parse(text).normal[:2]
    (('sep_conv_3x3', 0), ('sep_conv_5x5', 1))
    """

    normal: Pairs
    normal_concat: tuple[int, ...]
    reduce: Pairs
    reduce_concat: tuple[int, ...]

    def __str__(self) -> str:
        def output(states: tuple[int, ...]) -> str:
            run = range(states[0], states[-1] + 1) if states else range(0)
            return repr(run) if states and tuple(run) == states else repr(list(states))

        return (
            f"Genotype(normal={list(self.normal)!r}, normal_concat={output(self.normal_concat)}, "
            f"reduce={list(self.reduce)!r}, reduce_concat={output(self.reduce_concat)})"
        )

    @classmethod
    def parse(cls, text: str) -> Genotype:
        """From its text; reads literals only and runs nothing. Output states may be a range or a list."""
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "Genotype" or call.args:
                raise ValueError
            found = {str(keyword.arg): keyword.value for keyword in call.keywords}
            if len(found) != len(call.keywords) or set(found) != {field.name for field in fields(cls)}:
                raise ValueError
            return cls(
                _pairs(ast.literal_eval(found["normal"])),
                _states(found["normal_concat"]),
                _pairs(ast.literal_eval(found["reduce"])),
                _states(found["reduce_concat"]),
            )
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise InvalidArchitecture(f"{text[:60]!r} is not a genotype: write {EXAMPLE}", text=text[:1000]) from None

    @property
    def operations(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The operations on the 14 edges of both cells, ``none`` where there is no pair."""
        return _operations("normal", self.normal, self.normal_concat), _operations("reduction", self.reduce, self.reduce_concat)

    @classmethod
    def of(cls, normal: Sequence[str], reduction: Sequence[str]) -> Genotype:
        """From the operations on all edges. The pairs of a node come in the order of their sources; which is stronger is not known."""
        cells = []
        for kind, operations in zip(KINDS, (normal, reduction), strict=True):
            edges = [(edge, name) for edge, name in zip(EDGES, operations, strict=True) if name != "none"]
            for node in CONCATENATED:
                count = sum(target == node for (_, target), _ in edges)
                if count != 2:
                    text = f"{STATES[node]} of the {kind} cell has {count} edges with an operation other than none"
                    raise InvalidArchitecture(f"{text}, but a genotype has exactly two per node", node=node)
            cells.append(tuple((name, source) for (source, _), name in edges))
        return cls(cells[0], CONCATENATED, cells[1], CONCATENATED)


def derive(normal: npt.ArrayLike, reduction: npt.ArrayLike, operations: tuple[str, ...] = OPERATIONS) -> Genotype:
    """The genotype of mixture coefficients (after the softmax where there is one), each (14, operations).

    An edge is as strong as its largest coefficient of an operation other than ``none``. Every node keeps its two strongest
    edges, the stronger one first, each with that operation; ties go to the earlier edge and the earlier operation.
    """
    allowed = [name for name in operations if name != "none"]

    def cell(coefficients: npt.ArrayLike) -> Pairs:
        table = np.asarray(coefficients, float)
        if table.shape != (len(EDGES), len(operations)) or not np.isfinite(table).all():
            shape = (len(EDGES), len(operations))
            raise InvalidArchitecture(f"The coefficients of a cell must be finite and of shape {shape}; got shape {table.shape}")
        table = table[:, [name != "none" for name in operations]]
        pairs: list[tuple[str, int]] = []
        for node in range(INPUTS, INPUTS + NODES):
            incoming = [edge for edge, (_, target) in enumerate(EDGES) if target == node]
            strongest = sorted(incoming, key=lambda edge: -table[edge].max())[:2]
            pairs += [(allowed[int(table[edge].argmax())], EDGES[edge][0]) for edge in strongest]
        return tuple(pairs)

    return Genotype(cell(normal), CONCATENATED, cell(reduction), CONCATENATED)


def _operations(kind: str, pairs: Pairs, output: tuple[int, ...]) -> tuple[str, ...]:
    if len(pairs) != 2 * NODES or output != CONCATENATED:
        raise InvalidArchitecture(f"The {kind} cell of a darts genotype must have {NODES} nodes of two edges each, all of them its output")
    edges = {(source, INPUTS + index // 2): operation for index, (operation, source) in enumerate(pairs)}
    if len(edges) != len(pairs) or not set(edges) <= set(EDGES) or "none" in edges.values():
        raise InvalidArchitecture(f"Every node of the {kind} cell must read two different earlier states, not by none; got {list(pairs)}")
    return tuple(edges.get(edge, "none") for edge in EDGES)


def _pairs(value: Any) -> Pairs:
    pairs = tuple((operation, source) for operation, source in value)
    if not all(isinstance(operation, str) and type(source) is int for operation, source in pairs):
        raise ValueError
    return pairs


def _states(node: ast.expr) -> tuple[int, ...]:
    if isinstance(node, ast.Call):
        bounds = [ast.literal_eval(bound) for bound in node.args]
        if not isinstance(node.func, ast.Name) or node.func.id != "range" or node.keywords:
            raise ValueError
        first, end = bounds
        if not 0 <= first <= end <= 100:  # a text must not make a long list
            raise ValueError
        return tuple(range(first, end))
    states = tuple(ast.literal_eval(node))
    if not all(type(state) is int for state in states):
        raise ValueError
    return states
