"""What never leaves a client: of any method what its manifest does not name, labels, their counts, and what the client remembers; of
PerFedSDE-NAS also its architectures, scores, image features and population."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.boundary import release
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Answer
from fedloom.methods.base import METHODS
from fedloom.testing import Played
from fedloom.training.scoring import Score, Scored, Scorer
from support.perfedsde import ANCHORED, Secrets, overheard
from support.untrained import fake_generator

Message = Instruction | Report
KINDS = ("u1", "i2", "i4", "i8", "f2", "f4", "f8")
SETTINGS = ("perfedsde.iterations=2", "perfedsde.averaging=coverage_effort", "clients=2", "split.size=30")
GENERATORS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"fake": fake_generator, "shipped": nullcontext}


def pieces(messages: Sequence[Message]) -> Iterator[bytes]:
    """Every array, every name and every word of some messages; what several of them share, once."""
    arrays = {id(array): array for message in messages for group in message.arrays.values() for array in group.values()}
    yield from (array.tobytes() for array in arrays.values())
    for message in messages:
        yield repr({**vars(message), "arrays": {key: list(group) for key, group in message.arrays.items()}}).encode()


def written(values: Any) -> set[bytes]:
    """The ways to write numbers down one after the other: arrays of any type that holds them, or text."""
    array = np.asarray(values, float)
    arrays = [array.astype(kind) for kind in KINDS]
    exact = {one.tobytes() for one in arrays if kind_is_wide(one) or (one == array).all()}
    return exact | {", ".join(map(repr, array.tolist())).encode(), ", ".join(map(str, np.asarray(values).tolist())).encode()}


def kind_is_wide(array: np.ndarray) -> bool:
    return array.dtype in ("f4", "f8")


def secrets_of(played: Played, secrets: Secrets) -> dict[str, list[set[bytes]]]:
    """What -> each of its kind, in all ways to write it."""
    space, names = played.method.tools.space, played.federation.names
    rows = {one.architecture.choices for call in secrets.scored for one in call} | {one.choices for one in secrets.drawn}
    rows |= {tuple(row.tolist()) for answer in played.answers for row in answer.memory.arrays["population"]}
    rows = {row for row in rows if max(row) > 1}  # one of 0 and 1 alone could be a coverage by accident
    architectures = [space.canonical(row) for row in rows]
    accuracies = [[one.score.accuracy for one in call] for call in secrets.scored]
    labels = [played.federation.data_of(name).train.labels for name in names]
    return {
        "choices": [written(one.choices) for one in architectures],
        "encodings": [written(space.encode(one)) for one in architectures],
        "names": [{one.id.encode()} for one in architectures],
        "accuracies": [written(some) for some in accuracies if len(some) > 2 and any(one % 1 for one in some)],
        "losses": [{np.float64(one.score.loss).tobytes(), repr(one.score.loss).encode()} for call in secrets.scored for one in call],
        "label counts": [written(np.bincount(own, minlength=10)) for own in labels],
        "labels": [written(own) for own in labels],
        "features": [written(task.detach().cpu().numpy().ravel()) for task in secrets.tasks],
    }


def found_in(messages: Sequence[Message], kinds: dict[str, list[set[bytes]]]) -> set[str]:
    everything = b"\n".join(pieces(messages))
    return {kind for kind, some in kinds.items() for ways in some for way in ways if way in everything}


@pytest.mark.parametrize(("generator", "course"), [("fake", ()), ("shipped", ()), ("fake", ANCHORED)])
def test_nothing_private_is_in_any_message(generator: str, course: Sequence[str], tiny: Callable[..., Settings]) -> None:
    with GENERATORS[generator]():
        played = Played(tiny(*SETTINGS, *course))
        with overheard(played.method) as secrets:
            played.round()
            for name in played.federation.names:
                played.farewell(name)
    kinds = secrets_of(played, secrets)
    assert all(len(some) >= 2 for kind, some in kinds.items() if kind != "features")
    assert len(kinds["features"]) == (2 if played.method._diffusion.generator.guided else 0)
    assert len(played.messages) == 2 * 4
    assert found_in(played.messages, kinds) == set()
    for instruction, answer in zip(played.instructions, played.answers, strict=True):
        report = answer.report
        assert release(report, instruction, played.method.uploads)
        assert set(report.arrays) == ({"update", "coverage"} if report.arrays else set())
        assert report.facts == ({"examples": len(played.federation.data_of(report.client).train)} if report.facts else {})
        assert set(instruction.arrays) == {"weights"} and instruction.facts == {}


def test_it_would_be_found(tiny: Callable[..., Settings]) -> None:
    """The same search finds each kind of secret when it is put into a message."""
    with fake_generator():
        played = Played(tiny(*SETTINGS))
        with overheard(played.method) as secrets:
            (answer, *_) = played.round()
    kinds = secrets_of(played, secrets)
    for kind, some in kinds.items():
        for way in some[0]:
            hidden = np.frombuffer(b"\x01" + way + b"\x02", np.uint8)
            assert kind in found_in([replace(answer.report, arrays={"more": {"array": hidden}})], {kind: some})
    assert found_in([Report("client-000", 0, facts={"best": answer.diary.architecture})], kinds) == {"names"}


# -- every method -------------------------------------------------------------------------------------------------

SENT_AND_KEPT = {"scaffold", "fedala"}  # at first a control variate, and a classifier that began at zero, are what the update says


def one_of_each(message: Message) -> dict[str, set[str]]:
    """Every field of a message, with the names of its arrays."""
    return {**{key: set(group) for key, group in message.arrays.items()}, **{key: set() for key in message.facts}}


@pytest.mark.parametrize("method", list(METHODS))
def test_reports_hold_what_the_manifest_names_and_nothing_private(method: str, tiny: Callable[..., Settings]) -> None:
    """Two rounds, so that clients have memories, and the end: fields, their arrays, and every byte that leaves."""
    with fake_generator():
        played = Played(tiny(f"method={method}", "clients=2", "participants=2", "split.size=30"))
        remembered: list[Any] = []
        for _ in range(2):
            if not played.method.finished(played.state):
                remembered += [array for answer in played.round() for array in answer.memory.arrays.values()]
        rounds = len(played.answers)
        for name in played.federation.names:
            assert played.farewell(name).report == Report(name, played.state.round)
    manifest = played.method.uploads
    for instruction, answer in zip(played.instructions[:rounds], played.answers[:rounds], strict=True):
        said = one_of_each(answer.report)
        assert set(said) == set(manifest)
        for field, upload in manifest.items():
            model = set(instruction.arrays[upload.like]) if upload.like else set()
            assert said[field] == model or (upload.part and said[field] < model), field
    labels = [played.federation.data_of(name).train.labels for name in played.federation.names]
    kinds = {
        "labels": [written(own) for own in labels],
        "label counts": [written(np.bincount(own, minlength=10)) for own in labels],
        "memories": [{array.tobytes()} for array in remembered if array.size > 2 and array.any() and method not in SENT_AND_KEPT],
    }
    everything = [answer.report for answer in played.answers]
    assert found_in(everything, kinds) == set()
    if rounds:
        hidden = replace(everything[0], arrays={**everything[0].arrays, "more": {"labels": labels[0].numpy()}})
        assert found_in([hidden], kinds) == {"labels"}  # it would be found


# -- what a client finds last changes what it keeps, not what it sends ------------------------


def same_report(one: Answer, other: Answer) -> bool:
    def plain(report: Report) -> Any:
        groups = {key: {name: array.tobytes() for name, array in group.items()} for key, group in report.arrays.items()}
        return report.client, report.round, groups, dict(report.facts)

    return bool(plain(one.report) == plain(other.report))


def same_memory(one: Answer, other: Answer) -> bool:
    return one.memory.arrays["population"].tobytes() == other.memory.arrays["population"].tobytes()


@pytest.fixture
def played(tiny: Callable[..., Settings]) -> Iterator[Played]:
    """One iteration: the supernet is trained on the population alone, so candidates and their scores must not matter to the report."""
    with fake_generator():
        yield Played(tiny("perfedsde.iterations=1", "perfedsde.population=5", "participants=1"))


def test_candidates_do_not_show(played: Played, tiny: Callable[..., Settings]) -> None:
    (instruction,) = played.method.plan(played.state, played.federation.names)
    one = played.answer(instruction)
    with fake_generator(guided=False):
        other = Played(tiny("perfedsde.iterations=1", "perfedsde.population=5", "participants=1"))
        two = other.answer(instruction)
    assert same_report(one, two)
    assert one.diary.notes["guided"] != two.diary.notes["guided"]


def test_scores_of_offspring_do_not_show(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    (instruction,) = played.method.plan(played.state, played.federation.names)
    score = Scorer.score_subnets
    answers = []
    for invented in (Score(1.0, 0.0), Score(0.0, 9.0)):
        calls: list[int] = []

        def score_falsely(self: Scorer, *given: Any, invented: Score = invented, calls: list[int] = calls) -> list[Scored]:
            calls.append(len(given[1]))
            found = score(self, *given)
            return found if len(calls) == 1 else [replace(each, score=invented) for each in found]

        monkeypatch.setattr(Scorer, "score_subnets", score_falsely)
        answers.append(played.answer(instruction))
        assert calls == [5, 2]  # the population, then the offspring
    assert same_report(*answers) and not same_memory(*answers)


def test_other_labels_change_no_field_of_the_report(played: Played) -> None:
    """They change the update, as they should, and neither its shape nor what goes with it."""
    (instruction,) = played.method.plan(played.state, played.federation.names)
    site = played.site(instruction.client)
    train = replace(site.data.train, labels=(site.data.train.labels + 1) % 10)
    one, two = played.answer(instruction), played.method.answer(instruction, replace(site, data=replace(site.data, train=train)))
    assert not same_report(one, two)
    assert one.report.facts == two.report.facts and set(one.report.arrays) == set(two.report.arrays) == {"update", "coverage"}
    for name, update in one.report.arrays["update"].items():
        assert update.shape == two.report.arrays["update"][name].shape
