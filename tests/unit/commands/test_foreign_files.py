"""Files from anybody at the commands: what is no plain file is not waited for, and no name in one acts on the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedloom.core.errors import DamagedRun, FedloomError, InvalidConfig, InvalidData, UnusableFolder, visible
from fedloom.engine.store import Store
from fedloom.files import read_arrays, write_arrays
from support import foreign
from support.checks import Fedloom, check_refused

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
NAME = f"eve{ESCAPE}[/bold] [red]:smile:\u202e"


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """A reader that waits for somebody to write into a pipe is stopped."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def replaced(path: Path) -> Path:
    """A pipe in the place of a file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


# -- pipes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "command", "kind"),
    [
        ("config.toml", ("show", "finished"), DamagedRun),
        ("config.toml", ("resume", "finished"), DamagedRun),
        ("ledger.jsonl", ("show", "finished"), DamagedRun),
        ("ledger.jsonl", ("resume", "finished"), DamagedRun),
        ("result.json", ("show", "finished"), DamagedRun),
        ("result.json", ("report", "finished"), DamagedRun),
        ("state/server.safetensors", ("resume", "finished"), DamagedRun),
        ("state/split.safetensors", ("resume", "finished"), DamagedRun),
        ("state/lock", ("resume", "finished"), UnusableFolder),
        ("clients/client-000/model.safetensors", ("export", "finished", "--client", "client-000"), DamagedRun),
        ("clients/client-000/model.safetensors", ("predict", "finished/clients/client-000/model.safetensors", "any.png"), InvalidData),
    ],
)
def test_a_pipe_in_a_run_folder_is_refused(
    fedloom_: Fedloom, finished_run: Path, file: str, command: tuple[str, ...], kind: type[FedloomError]
) -> None:
    replaced(finished_run / file)
    check_refused(fedloom_(*command), kind, Path(file).name if file != "state/lock" else "finished")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("run", "pipe.toml"), InvalidConfig),
        (("run", "quickstart", "weights=pipe"), InvalidData),
        (("serve", "pipe.toml"), InvalidConfig),
        (("site", "pipe.toml"), InvalidConfig),
        (("predict", "pipe", "any.png"), InvalidData),
        (("export", "pipe", "--architecture", "smallest"), InvalidData),
        (("import-weights", "mobilenetv3", "pipe"), InvalidData),
        (("generate", "mobilenetv3", "--file", "pipe"), InvalidConfig),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused(
    fedloom_: Fedloom, tmp_path: Path, command: tuple[str, ...], kind: type[FedloomError]
) -> None:
    replaced(tmp_path / "pipe")
    replaced(tmp_path / "pipe.toml")
    check_refused(fedloom_(*command), kind, "pipe")
    assert not (tmp_path / "runs").exists()


def test_a_pipe_among_images_is_refused(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (8, 8)).save(tmp_path / "mine" / name / f"{number}.png")
    pipe = replaced(tmp_path / "mine" / "a" / "9.png")
    check_refused(fedloom_("run", "quickstart", "data.name=folder", "data.folder=mine"), InvalidData, "a/9.png", "not a plain file")
    model = finished_run / "clients" / "client-000" / "model.safetensors"
    judged = fedloom_("predict", model, tmp_path / "mine" / "b" / "0.png", pipe)
    assert judged.code == InvalidData.exit_code and "b/0.png: " in judged.out and "a/9.png (it is not a plain file)" in judged.err, judged


def test_a_link_beside_a_file_that_is_written_is_not_followed(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    """report writes into the run folder, which may be somebody else's."""
    (tmp_path / "precious").write_text("mine")
    (finished_run / ".report.html.part").symlink_to(tmp_path / "precious")
    assert fedloom_("report", finished_run).code == 0
    assert (tmp_path / "precious").read_text() == "mine" and "<html" in (finished_run / "report.html").read_text()


def test_a_lock_that_is_a_link_empties_nothing(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (finished_run / "state" / "lock").unlink(missing_ok=True)
    (finished_run / "state" / "lock").symlink_to(tmp_path / "precious")
    store = Store(finished_run)
    store.claim()
    store.release()
    assert (tmp_path / "precious").read_text() == "mine"


# -- what fuzzing found ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uploads", [None]),
        ("cost", {"seconds": float("nan"), "stages": {}, "bytes_up": 0, "bytes_down": 0}),
        ("seed", 10**30),
        ("cost", {"seconds": 1, "stages": {"a": "x"}}),
        ("clients", [{"architecture": 3}]),
    ],
)
def test_a_result_that_is_no_result(fedloom_: Fedloom, finished_run: Path, key: str, value: Any) -> None:
    result = json.loads((finished_run / "result.json").read_text())
    (finished_run / "result.json").write_text(json.dumps({**result, key: value}))
    for command in ("show", "report"):
        check_refused(fedloom_(command, finished_run), DamagedRun, "result.json is damaged")


