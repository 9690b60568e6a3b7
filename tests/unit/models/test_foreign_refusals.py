"""Checkpoints that are refused: another network, no weights, code, damage, wrong arguments."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core.errors import InvalidArchitecture, InvalidConfig, InvalidData
from support.checks import Fedloom, check_refused, flip_last_byte
from support.foreign import import_


def without(state: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name != key}


def endless() -> dict[str, Any]:
    nested: dict[str, Any] = {}
    nested["model"] = nested
    return nested


KEY = "blocks.3.conv.point_linear.conv.conv.weight"
STEM, CLASSES = "first_conv.conv.weight", "classifier.linear.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "a missing key": (
        lambda state: without(state, KEY),
        ("not a checkpoint of once-for-all", "it lacks 1 of 411 tensors", KEY, "mobilenetv3.KEY=VALUE"),
    ),
    "another network": (
        lambda state: {"conv1.weight": torch.ones(3)},
        ("not a checkpoint of once-for-all", "it lacks 411 of 411 tensors", "first_conv.conv.weight"),
    ),
    "another shape": (
        lambda state: {**state, KEY: torch.ones(8, 9, 1, 1)},
        (KEY, ": 1 tensor of another shape", "(8, 9, 1, 1)", "mobilenetv3.KEY=VALUE"),
    ),
    "turned axes": (lambda state: {**state, KEY: state[KEY].transpose(0, 1).contiguous()}, (KEY, "another shape")),
    "statistics of another width": (
        lambda state: {**state, "first_conv.bn.running_mean": torch.ones(9)},
        ("first_conv.bn.running_mean", "(9,) where (8,) belongs"),
    ),
    "a number that is none": (lambda state: {**state, KEY: state[KEY] * float("nan")}, (KEY, "not finite")),
    "a number too large": (lambda state: {**state, KEY: state[KEY].double() + 1e300}, (KEY, "not finite")),
    "a negative variance": (
        lambda state: {**state, "first_conv.bn.running_var": -state["first_conv.bn.running_var"]},
        ("first_conv.bn.running_var holds negative variances",),
    ),
    "no dense tensor": (lambda state: {**state, KEY: state[KEY].to_sparse()}, (KEY, "sparse or left out")),
    "numbers left out": (lambda state: {**state, KEY: state[KEY].to("meta")}, (KEY, "sparse or left out")),
    "itself": (lambda state: endless(), ("holds no tensors",)),
    "a classifier without features": (lambda state: {**state, CLASSES: torch.empty(10**9, 0)}, (CLASSES, "(1000000000, 0)")),
    "more classes than there are": (
        lambda state: {**state, CLASSES: state[CLASSES][:1].expand(10**9, -1)},
        (CLASSES, "is for 1000000000 classes; 1 to 100000 are possible"),
    ),
    "no classes": (lambda state: {**state, CLASSES: state[CLASSES][:0]}, (CLASSES, "is for 0 classes")),
    "more channels than there are": (
        lambda state: {**state, STEM: state[STEM][:, :1].expand(-1, 10**8, -1, -1)},
        (STEM, "is for 100000000 channels; 1 to 100000 are possible"),
    ),
    "no channels": (lambda state: {**state, STEM: state[STEM][:, :0]}, (STEM, "is for 0 channels")),
    "whole numbers": (lambda state: {**state, KEY: state[KEY].long()}, (KEY, "holds int64 where floating-point numbers belong")),
    "no tensors": (lambda state: {"epoch": 3}, ("holds no tensors",)),
    "a list": (lambda state: [torch.ones(2)], ("holds no tensors",)),
    "a class of somebody's own": (lambda state: {"model": state, "hook": Path("x")}, ("pathlib", "could run code", "state_dict()")),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_a_checkpoint_that_does_not_fit(
    fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, change: Callable[..., Any], words: tuple[str, ...]
) -> None:
    torch.save(change(torch.load(checkpoint)), tmp_path / "theirs.pth")
    check_refused(import_(fedloom_, "theirs.pth"), InvalidData, "theirs.pth", *words)
    assert not (tmp_path / "mobilenetv3.safetensors").exists()


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_nothing_in_a_checkpoint_is_executed(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": torch.load(checkpoint), "x": Attack()}, tmp_path / "theirs.pth")
    check_refused(import_(fedloom_, "theirs.pth"), InvalidData, "theirs.pth", "system", "could run code")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "theirs.pth is empty. Copy"),
        (b"PK\x03\x04", "theirs.pth is damaged or no weights file: PytorchStreamReader failed"),
        (b"epoch: 3\n", "theirs.pth is damaged or no weights file. Save the state dict alone"),
        (b"no weights at all", "theirs.pth is damaged or no weights file. Save the state dict alone"),
        (bytes(8) + b"{", "theirs.pth is damaged or no weights file: "),
        (b"\x80\x02}q\x00.", "theirs.pth"),
        (pickle.dumps({"x": Attack()}, protocol=4), "theirs.pth is damaged or no weights file. Save the state dict alone"),
    ],
)
def test_a_file_that_holds_no_weights(fedloom_: Fedloom, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "theirs.pth").write_bytes(content)
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        check_refused(import_(fedloom_, "theirs.pth"), InvalidData, words)
    assert remarks == [] and not (tmp_path / "executed").exists()


def test_a_truncated_checkpoint(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.pth").write_bytes(checkpoint.read_bytes()[:-5000])
    check_refused(import_(fedloom_, "theirs.pth"), InvalidData, "theirs.pth", "damaged or no weights file")


def test_wrong_arguments(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    check_refused(import_(fedloom_, "nothing.pth"), InvalidData, "nothing.pth", "No such file")
    check_refused(import_(fedloom_, "."), InvalidData, "Is a directory")
    check_refused(fedloom_("import-weights", "mobilenet", checkpoint), InvalidConfig, "Did you mean 'mobilenetv3'?")
    check_refused(fedloom_("import-weights", "mobilenetv3", checkpoint, "rounds=2"), InvalidConfig, "'rounds=2'", "mobilenetv3.KEY=VALUE")
    check_refused(fedloom_("import-weights", "mobilenetv3", checkpoint, "mobilenetv3.widt=2"), InvalidConfig, "Did you mean 'width'?")
    check_refused(fedloom_("space", "darts", "mobilenetv3.width=2"), InvalidConfig, "'mobilenetv3.width=2'", "darts.KEY=VALUE")
    words = ("The public network has mobilenetv3.norm=batch", "mobilenetv3.norm=group")
    check_refused(fedloom_("import-weights", "mobilenetv3", checkpoint, "mobilenetv3.norm=group"), InvalidConfig, *words)
    assert import_(fedloom_, checkpoint).code == 0
    check_refused(import_(fedloom_, "mobilenetv3.safetensors", "--out", "x.safetensors"), InvalidData, "a file of Fedloom already")
    outcome = fedloom_("export", "mobilenetv3.safetensors", "--architecture", "smalest")
    check_refused(outcome, InvalidArchitecture, "Did you mean 'smallest'?")
    check_refused(fedloom_("export", checkpoint, "--architecture", "smallest"), InvalidData, "no weights file of Fedloom", "import-weights")
    for more in ((), ("--client", "client-000", "--architecture", "smallest")):
        check_refused(fedloom_("export", "mobilenetv3.safetensors", *more), InvalidConfig, "--client NAME", "--architecture NAME")
    flip_last_byte(tmp_path / "mobilenetv3.safetensors")
    check_refused(fedloom_("export", "mobilenetv3.safetensors", "--architecture", "smallest"), InvalidData, "damaged")
