"""Checkpoints that are refused: another network, no weights, code, damage, wrong arguments."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedloom.core.errors import InvalidArchitecture, InvalidConfig, InvalidData
from support.checks import Fedloom, check_refused, flip_last_byte, flipped
from support.foreign import import_, overrides, public_state, tiny


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
        ("not a checkpoint of once-for-all", "it lacks 411 of 411 tensors", "first_conv.conv.weight", "; it has conv1.weight. "),
    ),
    "a wrapper that nobody knows": (
        lambda state: {f"model.student.{key}": tensor for key, tensor in state.items()},
        ("it lacks 411 of 411 tensors", "; it has model.student.first_conv.conv.weight, "),
    ),
    "keys that forge a terminal": (
        lambda state: {"\x1b[2J\nfedloom: fine": torch.ones(3)},
        ("; it has \N{REPLACEMENT CHARACTER}[2J fedloom: fine. ",),
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
    "numbers of four bits": (
        lambda state: {**state, KEY: torch.zeros(state[KEY].shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
        (KEY, "holds float4_e2m1fn_x2 where"),
    ),
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
    "arrays of numpy": (lambda state: {key: tensor.numpy() for key, tensor in state.items()}, ("holds no tensors",)),
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


def archive(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, content in files.items():
            made.writestr(f"theirs/{name}.pkl", content)
        made.writestr("theirs/version", b"3\n")
    return buffer.getvalue()


def described(description: str) -> bytes:
    """A safetensors file without tensors."""
    header = json.dumps({"__metadata__": {"fedloom": 32 * "0" + description}}).encode()
    return len(header).to_bytes(8, "little") + header


AGAIN = "Copy or download it again"
OTHER = "is of another format, compressed or damaged: it begins like no file of torch or safetensors. Save the state dict alone"
NO_WEIGHTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", f"is empty. {AGAIN}"),
    "settings": (b"epoch: 3\n", "is text, not weights. Often a web page"),
    "a web page": (b"<!DOCTYPE html>\n<html><body>Not found</body></html>", "is text, not weights. Often a web page"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is text, not weights. Often a web page or a Git LFS pointer"),
    "json": (b'{"abcde":{"x": 1}}', "is text, not weights"),
    "the beginning of a zip": (b"PK\x03\x04", f"is incomplete: its end is missing. {AGAIN}"),
    "a zip of something": (archive(weights=b"x"), "is a zip archive, but not one of torch.save. Give the weights file inside"),
    "a zip with its middle cut out": (
        archive(data=bytes(999))[:500] + archive(data=bytes(999))[600:],
        f"is incomplete or damaged. {AGAIN}",
    ),
    "another version of pickle": (archive(data=pickle.dumps("text", protocol=4)), "cannot be read as weights (Unsupported operand"),
    "a name that forges a terminal": (
        archive(data=b"\x80\x02cevil\x1b[2J\nx\n."),
        "asks for evil\N{REPLACEMENT CHARACTER}[2J.x, and making one",
    ),
    "a safetensors header": (bytes(8) + b"{", "is incomplete or damaged (Error while deserializing header: "),
    "a header that is no JSON": (
        b"\x09" + bytes(7) + b"{no json}",
        "is incomplete or damaged (Error while deserializing header: invalid JSON",
    ),
    "an endless description": (described(100_000 * "["), "holds no tensors by name"),
    "a pickle": (b"\x80\x02}q\x00.", OTHER),
    "a pickle with code": (pickle.dumps({"x": Attack()}, protocol=4), OTHER),
    "compressed": (gzip.compress(b"weights"), OTHER),
    "zeros": (bytes(999), OTHER),
}


@pytest.mark.parametrize(("content", "words"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_a_file_that_holds_no_weights(fedloom_: Fedloom, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "theirs.pth").write_bytes(content)
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        check_refused(import_(fedloom_, "theirs.pth"), InvalidData, f"theirs.pth {words}")
    assert remarks == [] and not (tmp_path / "executed").exists()


def test_sparse_positions_of_nasvit(fedloom_: Fedloom, tmp_path: Path) -> None:
    """They are cut before they are compared."""
    state = public_state("nasvit", tiny("nasvit"))
    key = next(key for key in state if key.endswith("relative_position_bias_table"))
    torch.save({**state, key: state[key].to_sparse()}, tmp_path / "theirs.pth")
    outcome = fedloom_("import-weights", "nasvit", "theirs.pth", *overrides("nasvit"), "--size", 8)
    check_refused(outcome, InvalidData, f"theirs.pth: {key} is no plain tensor: its numbers are sparse or left out")


SAVED: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "torch": lambda state, path: torch.save(state, path),
    "torch before 1.6": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "safetensors": lambda state, path: save_file(state, path),
}


@pytest.mark.parametrize("save", SAVED.values(), ids=SAVED)
def test_a_truncated_checkpoint(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, save: Callable[..., None]) -> None:
    whole = tmp_path / "whole.pth"
    save(torch.load(checkpoint), whole)
    assert import_(fedloom_, whole).code == 0
    for kept in (100, 20_000, whole.stat().st_size - 1):
        (tmp_path / "theirs.pth").write_bytes(whole.read_bytes()[:kept])
        outcome = import_(fedloom_, "theirs.pth")
        check_refused(outcome, InvalidData, "theirs.pth is incomplete", f". {AGAIN}\n")
        assert "Save" not in outcome.err


def test_a_byte_that_changed_is_noticed_by_its_checksum(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    """In a number of a tensor; torch itself reads it without a word. A file that was written without checksums has none to compare."""
    numbers = torch.load(checkpoint)[CLASSES].numpy().tobytes()
    position = checkpoint.read_bytes().index(numbers) + 5
    shutil.copy(checkpoint, tmp_path / "theirs.pth")
    flipped(tmp_path / "theirs.pth", position, 3)
    outcome = import_(fedloom_, "theirs.pth")
    check_refused(outcome, InvalidData, "theirs.pth is damaged: the checksum of ofa/data/", f"inside it is wrong. {AGAIN}\n")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.load(checkpoint), tmp_path / "theirs.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert import_(fedloom_, "theirs.pth").code == 0


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