def test_a_client_whose_architecture_is_none(fedloom_: Fedloom, finished_run: Path) -> None:
    result = json.loads((finished_run / "result.json").read_text())
    result["clients"][0]["architecture"] = "mobilenetv3:1-2"
    (finished_run / "result.json").write_text(json.dumps(result))
    check_refused(fedloom_("report", finished_run), DamagedRun, "result.json has a client whose architecture is none")


@pytest.mark.parametrize(
    ("key", "value"),
    [("seconds", {"train": 1e308, "test": 1e308}), ("trained_macs", 10**25), ("notes", {"a": None}), ("peak_memory_mb", -1)],
)
def test_a_ledger_with_numbers_out_of_proportion(fedloom_: Fedloom, finished_run: Path, key: str, value: Any) -> None:
    path = finished_run / "ledger.jsonl"
    lines = [json.dumps({**json.loads(line), key: value}) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{line}\n" for line in lines))
    for command in ("show", "report"):
        check_refused(fedloom_(command, finished_run), DamagedRun, "ledger.jsonl, line 1 is damaged")


def test_a_state_of_no_round(fedloom_: Fedloom, finished_run: Path) -> None:
    path = finished_run / "state" / "server.safetensors"
    arrays, facts = read_arrays(path)
    write_arrays(path, arrays, {**facts, "round": float("inf")})
    check_refused(fedloom_("resume", finished_run), DamagedRun, "server.safetensors")


def test_weights_without_running_statistics(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    changes = foreign.overrides("mobilenetv3")
    assert fedloom_("import-weights", "mobilenetv3", checkpoint, *changes, "--size", 8, "--out", "w.safetensors").code == 0
    arrays, facts = read_arrays(tmp_path / "w.safetensors")
    write_arrays(tmp_path / "w.safetensors", {name: array for name, array in arrays.items() if "running" not in name}, facts)
    outcome = fedloom_("export", "w.safetensors", "--architecture", "smallest")
    check_refused(outcome, InvalidData, "w.safetensors lacks running statistics")


# -- the terminal -----------------------------------------------------------------------------------
def rewritten(folder: Path, **changes: Any) -> None:
    result = json.loads((folder / "result.json").read_text())
    result.update(changes)
    for row in result["clients"]:
        row["name"] = NAME
    result["cost"]["stages"] = {NAME: 1.0}
    (folder / "result.json").write_text(json.dumps(result))
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    entries = [{**json.loads(line), "client": NAME, "architecture": NAME} for line in lines]
    (folder / "ledger.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def test_names_in_a_run_do_not_act_on_the_terminal(fedloom_: Fedloom, finished_run: Path) -> None:
    rewritten(finished_run, method=NAME, space=NAME, dataset=NAME, uploads=[NAME])
    folder = finished_run.rename(finished_run.with_name(f"run{ESCAPE}"))
    said = [fedloom_("show", folder), fedloom_("show", folder, "--client", NAME), fedloom_("report", folder, "--out", "page.html")]
    said += [fedloom_("show", folder, "--client", "nobody"), fedloom_("export", folder, "--client", "nobody"), fedloom_("gain", folder)]
    for outcome in said:
        assert not ACTING.search(outcome.out + outcome.err), outcome
        assert outcome.out or outcome.err.startswith("fedloom: "), outcome
    assert said[0].code == 0 and "[red]:smile:" in said[0].out and "[/bold]" in said[0].out  # as they are, not as colours or pictures
    assert said[1].code == 0, said[1]


@pytest.mark.parametrize(
    "command", [("run", f"x{ESCAPE}.toml"), ("run", f"{ESCAPE}=1"), ("show", ESCAPE), ("list", ESCAPE), ("draw", f"{ESCAPE}:x")]
)
def test_refusals_do_not_act_on_the_terminal(fedloom_: Fedloom, command: tuple[str, ...]) -> None:
    outcome = fedloom_(*command)
    assert outcome.code > 2 and outcome.err.startswith("fedloom: ") and not ACTING.search(outcome.err), outcome
    traced = fedloom_(*command, "--trace")
    assert "Traceback" in traced.err and not ACTING.search(traced.err)


def test_settings_from_a_file_do_not_act_on_the_terminal(fedloom_: Fedloom, tmp_path: Path) -> None:
    (tmp_path / "foreign.toml").write_text('method = "\\u001b[2J\\u202e"\n')
    outcome = fedloom_("run", "foreign.toml")
    check_refused(outcome, InvalidConfig)
    assert not ACTING.search(outcome.err)


def test_visible_text_stays_as_it_is() -> None:
    text = "Füchsin  日本\tα\u00a0±\n“x” 🦊"
    assert visible(text) == text
    assert visible("a\x1b[2Jb\u2028c\ud800") == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c\N{REPLACEMENT CHARACTER}"
