"""The command line: what it says, where it says it, how it ends; and that a refusal leaves earlier work alone."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedloom
from fedloom import assemble, cli, config
from fedloom.assemble import load_model
from fedloom.config import Settings
from fedloom.core import errors
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, FedloomError, Interrupted, InvalidConfig, InvalidData, UnusableFolder
from fedloom.data.readers import DATASETS, read
from fedloom.data.splits import Federation, Split
from fedloom.engine import files
from fedloom.engine.store import Store
from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES
from fedloom.supernets.elastic import Statistics


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Fedloom = Callable[..., Outcome]


@pytest.fixture
def fedloom_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Fedloom:
    """The command, run in this process and in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return Outcome(code, *capsys.readouterr())

    return call


def check_refused(outcome: Outcome, kind: type[FedloomError], *words: object) -> None:
    """One sentence or two on one line, the error's own exit code, no traceback, nothing on the standard output."""
    assert outcome.code == kind.exit_code, outcome
    assert outcome.err.startswith("fedloom: ") and outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), outcome
    assert "Traceback" not in outcome.err and outcome.out == ""
    for word in words:
        assert str(word) in outcome.err, outcome.err


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder; the lock is always empty and says nothing."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# -- refusals of `run` -------------------------------------------------------------------


def test_every_refusal_has_its_own_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FedloomError)]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes) >= 9
    assert not set(codes) & {0, 2}  # success, wrong usage
    assert Interrupted.exit_code == 130  # as shells have it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ("no preset named 'nonsense'", "quickstart", ".toml")),
        (["quickstrt"], ("Did you mean 'quickstart'?",)),
        (["missing.toml"], ("There is no file missing.toml",)),
        (["rouns=3"], ("Unknown key 'rouns'", "Did you mean 'rounds'?")),
        (["quickstart", "training.ratee=3"], ("Unknown key 'training.ratee'", "Did you mean 'rate'?")),
        (["rounds=many"], ("rounds must be a whole number, got 'many'",)),
        (["rounds=1", "clients"], ("'clients' is not an override", "key=value")),
        (["method=fedavgg"], ("no method named 'fedavgg'", "Did you mean 'fedavg'?")),
        (["participants=99"], ("participants is 99", "12 clients")),
        (["quickstart", "run.folder=a\udcffb"], ("run.folder is not readable text",)),
        (["rounds=1\nclients=5"], ("sets more than one key",)),
        (["training.finetune_rates=[-1" + ", 0.1" * 100 + "]"], ("training.finetune_rates[0] must be at least 0",)),  # no name of a file
    ],
)
def test_a_wrong_setting(fedloom_: Fedloom, tmp_path: Path, arguments: list[str], words: tuple[str, ...]) -> None:
    check_refused(fedloom_("run", *arguments), InvalidConfig, *words)
    assert list(tmp_path.iterdir()) == []  # not even a folder


def test_a_setting_that_only_the_space_can_judge(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    check_refused(fedloom_("run", tiny_file, "mobilenetv3.strides=[1,2,3]"), InvalidConfig, "mobilenetv3.strides", "[1, 2, 3]")
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_that_is_not_there(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    outcome = fedloom_("run", tiny_file, "data.name=cifar10", "data.folder=nowhere")
    check_refused(outcome, InvalidData, "cifar10", "nowhere", "cifar-10-python.tar.gz")
    assert list(tmp_path.iterdir()) == []


def test_a_split_that_is_impossible(fedloom_: Fedloom, tiny_file: Path) -> None:
    check_refused(fedloom_("run", tiny_file, "split.rule=iid", "clients=1000"), InvalidData, "1000 clients", "fewer clients")


def write_images(place: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 8) -> None:
    for number, name in enumerate(classes):
        (place / name).mkdir(parents=True)
        for index in range(each):
            Image.new("RGB", (8, 8), (100 * number, 20 * index, 7)).save(place / name / f"{index}.png")


def test_a_corrupt_image(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    bad = tmp_path / "images" / "dog" / "3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    outcome = fedloom_("run", tiny_file, "data.name=folder", "data.folder=images")
    check_refused(outcome, InvalidData, Path("images") / "dog" / "3.png", "Replace or remove the file")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_a_truncated_cifar10_file(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    place = tmp_path / "data" / "cifar-10-batches-py"
    place.mkdir(parents=True)
    (place / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"class %d" % number for number in range(10)]}, protocol=2))
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        content = pickle.dumps({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3]}, protocol=2)
        (place / name).write_bytes(content[: 5000 if name == "data_batch_4" else None])
    outcome = fedloom_("run", tiny_file, "data.name=cifar10")
    check_refused(outcome, InvalidData, "data/cifar-10-batches-py/data_batch_4", "truncated", "Unpack the published archive again")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


