"""How the search network of the DARTS repository (quark0/darts, ``cnn/model_search.py``) names the weights of our DARTS supernet."""

from __future__ import annotations

from typing import Any

from fedloom.spaces.darts import DARTS, DARTSSettings, Part
from fedloom.spaces.genotype import EDGES, OPERATIONS
from fedloom.supernets.base import Supernet
from fedloom.supernets.foreign.base import PublicNetwork

MOMENTS = ("running_mean", "running_var")


def table(supernet: Supernet[Any]) -> dict[str, str]:
    """Our name -> theirs, for every parameter and every running statistic.

    A two-operation supernet takes its share of the same network: skip connections and 3x3 separable convolutions.
    """
    space: DARTS = supernet.space
    names = _names(space.stem, {"conv": "stem.0", "norm": "stem.1"})
    for number, cell in enumerate(space.cells):
        for place, part in enumerate(cell.inputs):
            names |= _names(part, _layers(part, f"cells.{number}.preprocess{place}"))
        for edge in range(len(EDGES)):
            for operation, part in cell.operations[edge].items():
                names |= _names(part, _layers(part, f"cells.{number}._ops.{edge}._ops.{OPERATIONS.index(operation)}"))
    return {**names, **{f"classifier.{half}": f"classifier.{half}" for half in ("weight", "bias")}}


def _layers(part: Part, theirs: str) -> dict[str, str]:
    """Our layers -> theirs: numbered in order, except where the network is not a plain sequence."""
    if any(layer.kind == "halve" for layer in part.layers):
        return {"halve.even": f"{theirs}.conv_1", "halve.odd": f"{theirs}.conv_2", "norm": f"{theirs}.bn"}
    inside = theirs if any(layer.kind.endswith("pool") for layer in part.layers) else f"{theirs}.op"
    return {layer.name: f"{inside}.{number}" for number, layer in enumerate(part.layers) if layer.name}


def _names(part: Part, layers: dict[str, str]) -> dict[str, str]:
    ours = [*part.shapes, *(f"{norm}.{moment}" for norm in part.norms for moment in MOMENTS)]
    split = {name: name.removeprefix(f"{part.name}.").rpartition(".") for name in ours}
    return {name: f"{layers[layer]}.{last}" for name, (layer, _, last) in split.items()}


def expected_leftovers(supernet: Supernet[Any]) -> str:
    """Counters of batches, which we do not need; the architecture parameters, which some descendants of the repository store; the
    operations that a two-operation supernet does without."""
    space: DARTS = supernet.space
    cells = "|".join(map(str, range(len(space.cells))))
    others = "|".join(str(number) for number, operation in enumerate(OPERATIONS) if operation not in space.operations)
    known = r"\.num_batches_tracked$|^_?alphas_(normal|reduce)$"
    return rf"{known}|^cells\.({cells})\._ops\.\d+\._ops\.({others})\." if others else known


NETWORK = PublicNetwork(
    source="DARTS search network, cnn/model_search.py (quark0/darts)",
    settings=DARTSSettings(channels=16, cells=8, operations="full"),
    table=table,
    expected_leftovers=expected_leftovers,
    size=32,
    mean=(0.49139968, 0.48215827, 0.44653124),  # as the repository gives them
    std=(0.24703233, 0.24348505, 0.26158768),
)
