"""The command line: what it says, where it says it, how it ends; and that a refusal leaves earlier work alone."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom import config, files
from fedloom.assemble import simulation as assemble
from fedloom.commands import runs, terminal
from fedloom.commands.spaces import REGISTRIES
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, InvalidConfig, UnusableFolder
from fedloom.data.readers import read
from fedloom.data.splits import Federation, Split
from fedloom.methods.base import METHODS
from fedloom.models import load_model
from fedloom.spaces.base import ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.supernets.normalisation import Statistics
from support.checks import Fedloom, check_refused, everything, flip_last_byte

# -- what works -------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, Path]]:
    """What ``run`` would have run, and where."""
    heard: list[tuple[Settings, Path]] = []

    monkeypatch.setattr(runs, "new_run", lambda settings, folder, watcher: heard.append((settings, folder)))
    monkeypatch.setattr(runs, "_conclude", lambda *result: None)
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


def test_events_are_json_for_other_programs(fedloom_: Fedloom, tiny_file: Path) -> None:
    outcome = fedloom_("run", tiny_file, "method=fedavg", "--events", "run.folder=mine")
    assert outcome.code == 0 and outcome.err == ""
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [event["kind"] for event in events] == ["begin", "round", "round", "model", "model", "model"]
    assert [event["done"] for event in events] == [0, 1, 2, 2, 2, 2] and [event["models"] for event in events] == [0, 0, 0, 1, 2, 3]
    assert all(event["rounds"] == 2 and event["clients"] == 3 for event in events)
    assert {event["client"] for event in events[3:]} == {"client-000", "client-001", "client-002"}
    again = fedloom_("resume", "mine", "--events")
    assert again.code == 0 and again.out == ""  # it was finished: nothing happens


def test_resume_of_a_finished_run_shows_its_result_and_changes_nothing(
    fedloom_: Fedloom, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, environment = everything(finished_run), assemble.environment
    monkeypatch.setattr(assemble, "environment", lambda device: {**environment(device), "commit": "another"})
    outcome = fedloom_("resume", finished_run)
    assert outcome.code == 0 and "fedavg on digits" in outcome.out and f"{finished_run}/result.json" in outcome.out
    assert everything(finished_run) == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_without_its_ledger_is_not_resumed(fedloom_: Fedloom, finished_run: Path, finished: bool) -> None:
    """It would say that nothing left the clients."""
    result = json.loads((finished_run / "result.json").read_text())
    (finished_run / "result.json").write_text(json.dumps({**result, "finished": finished}))
    (finished_run / "ledger.jsonl").unlink()
    before = everything(finished_run)
    outcome = fedloom_("resume", finished_run)
    assert outcome.code == DamagedRun.exit_code and "ledger.jsonl is missing; the run folder is incomplete" in outcome.err
    assert everything(finished_run) == before


THINGS = {**{title: list(registry) for title, registry in REGISTRIES.items()}, "presets": list(config.presets())}


@pytest.mark.parametrize("what", THINGS)
def test_a_list_has_one_line_for_each(fedloom_: Fedloom, what: str) -> None:
    outcome = fedloom_("list", what)
    assert outcome.code == 0
    title, *lines = outcome.out.splitlines()
    assert title == what and [line.split()[0] for line in lines] == THINGS[what]
    assert all(len(line.split()) > 3 for line in lines)  # a name and a meaning


def test_methods_are_listed_with_their_side_of_the_search_and_their_uploads(fedloom_: Fedloom) -> None:
    lines = {line.split()[0]: line for line in fedloom_("list", "methods").out.splitlines()[1:]}
    expected = {"local": "none    uploads: nothing ", "fedavg": "none    uploads: update, examples ", "hapfnas": "client  uploads: "}
    expected |= {"perfedsde": "client  uploads: update, coverage, examples ", "spider": "client  uploads: update, examples "}
    expected |= {"perfedrlnas": "server  uploads: update, accuracy, examples, seconds "}
    for name, facts in expected.items():
        assert f"search: {facts}" in lines[name] and lines[name].endswith(METHODS[name].meaning)


def test_a_list_of_all(fedloom_: Fedloom) -> None:
    lines = fedloom_("list").out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(THINGS)
    assert len(lines) == len(THINGS) + sum(map(len, THINGS.values()))


def test_a_list_of_settings(fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.console, "width", 1000)
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
    supernet = make_supernet(settings.space, settings.components[settings.space], ImageShape(**facts["image"]))
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
    ledger = finished_run / "ledger.jsonl"  # as if it had been stopped after the rounds
    ledger.write_text("".join(line for line in ledger.read_text().splitlines(True) if not json.loads(line)["final"]))
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


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "it does not exist"),
        (lambda path: path.mkdir(), "it has no config.toml"),
        (lambda path: path.write_text("a file"), "it has no config.toml"),
    ],
)
def test_export_from_a_folder_that_is_no_run(make: Callable[[Path], object], why: str, fedloom_: Fedloom, tmp_path: Path) -> None:
    make(tmp_path / "mine")
    check_refused(fedloom_("export", "mine", "--client", "client-000"), DamagedRun, f"mine is not a run folder: {why}")


def test_export_in_an_unknown_format(fedloom_: Fedloom, finished_run: Path) -> None:
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--format", "pickle")
    check_refused(outcome, InvalidConfig, "'pickle'", "safetensors")


# -- as a program -------------------------------------------------------------------------------------------


def test_as_a_program(tiny_file: Path, tmp_path: Path) -> None:
    """A process of its own; refusals are the same there, and a process costs seconds."""
    command = [sys.executable, "-m", "fedloom.commands.app", "run", str(tiny_file), "method=local", "run.folder=mine"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stderr == "" and "local on digits" in run.stdout
    assert json.loads((tmp_path / "mine" / "result.json").read_text())["finished"]


def test_the_settings_of_a_finished_run_are_the_ones_it_was_given(finished_run: Path, tiny: Callable[..., Settings]) -> None:
    assert config.from_table(config.read_toml(finished_run / "config.toml")) == tiny("method=fedavg")


# -- space ----------------------------------------------------------------------------------


def test_the_card_of_a_space(fedloom_: Fedloom) -> None:
    card = json.loads(fedloom_("space", "mobilenetv3", "--classes", 1000, "--json").out)
    assert (card["genes"], card["architectures"], card["supernet_parameters"]) == (45, 7371**5, 7_678_880)
    assert json.loads(fedloom_("space", "mobilenetv3", "--json").out)["named"]["smallest"]["parameters"] == 2_142_602
    assert card["choices"]["kernel of block 1 of stage 1"] == [3, 5, 7]
    grey = json.loads(fedloom_("space", "mobilenetv3", "--channels", 1, "--size", 8, "--json").out)
    assert grey["image"] == {"channels": 1, "size": 8, "classes": 10} and grey["named"]["smallest"]["parameters"] < 2_142_602
    assert "grey, 8 x 8 pixels, 10 classes" in fedloom_("space", "mobilenetv3", "--channels", 1, "--size", 8).out
    text = fedloom_("space", "mobilenetv3").out
    assert "6,410,690 parameters" in text and "2.18e+19" in text and "expansion (20 genes)" in text


def test_the_card_of_an_instance(fedloom_: Fedloom) -> None:
    small, large = (json.loads(fedloom_("space", "mobilenetv3", f"mobilenetv3.width={width}", "--json").out) for width in (0.5, 1.0))
    assert small["supernet_parameters"] < large["supernet_parameters"] and small["choices"] == large["choices"]


def test_the_card_of_nothing(fedloom_: Fedloom) -> None:
    check_refused(fedloom_("space", "mobilnetv3"), InvalidConfig, "no search space named 'mobilnetv3'", "Did you mean 'mobilenetv3'?")


# -- the command itself ---------------------------------------------------------------------


def test_version_and_help(fedloom_: Fedloom) -> None:
    assert fedloom_("--version").out == f"fedloom {fedloom.__version__}\n"
    for arguments in ((), ("run",), ("analyse",), ("analyse", "pace")):
        assert fedloom_(*arguments, "-h").out == fedloom_(*arguments, "--help").out != ""


def test_help_has_commands_in_the_order_of_their_use(fedloom_: Fedloom) -> None:
    listed = re.findall(r"^  ([a-z-]+) +[A-Z]", fedloom_("--help").out.split("Commands:")[1], re.MULTILINE)
    often = ["run", "resume", "show", "report", "compare", "export", "serve", "site", "list", "pretrain"]
    assert listed[0] == "run" and [name for name in listed if name in often] == often and len(listed) >= 19


def test_completion_of_names(fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": "fedloom re", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert fedloom_().out.split() == ["resume", "report"]