# -- folders -------------------------------------------------------------------------------


def test_a_folder_that_already_holds_a_run(fedloom_: Fedloom, tiny_file: Path, finished_run: Path) -> None:
    before = everything(finished_run)
    outcome = fedloom_("run", tiny_file, "seed=7", f"run.folder={finished_run}")
    check_refused(outcome, UnusableFolder, finished_run, "already holds a run", f"fedloom resume {finished_run}", "run.folder")
    assert everything(finished_run) == before


def test_a_folder_with_the_state_of_a_run(fedloom_: Fedloom, tiny_file: Path, finished_run: Path) -> None:
    """Without its settings it is no run any more, but a new one would go on from that state."""
    (finished_run / "config.toml").unlink()
    before = everything(finished_run)
    outcome = fedloom_("run", tiny_file, "method=fedavg", f"run.folder={finished_run}")
    check_refused(outcome, UnusableFolder, finished_run, "already holds a run", "run.folder")
    assert everything(finished_run) == before


def test_a_folder_that_another_process_takes_first(
    fedloom_: Fedloom, tiny_file: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first look at the folder, while the data set is read."""

    def read_slowly(settings: Any) -> Any:
        shutil.copytree(finished_run, tmp_path / "mine")
        return read(settings)

    monkeypatch.setattr(assemble, "read", read_slowly)
    check_refused(fedloom_("run", tiny_file, "seed=7", "run.folder=mine"), UnusableFolder, "mine already holds a run")
    assert everything(tmp_path / "mine") == everything(finished_run)


def test_a_folder_under_a_file(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = fedloom_("run", tiny_file, "run.folder=file/run")
    check_refused(outcome, UnusableFolder, "file/run", "Not a directory", "run.folder")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder nobody can write to, not even root")
def test_a_folder_nobody_can_write_to(fedloom_: Fedloom, tiny_file: Path) -> None:
    check_refused(fedloom_("run", tiny_file, "run.folder=/proc/fedloom"), UnusableFolder, "/proc/fedloom", "run.folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    check_refused(fedloom_("run", tiny_file, "run.folder=locked/run"), UnusableFolder, "locked/run", "Permission denied", "run.folder")


def test_a_run_folder_that_became_read_only(fedloom_: Fedloom, finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root ignores permissions, so the refusal of the system is played. A finished run needs no write and is shown all the same."""

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.os, "replace", refuse)
    assert fedloom_("resume", finished_run).code == 0
    (finished_run / "result.json").unlink()  # stopped before its end
    before = everything(finished_run)
    outcome = fedloom_("resume", finished_run)
    check_refused(outcome, UnusableFolder, finished_run, "Permission denied", "Make it writable")
    assert everything(finished_run) == before


