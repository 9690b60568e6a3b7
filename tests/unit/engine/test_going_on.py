"""Going on: a finished run with more rounds, and a new run from what another has learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedloom.assemble import new_run, reopen_run, resume_run, saved_settings
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.engine.run import Watcher
from fedloom.files import read_arrays, write_arrays
from support.checks import Fedloom, check_refused

Tiny = Callable[..., Settings]


def models(run: Path) -> dict[str, dict[str, bytes]]:
    found = {path.parent.name: read_arrays(path)[0] for path in sorted(run.glob("clients/*/model.safetensors"))}
    return {client: {name: array.tobytes() for name, array in arrays.items()} for client, arrays in found.items()}


def lines(run: Path) -> list[tuple[str, int, bool, float]]:
    entries = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [(entry["client"], entry["round"], entry["final"], entry["test_accuracy"]) for entry in entries]


@pytest.mark.parametrize("method", ["fedavg", "ditto"])  # ditto's clients remember their networks
def test_a_finished_run_with_more_rounds_is_the_run_that_had_them_from_the_beginning(
    method: str, tiny: Tiny, nobody: Watcher, tmp_path: Path
) -> None:
    """Where nothing depends on the number of rounds. Two of three clients take part, so that one remembers an earlier round."""
    overrides = f"method={method}", "participants=2", "training.schedule=constant"
    new_run(tiny(*overrides, "rounds=2"), tmp_path / "longer", nobody)
    short = models(tmp_path / "longer")
    longer = resume_run(tmp_path / "longer", nobody, rounds=4)
    whole = new_run(tiny(*overrides, "rounds=4"), tmp_path / "whole", nobody)
    assert longer.rounds == whole.rounds == 4 and longer.finished and saved_settings(tmp_path / "longer").rounds == 4
    assert models(tmp_path / "longer") == models(tmp_path / "whole") != short
    assert lines(tmp_path / "longer") == lines(tmp_path / "whole")
    assert longer.seconds > 0 and resume_run(tmp_path / "longer", nobody).clients == longer.clients


def test_a_stop_right_after_the_settings_were_written_loses_nothing(tiny: Tiny, nobody: Watcher, finished_run: Path) -> None:
    """result.json still says that the run is finished."""
    text = (finished_run / "config.toml").read_text()
    (finished_run / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    assert resume_run(finished_run, nobody).rounds == 3


def test_what_cannot_go_on(fedloom_: Fedloom, finished_run: Path, tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    check_refused(fedloom_("resume", finished_run, "rounds=2"), InvalidConfig, "has done 2 rounds already. Give more, such as rounds=7")
    refused = fedloom_("resume", finished_run, "training.rate=1")
    check_refused(refused, InvalidConfig, "training cannot be changed", f"weights={finished_run}")
    new_run(tiny("method=local"), tmp_path / "local", nobody)
    check_refused(fedloom_("resume", tmp_path / "local", "rounds=9"), InvalidConfig, "local has no rounds")
    assert fedloom_("resume", finished_run, "rounds=3").code == 0 and saved_settings(finished_run).rounds == 3


def test_resumed_on_other_images_it_says_how_to_go_on(finished_run: Path, nobody: Watcher) -> None:
    path = finished_run / "state" / "split.safetensors"
    arrays, facts = read_arrays(path)
    write_arrays(path, arrays, {**facts, "checksum": 1})
    with pytest.raises(InvalidData, match=r"or go on with other images in a new run: weights="):
        resume_run(finished_run, nobody)


# -- from another run -------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "perfedsde", "hapfnas"])
def test_a_run_begins_with_what_another_has_learned(method: str, tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    first = tmp_path / "first"
    new_run(tiny(f"method={method}", "rounds=1"), first, nobody)
    new_run(tiny(f"method={method}", "rounds=1", f"weights={first}", "seed=9"), tmp_path / "second", nobody)
    learned, there = reopen_run(first).state(), reopen_run(tmp_path / "second")
    field = "supernet" if method == "hapfnas" else "weights"
    begun = getattr(there.method.start(9), field)
    assert all(np.array_equal(getattr(learned, field)[name], begun[name]) for name in begun)
    (tmp_path / "first").rename(tmp_path / "gone")  # a resume needs nothing from elsewhere
    resume_run(tmp_path / "second", nobody, rounds=2)
    assert "the weights in" in json.loads((tmp_path / "second" / "result.json").read_text())["environment"]["weights"]


def test_a_federations_file_for_newcomers_is_a_beginning(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    from fedloom.engine.newcomers import shared_state
    from fedloom.engine.store import pack_state

    new_run(tiny("rounds=1"), tmp_path / "first", nobody)
    state = reopen_run(tmp_path / "first").state()
    arrays, facts = pack_state(shared_state(state), 1)
    write_arrays(tmp_path / "newcomers.safetensors", arrays, {**facts, "federation": "any"})
    new_run(tiny("rounds=1", f"weights={tmp_path}/newcomers.safetensors"), tmp_path / "second", nobody)
    begun = reopen_run(tmp_path / "second").method.start(0).weights
    assert all(np.array_equal(state.weights[name], begun[name]) for name in begun)


def test_other_classes_begin_with_a_fresh_classifier(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny("method=fedavg", "rounds=1"), tmp_path / "first", nobody)
    for path in (tmp_path / "first" / "clients").glob("*/model.safetensors"):
        arrays, facts = read_arrays(path)
        write_arrays(path, arrays, {**facts, "classes": list("abcdefghij")})
    result = new_run(tiny("method=fedavg", "rounds=1", f"weights={tmp_path}/first", "seed=4"), tmp_path / "second", nobody)
    assert result.environment["weights"].endswith("the classes are others than there, so the classifier begins afresh")
    learned, second = reopen_run(tmp_path / "first").state().weights, reopen_run(tmp_path / "second")
    begun, head = second.method.start(4).weights, second.tools.supernet.in_head
    assert {name: np.array_equal(learned[name], begun[name]) for name in begun} == {name: not head(name) for name in begun}


def test_runs_that_do_not_fit(tiny: Tiny, nobody: Watcher, finished_run: Path, tmp_path: Path) -> None:
    for overrides, words in (
        (["space=darts"], "is a run on mobilenetv3.*Set space=mobilenetv3"),
        (["fedavg.architecture=largest"], "weights has a network .*Give both the same architecture"),
        (["mobilenetv3.width=0.2"], r"mobilenetv3\.width=.*Give both the same"),
        (["method=perfedsde"], "holds one network, and perfedsde begins with a supernet"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            new_run(tiny("method=fedavg", *overrides, f"weights={finished_run}"), tmp_path / "other", nobody)
    with pytest.raises(InvalidConfig, match="is no run that could be gone on from"):
        new_run(tiny(f"weights={tmp_path}"), tmp_path / "other", nobody)
