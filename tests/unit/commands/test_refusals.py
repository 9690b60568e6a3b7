"""Refusals: one sentence, its own exit code, no traceback, and earlier work left alone."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom import config, files
from fedloom.assemble import simulation as assemble
from fedloom.core import errors
from fedloom.core.errors import DamagedRun, FedloomError, Interrupted, InvalidConfig, InvalidData, UnusableFolder
from fedloom.data.readers import read
from fedloom.engine.store import Store
from support.checks import Fedloom, check_refused, everything, flip_last_byte

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
        (["plugins=x.py"], ("plugins must be a list such as '[\"x.py\"]', got 'x.py'",)),
        (["plugins=[x.py, y.py]"], ("""such as '["x.py", "y.py"]', got""",)),
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


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda path: None, "it does not exist"),
        (lambda path: path.mkdir(), "it has no config.toml"),
        (lambda path: path.write_text("a file"), "it has no config.toml"),
    ],
)
def test_a_folder_that_is_no_run(fedloom_: Fedloom, tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    make(tmp_path / "mine")
    before = sorted(tmp_path.rglob("*"))
    check_refused(fedloom_("resume", "mine"), DamagedRun, f"mine is not a run folder: {why}")
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
    [('method = "fedavg"', 'method = "perfedsde"'), ('method = "fedavg"', 'method = "local"'), ("width = 0.1", "width = 0.2")],
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


@pytest.mark.parametrize("how", ["keyboard", "SIGTERM"])
def test_an_interruption_says_how_to_go_on(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    saved, before = Store.save_state, signal.getsignal(signal.SIGTERM)

    def interrupt_in_the_second_round(self: Store, state: Any, round: int) -> None:
        if round == 2 and how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if round == 2:
            raise KeyboardInterrupt
        saved(self, state, round)

    run = ("run", tiny_file, "method=fedavg", "clients=2")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "save_state", interrupt_in_the_second_round)
        first, second = fedloom_(*run), fedloom_("resume", "runs/tiny")
    for outcome in (first, second):
        assert outcome.code == Interrupted.exit_code and outcome.err == "fedloom: stopped. Continue with `fedloom resume runs/tiny`\n"
    assert signal.getsignal(signal.SIGTERM) is before
    third = fedloom_("resume", "runs/tiny")
    assert third.code == 0 and "\ngoing on after round 1 of 2\n" in third.out
    assert json.loads((tmp_path / "runs" / "tiny" / "result.json").read_text())["finished"]


# -- what a first user meets ----------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_mistyped_architecture_leaves_the_folder_free(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, method: str) -> None:
    outcome = fedloom_("run", tiny_file, f"method={method}", f"{method}.architecture=mediun", "run.folder=mine")
    check_refused(outcome, errors.InvalidArchitecture, "'mediun'", "Did you mean 'medium'?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "words"), [("resume", "folder of a stopped run"), ("export", "whose personal model")])
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