def test_a_full_disk_in_the_middle_of_a_run_loses_no_round(fedloom_: Fedloom, tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Store.save_state

    def refuse(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:

        def full_from_the_second_round_on(self: Store, state: Any, round: int) -> None:
            if round == 2:
                patch.setattr(files.os, "fsync", refuse)
            saved(self, state, round)

        patch.setattr(Store, "save_state", full_from_the_second_round_on)
        outcome = fedloom_("run", tiny_file, "method=fedavg", "clients=2", "run.folder=mine")
    assert outcome.code == UnusableFolder.exit_code and "No space left on device" in outcome.err and "Traceback" not in outcome.err
    resumed = fedloom_("resume", "mine")
    assert resumed.code == 0 and "\ngoing on after round 1 of 2\n" in resumed.out


def test_a_run_in_use(fedloom_: Fedloom, finished_run: Path) -> None:
    before = everything(finished_run)
    other = Store(finished_run)
    other.claim()
    try:
        check_refused(fedloom_("resume", finished_run), UnusableFolder, finished_run, "in use by another process")
    finally:
        other.release()
    assert everything(finished_run) == before


# -- refusals of `resume` ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("a file")])
def test_a_folder_that_is_no_run(fedloom_: Fedloom, tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "mine")
    before = sorted(tmp_path.rglob("*"))
    check_refused(fedloom_("resume", "mine"), DamagedRun, "mine is not a run folder", "config.toml")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["state/server.safetensors", "state/split.safetensors"])
def test_a_damaged_state_file(fedloom_: Fedloom, finished_run: Path, name: str) -> None:
    flip_last_byte(finished_run / name)
    before = everything(finished_run)
    check_refused(fedloom_("resume", finished_run), DamagedRun, finished_run / name, "damaged", "Restore it")
    assert everything(finished_run) == before


def test_a_missing_split(fedloom_: Fedloom, finished_run: Path) -> None:
    (finished_run / "state" / "split.safetensors").unlink()
    check_refused(fedloom_("resume", finished_run), DamagedRun, finished_run / "state/split.safetensors", "missing")


@pytest.mark.parametrize(
    "damage", [lambda line: line[:40], lambda line: "5", lambda line: re.sub('"bytes_up":[0-9]+', '"bytes_up":null', line)]
)
def test_a_damaged_ledger(fedloom_: Fedloom, finished_run: Path, damage: Callable[[str], str]) -> None:
    path = finished_run / "ledger.jsonl"
    lines = path.read_text().splitlines()
    assert damage(lines[2]) != lines[2]
    path.write_text("\n".join([*lines[:2], damage(lines[2]), *lines[3:], ""]))
    before = everything(finished_run)
    check_refused(fedloom_("resume", finished_run), DamagedRun, f"{path}, line 3", "Restore it")
    assert everything(finished_run) == before


@pytest.mark.parametrize("text", [b"method = \n", b"rounds = 0\n", b"rouns = 3\n", b'method = "fedavgg"\n', b"\xff"])
def test_a_run_whose_settings_file_is_damaged(fedloom_: Fedloom, finished_run: Path, text: bytes) -> None:
    (finished_run / "config.toml").write_bytes(text)
    before = everything(finished_run)
    check_refused(fedloom_("resume", finished_run), DamagedRun, f"{finished_run / 'config.toml'} is damaged")
    assert everything(finished_run) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [('method = "fedavg"', 'method = "perfedsde"'), ('method = "fedavg"', 'method = "local"'), ("width = 0.05", "width = 0.1")],
)
def test_a_run_with_the_state_of_another_method_or_network(fedloom_: Fedloom, finished_run: Path, old: str, new: str) -> None:
    path = finished_run / "config.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = everything(finished_run)
    words = (finished_run / "state/server.safetensors", "does not hold the state of this run's method and settings")
    check_refused(fedloom_("resume", finished_run), DamagedRun, *words)
    assert everything(finished_run) == before


