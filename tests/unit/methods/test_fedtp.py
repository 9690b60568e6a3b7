"""FedTP: who receives which projections, and what the server makes of their updates. The network: training/test_hypernetwork.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH
from fedloom.methods import fedtp
from fedloom.testing import Played
from fedloom.training.hypernetwork import made

QUERY = "attention.query.weight"


@pytest.fixture
def played(tiny: Callable[..., Settings]) -> Played:
    return Played(tiny("method=fedtp", "training.rate=0.1", "fedtp.server_rate=0.5"))


def own_of(played: Played, embedding: np.ndarray) -> dict[str, np.ndarray]:
    return made(played.state.hypernetwork, embedding, {name: array.shape for name, array in played.state.projections.items()})


def test_projections_are_personal_and_the_rest_is_shared(played: Played) -> None:
    state = played.state
    assert len(state.projections) % 3 == 0 and any(name.endswith(QUERY) for name in state.projections)
    assert not set(state.projections) & set(state.weights) and not any(name.endswith(".bias") for name in state.projections)
    one, other = (instruction.arrays["weights"] for instruction in played.method.plan(state, played.federation.names))
    assert set(one) == {*state.weights, *state.projections}
    for name, array in one.items():
        assert np.array_equal(array, other[name]) == (name in state.weights), name
        if name in state.projections:
            assert array == pytest.approx(state.projections[name], abs=0.5)


def test_updates_of_projections_move_the_hypernetwork_and_their_clients_embedding(played: Played) -> None:
    before, answers = played.state, played.round()
    after, names = played.state, [answer.report.client for answer in answers]
    assert set(after.embeddings) == set(names) and before.embeddings == {}
    total = sum(answer.report.facts["examples"] for answer in answers)
    order, flat = list(before.projections), np.zeros(0)
    for name in order:  # the bias of the last layer moves by the mean update
        mean = sum(answer.report.facts["examples"] / total * answer.report.arrays["update"][name] for answer in answers)
        flat = np.concatenate([flat, np.ravel(mean)])
    assert after.hypernetwork["out.bias"] - before.hypernetwork["out.bias"] == pytest.approx(0.5 * flat, abs=1e-6)
    for name, array in before.weights.items():
        mean = sum(answer.report.facts["examples"] / total * answer.report.arrays["update"][name] for answer in answers)
        assert after.weights[name] - array == pytest.approx(mean, abs=1e-6), name
    assert after.typical["embedding"] == pytest.approx(np.mean([after.embeddings[name] for name in names], axis=0), abs=1e-6)
    moved = [np.abs(after.embeddings[name] - played.method._first(before.seed, name)).max() for name in names]
    assert min(moved) > 0


def test_the_end_uses_the_clients_embedding_or_the_typical_one(played: Played) -> None:
    played.round()
    (absent,) = set(played.federation.names) - set(played.state.embeddings)
    for client in played.federation.names:
        embedding = played.state.typical["embedding"] if client == absent else played.state.embeddings[client]
        instruction = played.method.farewell(played.state, client)
        assert instruction.action == FINISH
        for name, array in own_of(played, embedding).items():
            assert np.array_equal(instruction.arrays["weights"][name], array), name


def test_the_transformer_of_the_paper_has_personal_projections(tiny: Callable[..., Settings]) -> None:
    """Six blocks; in each the rows of one array are queries, keys and values."""
    played = Played(tiny("method=fedtp", "space=networks", "fedtp.architecture=vit"))
    shapes = {name: array.shape for name, array in played.state.projections.items()}
    assert len(shapes) == 6 and all(rows % 3 == 0 for rows, _ in shapes.values())
    one, other = (instruction.arrays["weights"] for instruction in played.method.plan(played.state, played.federation.names))
    assert {name for name in one if not np.array_equal(one[name], other[name])} == set(shapes)


def test_spaces_without_attention_are_refused(tiny: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match=r"not defined on mobilenetv3.*space=nasvit"):
        tiny("method=fedtp", "space=mobilenetv3")
    with pytest.raises(InvalidConfig, match=r"no self-attention.*Set fedtp\.architecture=vit"):
        Played(tiny("method=fedtp", "space=networks"))
    monkeypatch.setattr(fedtp.FedTP, "spaces", ())
    with pytest.raises(InvalidConfig, match="no self-attention"):
        Played(tiny("method=fedtp", "space=mobilenetv3"))