def test_a_run_whose_data_set_changed(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images")
    data = ("data.name=folder", "data.folder=images", "data.image_size=8", "clients=2", "split.rule=iid")
    assert fedloom_("run", tiny_file, *data, "method=local", "run.folder=mine").code == 0
    before = everything(tmp_path / "mine")
    one = tmp_path / "images" / "cat" / "7.png"
    original = one.read_bytes()

    one.rename(tmp_path / "images" / "dog" / "8.png")  # another label
    check_refused(fedloom_("resume", "mine"), InvalidData, "not the one this run began with", tmp_path / "images")
    (tmp_path / "images" / "dog" / "8.png").unlink()
    Image.new("RGB", (8, 8), (9, 9, 9)).save(one)  # the same label, another image
    check_refused(fedloom_("resume", "mine"), InvalidData, "not the one this run began with", tmp_path / "images")
    assert everything(tmp_path / "mine") == before

    one.write_bytes(original)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # data.folder was given relative to another folder
    assert fedloom_("resume", tmp_path / "mine").code == 0
    assert config.read_toml(tmp_path / "mine" / "config.toml")["data"]["folder"] == str(tmp_path / "images")


# -- tracebacks and interruptions --------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("run", "--trace", "nonsense"), ("run", "nonsense", "--trace"), ("--trace", "run", "nonsense")])
def test_trace_shows_where_a_refusal_comes_from(fedloom_: Fedloom, arguments: tuple[str, ...]) -> None:
    plain, traced = fedloom_("run", "nonsense"), fedloom_(*arguments)
    check_refused(plain, InvalidConfig, "nonsense")
    assert traced.code == plain.code and traced.out == "" and traced.err.endswith(plain.err)  # the sentence, after all
    assert traced.err.startswith("Traceback") and "config.py" in traced.err and "InvalidConfig" in traced.err


def test_an_unknown_command_is_wrong_usage(fedloom_: Fedloom) -> None:
    outcome = fedloom_("nonsense")
    assert outcome.code == 2 and "nonsense" in outcome.err and "Traceback" not in outcome.err


def test_an_interruption_says_how_to_go_on(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Store.save_state

    def interrupt_in_the_second_round(self: Store, state: Any, round: int) -> None:
        if round == 2:
            raise KeyboardInterrupt
        saved(self, state, round)

    run = ("run", tiny_file, "method=fedavg", "clients=2")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "save_state", interrupt_in_the_second_round)
        first, second = fedloom_(*run), fedloom_("resume", "runs/tiny")
    for outcome in (first, second):
        assert outcome.code == Interrupted.exit_code and outcome.err == "fedloom: stopped. Continue with `fedloom resume runs/tiny`\n"
    third = fedloom_("resume", "runs/tiny")
    assert third.code == 0 and "\ngoing on after round 1 of 2\n" in third.out
    assert json.loads((tmp_path / "runs" / "tiny" / "result.json").read_text())["finished"]


# -- what works -------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, Path]]:
    """What ``run`` would have run, and where."""
    heard: list[tuple[Settings, Path]] = []

    def watch(folder: Path, title: str, work: Callable[[None], None]) -> None:
        work(None)
        assert heard[-1][1] == folder

    monkeypatch.setattr(cli, "new_run", lambda settings, folder, watcher: heard.append((settings, folder)))
    monkeypatch.setattr(cli, "_watch", watch)
    return heard


def test_run_without_arguments_is_the_quickstart(fedloom_: Fedloom, asked: list[tuple[Settings, Path]]) -> None:
    assert fedloom_("run").code == 0
    assert asked == [(config.load("quickstart"), Path("runs/quickstart"))]


def test_overrides_alone_change_the_quickstart(fedloom_: Fedloom, asked: list[tuple[Settings, Path]]) -> None:
    assert fedloom_("run", "method=fedavg", "rounds=1").code == 0
    assert asked == [(config.load("quickstart", ["method=fedavg", "rounds=1"]), Path("runs/quickstart"))]


def test_a_file_gives_its_name_to_the_folder_and_a_taken_one_gets_a_number(
    fedloom_: Fedloom, asked: list[tuple[Settings, Path]], tiny_file: Path, tmp_path: Path
) -> None:
    fedloom_("run", tiny_file)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)  # empty: free
    fedloom_("run", tiny_file)
    (tmp_path / "runs" / "tiny" / "config.toml").write_text("")
    fedloom_("run", tiny_file)
    (tmp_path / "runs" / "tiny-2").mkdir()
    (tmp_path / "runs" / "tiny-2" / "anything").write_text("")
    fedloom_("run", tiny_file)
    (tmp_path / "runs" / "tiny-3").write_text("a file")
    fedloom_("run", tiny_file)
    fedloom_("run", tiny_file, "run.folder=elsewhere")
    assert [str(folder) for _, folder in asked] == ["runs/tiny", "runs/tiny", "runs/tiny-2", "runs/tiny-3", "runs/tiny-4", "elsewhere"]


def test_a_path_with_an_equals_sign_is_a_path(
    fedloom_: Fedloom, asked: list[tuple[Settings, Path]], tiny_file: Path, tiny: Callable[..., Settings], tmp_path: Path
) -> None:
    (tmp_path / "alpha=0.1").mkdir()
    shutil.copy(tiny_file, tmp_path / "alpha=0.1" / "mine.toml")
    assert fedloom_("run", "alpha=0.1/mine.toml", "rounds=1").code == 0
    assert asked == [(tiny("rounds=1"), Path("runs/mine"))]


def test_a_run_says_in_plain_lines_how_it_goes_and_where_its_result_is(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    outcome = fedloom_("run", tiny_file, "method=fedavg")
    assert outcome.code == 0 and outcome.err == ""
    lines = outcome.out.splitlines()
    assert any(line.startswith("round 2/2: 2 clients, accuracy ") for line in lines)
    assert "\x1b" not in outcome.out and "\r" not in outcome.out  # nothing that only a terminal understands
    assert any("fedavg on digits: test accuracy" in line and "over 3 clients" in line for line in lines)
    assert "what left the clients: examples, update" in outcome.out
    assert lines[-1] == "The result is in runs/tiny/result.json, the personal models in runs/tiny/clients/"
    assert (tmp_path / "runs" / "tiny" / "result.json").exists()
    assert {path.name for path in (tmp_path / "runs" / "tiny" / "clients").iterdir()} == {"client-000", "client-001", "client-002"}


def test_resume_of_a_finished_run_shows_its_result_and_changes_nothing(
    fedloom_: Fedloom, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, environment = everything(finished_run), assemble.environment
    monkeypatch.setattr(assemble, "environment", lambda device: {**environment(device), "commit": "another"})
    outcome = fedloom_("resume", finished_run)
    assert outcome.code == 0 and "fedavg on digits" in outcome.out and f"{finished_run}/result.json" in outcome.out
    assert everything(finished_run) == before


THINGS = {
    "methods": [entry.name for entry in METHODS],
    "spaces": [entry.name for entry in SPACES],
    "datasets": list(DATASETS),
    "presets": list(config.presets()),
    "engines": list(config.ENGINES),
}


@pytest.mark.parametrize("what", THINGS)
def test_a_list_has_one_line_for_each(fedloom_: Fedloom, what: str) -> None:
    outcome = fedloom_("list", what)
    assert outcome.code == 0
    title, *lines = outcome.out.splitlines()
    assert title == what and [line.split()[0] for line in lines] == THINGS[what]
    assert all(len(line.split()) > 3 for line in lines)  # a name and a meaning


def test_a_list_of_all(fedloom_: Fedloom) -> None:
    lines = fedloom_("list").out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(THINGS)
    assert len(lines) == len(THINGS) + sum(map(len, THINGS.values()))


def test_a_list_of_settings(fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.console, "width", 1000)
    out = fedloom_("list", "settings").out
    for key, default, meaning in config.explain():
        assert any(key in line and default in line and meaning in line for line in out.splitlines()), key


def test_a_list_of_nonsense(fedloom_: Fedloom) -> None:
    check_refused(fedloom_("list", "method"), InvalidConfig, "'method'", "Did you mean 'methods'?", "settings")


def test_the_help_of_run_explains_every_setting(fedloom_: Fedloom) -> None:
    outcome = fedloom_("run", "--help")
    assert outcome.code == 0
    words = " ".join(outcome.out.split())
    for key, default, meaning in config.explain():
        assert f"{key} = {default} {' '.join(meaning.split())}" in words, key


def test_the_help_names_every_command(fedloom_: Fedloom) -> None:
    out = fedloom_("--help").out
    assert all(command in out for command in ("run", "resume", "list", "export")) and fedloom.__doc__.split(":")[0] in out


# -- export ---------------------------------------------------------------------------------------------


def test_an_exported_model_is_the_personal_model(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--out", "deep/down/model.safetensors")
    target = tmp_path / "deep" / "down" / "model.safetensors"
    network, facts = load_model(target)
    assert outcome.code == 0 and str(Path("deep/down/model.safetensors")) in outcome.out and facts["architecture"] in outcome.out
    assert facts["classes"] == list("0123456789") and len(facts["mean"]) == len(facts["std"]) == 1
    source = finished_run / "clients" / "client-001" / "model.safetensors"
    assert target.read_bytes() == source.read_bytes()

    # The same logits as the client's own model, computed by the supernet's functional forward pass from the file's arrays.
    arrays, _ = files.read_arrays(source)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    settings = config.from_table(config.read_toml(finished_run / "config.toml"))
    supernet = assemble.make_supernet(settings.space, settings.components[settings.space], assemble.ImageShape(**facts["image"]))
    architecture = Architecture.parse(facts["architecture"])
    own = supernet.load(architecture, tensors)
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = network(images)
        assert not network.training and torch.equal(logits, own(images))
        means = {name.removesuffix(".running_mean") for name in tensors if name.endswith(".running_mean")}
        statistics = Statistics({name: (tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"]) for name in means})
        weights = {name: tensor for name, tensor in tensors.items() if "running_" not in name}
        functional = supernet.forward(images, weights, architecture, statistics)
    assert torch.allclose(logits, functional, atol=1e-5) and logits.shape == (5, 10)
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)  # it looks at the image


def test_the_exported_model_is_as_good_as_the_result_says(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    """From the file and the images alone."""
    settings = config.from_table(config.read_toml(finished_run / "config.toml"))
    arrays, _ = files.read_arrays(finished_run / "state" / "split.safetensors")
    federation = Federation(read(settings.data), Split.from_arrays(arrays), "cpu")
    for client in json.loads((finished_run / "result.json").read_text())["clients"]:
        assert fedloom_("export", finished_run, "--client", client["name"]).code == 0
        network, facts = load_model(tmp_path / f"{client['name']}.safetensors")
        examples = federation.data_of(client["name"]).test
        mean, std = (torch.tensor(facts[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
        with torch.no_grad():
            right = network((examples.images / 255 - mean) / std).argmax(1) == examples.labels
        assert right.float().mean().item() == pytest.approx(client["test_accuracy"])
        assert sum(parameter.numel() for parameter in network.parameters()) == client["parameters"]


def test_export_of_an_unknown_client_suggests_names(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    outcome = fedloom_("export", finished_run, "--client", "client-01")
    check_refused(outcome, InvalidConfig, finished_run, "'client-01'", "Did you mean 'client-001'?", "client-002")
    assert not (tmp_path / "client-01.safetensors").exists()


def test_export_from_a_run_without_models_names_the_cure(fedloom_: Fedloom, finished_run: Path) -> None:
    for path in (finished_run / "clients").rglob("model.safetensors"):
        path.unlink()
    check_refused(fedloom_("export", finished_run, "--client", "client-001"), InvalidConfig, "no personal model", "fedloom resume")


def test_export_of_a_damaged_model_writes_nothing(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    path = finished_run / "clients" / "client-001" / "model.safetensors"
    flip_last_byte(path)
    check_refused(fedloom_("export", finished_run, "--client", "client-001"), DamagedRun, path, "damaged")
    assert not (tmp_path / "client-001.safetensors").exists()


def test_export_of_a_file_that_is_no_model(fedloom_: Fedloom, finished_run: Path) -> None:
    path = finished_run / "clients" / "client-001" / "model.safetensors"
    files.write_arrays(path, {"a": np.ones(2)}, {"space": "mobilenetv3"})
    check_refused(fedloom_("export", finished_run, "--client", "client-001"), DamagedRun, path, "not a personal model")


def test_export_to_a_place_that_cannot_be_written(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--out", "file/model.safetensors")
    check_refused(outcome, UnusableFolder, "file/model.safetensors cannot be written")
    assert (tmp_path / "file").read_text() == "mine"


def test_export_over_an_older_file_is_all_or_nothing(
    fedloom_: Fedloom, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "model.safetensors").write_text("older")
    command = ("export", finished_run, "--client", "client-001", "--out", "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", refuse)
        check_refused(fedloom_(*command), UnusableFolder, "model.safetensors cannot be written", "No space left on device")
    assert (tmp_path / "model.safetensors").read_text() == "older" and not list(tmp_path.glob(".*"))
    assert fedloom_(*command).code == 0 and load_model(tmp_path / "model.safetensors")


def test_export_onto_itself_keeps_the_model(fedloom_: Fedloom, finished_run: Path) -> None:
    path, before = finished_run / "clients" / "client-001" / "model.safetensors", everything(finished_run)
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--out", path)
    assert outcome.code == 0 and outcome.err == "" and everything(finished_run) == before


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("a file")])
def test_export_from_a_folder_that_is_no_run(fedloom_: Fedloom, tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "mine")
    check_refused(fedloom_("export", "mine", "--client", "client-000"), DamagedRun, "mine is not a run folder", "config.toml")


def test_export_in_an_unknown_format(fedloom_: Fedloom, finished_run: Path) -> None:
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--format", "pickle")
    check_refused(outcome, InvalidConfig, "'pickle'", "safetensors")


# -- as a program -------------------------------------------------------------------------------------------


def test_as_a_program(tiny_file: Path, tmp_path: Path) -> None:
    """A process of its own; refusals are the same there, and a process costs seconds."""
    command = [sys.executable, "-m", "fedloom.cli", "run", str(tiny_file), "method=local", "run.folder=mine"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stderr == "" and "local on digits" in run.stdout
    assert json.loads((tmp_path / "mine" / "result.json").read_text())["finished"]


def test_the_settings_of_a_finished_run_are_the_ones_it_was_given(finished_run: Path, tiny: Callable[..., Settings]) -> None:
    assert config.from_table(config.read_toml(finished_run / "config.toml")) == tiny("method=fedavg")


# -- what a first user meets ----------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_mistyped_architecture_leaves_the_folder_free(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, method: str) -> None:
    outcome = fedloom_("run", tiny_file, f"method={method}", f"{method}.architecture=mediun", "run.folder=mine")
    check_refused(outcome, errors.InvalidArchitecture, "'mediun'", "Did you mean 'medium'?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "words"), [("resume", "the folder of a stopped run"), ("export", "whose personal model")])
def test_help_explains_every_argument(fedloom_: Fedloom, command: str, words: str) -> None:
    outcome = fedloom_(command, "--help")
    assert words in outcome.out and "\\[" not in outcome.out


def test_the_folder_is_named_before_the_first_round(fedloom_: Fedloom, tiny_file: Path) -> None:
    outcome = fedloom_("run", tiny_file, "method=fedavg", "run.folder=mine")
    assert outcome.out.startswith("fedavg on digits, into mine\n")


def test_a_client_that_breaks_is_named(fedloom_: Fedloom, tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: object) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr("fedloom.training.local.Trainer.train_network", no_memory)
    outcome = fedloom_("run", tiny_file, "method=local", "run.folder=mine")
    assert outcome.code == errors.ClientFailed.exit_code
    assert outcome.err == "fedloom: client-000, round 0: MemoryError: no memory left. --trace shows where\n"


def test_a_diverged_network_is_not_handed_out(fedloom_: Fedloom, tiny_file: Path) -> None:
    outcome = fedloom_("run", tiny_file, "method=local", "local.epochs=3", "training.rate=1e18", "run.folder=mine")
    assert outcome.code == errors.ClientFailed.exit_code and "client-000: training diverged. Lower training.rate" in outcome.err


def test_results_selected_on_test_data_say_so(fedloom_: Fedloom, tiny_file: Path) -> None:
    assert "selected on test data" in fedloom_("run", tiny_file, "method=local", "protocol=paper").out
    assert "selected on test data" not in fedloom_("run", tiny_file, "method=local").out


def test_plain_averaging_sends_no_coverage(fedloom_: Fedloom, tiny_file: Path) -> None:
    fedloom_("run", tiny_file, "perfedsde.averaging=fedavg", "run.folder=mine")
    assert json.loads(Path("mine/result.json").read_text())["uploads"] == ["examples", "update"]


def test_clients_that_would_hold_the_same_images_are_refused(fedloom_: Fedloom, tiny_file: Path) -> None:
    outcome = fedloom_("run", tiny_file, "split.test_size=600", "run.folder=mine")
    check_refused(outcome, InvalidData, "split.test_size is 600, more than half of the 599 images", "Lower it")


@pytest.mark.parametrize("override", ["training.crop=8", "training.cutout=8"])
def test_augmentation_that_leaves_nothing_to_see(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, override: str) -> None:
    outcome = fedloom_("run", tiny_file, override)
    check_refused(outcome, InvalidConfig, override.replace("=", " is "), "images of 8 pixels", "0 is off")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("here", "missing"), [("train", "test"), ("test", "train")])
def test_half_a_division_of_a_folder(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, here: str, missing: str) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / "pictures" / here / kind).mkdir(parents=True)
    outcome = fedloom_("run", tiny_file, "data.name=folder", "data.folder=pictures")
    check_refused(outcome, InvalidData, f"pictures holds {here}/ but no {missing}/", f"Add {missing}/")
