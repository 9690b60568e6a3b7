"""Weights trained elsewhere: public names and shapes, wrappings of checkpoints, what is left over."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedloom.core.errors import InvalidConfig, InvalidData, UnusableFolder
from fedloom.files import read_arrays
from fedloom.models import load_model, load_supernet
from fedloom.models.foreign import reshapes
from fedloom.spaces.base import ImageShape
from fedloom.spaces.darts import DARTS_V2
from fedloom.supernets.base import make_supernet
from fedloom.supernets.foreign import PUBLIC
from support.checks import Fedloom, check_refused
from support.foreign import IMAGE, import_, older, overrides, public_state, tiny


@pytest.mark.parametrize("space", PUBLIC)
def test_public_weights_arrive_bit_for_bit(fedloom_: Fedloom, tmp_path: Path, space: str) -> None:
    supernet = tiny(space)
    state = public_state(space, supernet)
    torch.save(state, tmp_path / "theirs.pth")
    outcome = fedloom_("import-weights", space, "theirs.pth", *overrides(space), "--size", 8, "--out", "ours.safetensors")
    counters = sum(key.endswith("num_batches_tracked") for key in state)
    table = PUBLIC[space].make.table(supernet)
    assert outcome.code == 0 and f"{len(table)} tensors taken" in outcome.out and "unexpected" not in outcome.out
    assert not counters or f"{counters} keys left over as expected: num_batches_tracked" in outcome.out

    loaded, weights, statistics = load_supernet(tmp_path / "ours.safetensors")
    assert loaded.space.settings == supernet.space.settings and loaded.space.image == IMAGE
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == supernet.shapes
    known = weights | {f"{name}.running_mean": mean for name, (mean, _) in statistics.items()}
    known |= {f"{name}.running_var": variance for name, (_, variance) in statistics.items()}
    assert set(known) == set(table)
    for ours, theirs in table.items():
        whole, _, row = theirs.partition("#")
        sent = state[whole][tuple(map(int, row.split(",")))] if row else state[whole]
        assert torch.equal(known[ours].flatten(), sent.flatten()), ours
    label = PUBLIC[space].make.source.replace("{width}", str(getattr(supernet.space.settings, "width", "")))
    assert read_arrays(tmp_path / "ours.safetensors")[1]["source"] == label and label in outcome.out


@pytest.mark.parametrize("space", PUBLIC)
def test_an_imported_subnet_can_be_exported(fedloom_: Fedloom, tmp_path: Path, space: str) -> None:
    torch.save(public_state(space, tiny(space)), tmp_path / "theirs.pth")
    fedloom_("import-weights", space, "theirs.pth", *overrides(space), "--size", 8, "--out", "ours.safetensors")
    outcome = fedloom_("export", "ours.safetensors", "--architecture", "smallest")
    assert outcome.code == 0 and outcome.out.startswith("ours-smallest.safetensors: ")
    network, facts = load_model(tmp_path / "ours-smallest.safetensors")
    assert facts["classes"] == ["0", "1", "2", "3", "4"] and facts["mean"] == list(PUBLIC[space].make.mean)

    supernet, weights, statistics = load_supernet(tmp_path / "ours.safetensors")
    smallest = supernet.space.named["smallest"]
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = supernet.forward(images, supernet.take(weights, smallest), smallest, supernet.take_statistics(statistics, smallest))
        assert torch.allclose(network(images), expected, atol=1e-5)
    outcome = fedloom_("export", "ours.safetensors", "--architecture", smallest.id)
    assert outcome.out.startswith(f"ours-{smallest.id.replace(':', '-')}.safetensors: {smallest.id}, ")


def test_a_genotype_names_a_file_that_can_be_written(fedloom_: Fedloom, tmp_path: Path) -> None:
    """Its text is longer than any name of a file, so the file is named after the id of what it means."""
    torch.save(public_state("darts", tiny("darts")), tmp_path / "theirs.pth")
    fedloom_("import-weights", "darts", "theirs.pth", *overrides("darts"), "--size", 8, "--out", "ours.safetensors")
    cell = tiny("darts").space.named["darts_v2"]
    name = f"ours-{cell.id.replace(':', '-')}.safetensors"
    assert len(DARTS_V2) > 400 and len(name) < 100
    outcome = fedloom_("export", "ours.safetensors", "--architecture", DARTS_V2)
    assert outcome.code == 0 and outcome.out.startswith(f"{name}: {cell.id}, ")
    assert fedloom_("export", "ours.safetensors", "--architecture", "darts_v2").out.startswith("ours-darts_v2.safetensors: ")
    assert (tmp_path / name).read_bytes() == (tmp_path / "ours-darts_v2.safetensors").read_bytes()
    outcome = fedloom_("export", "ours.safetensors", "--architecture", "smallest", "--out", "x" * 300)
    check_refused(outcome, UnusableFolder, "File name too long")
    check_refused(fedloom_("draw", DARTS_V2), InvalidConfig, "is not an architecture")


WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "older names": lambda state: {older(key): tensor for key, tensor in state.items()},
    "nested": lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
    "twice nested, from several devices": lambda state: {"model": {"state_dict": {f"module.{key}": t for key, t in state.items()}}},
    "wrapped twice": lambda state: {f"module.module.{key}": tensor for key, tensor in state.items()},
    "compiled": lambda state: {f"_orig_mod.{key}": tensor for key, tensor in state.items()},
    "compiled in part": lambda state: {key.replace("blocks.3.", "blocks.3._orig_mod."): tensor for key, tensor in state.items()},
    "part of a larger module": lambda state: {f"model.{key}": tensor for key, tensor in state.items()},
    "in three wrappers": lambda state: {"state_dict": {f"net.module._orig_mod.{key}": tensor for key, tensor in state.items()}},
    "wrapped in part": lambda state: {key if "classifier" in key else f"module.{key}": tensor for key, tensor in state.items()},
    "averaged, with a count beside": lambda state: {"n_averaged": torch.tensor(3)} | {f"module.{key}": t for key, t in state.items()},
    "under a name of its own": lambda state: {
        "ema": state,
        "best": torch.tensor(71.5),
        "optimizer": {"state": {0: {"step": torch.ones(1)}}},
    },
    "half precision": lambda state: {key: t.half() if t.is_floating_point() else t for key, t in state.items()},
    "double precision": lambda state: {key: t.double() if t.is_floating_point() else t for key, t in state.items()},
    "with the training script's arguments": lambda state: {"model": state, "args": argparse.Namespace(rate=0.1, path=None)},
    "with numbers of numpy": lambda state: {
        "state_dict": state,
        "best": np.float64(71.5),
        "epoch": np.int64(3),
        "name": np.str_("net"),
        "dtype": np.dtype("float32"),
        "history": np.arange(3.0),
    },
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_the_same_weights_in_other_wrappings(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, wrap: Callable[..., Any]) -> None:
    """All numbers fit in half precision, so that every file holds the same."""
    state = {key: tensor.half().float() if tensor.is_floating_point() else tensor for key, tensor in torch.load(checkpoint).items()}
    torch.save(state, tmp_path / "bare.pth")
    torch.save(wrap(state), tmp_path / "wrapped.pth")
    assert import_(fedloom_, "bare.pth", "--out", "one.safetensors").code == 0
    outcome = import_(fedloom_, "wrapped.pth", "--out", "other.safetensors")
    assert outcome.code == 0 and "other weights" not in outcome.out
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_a_checkpoint_with_numbers_of_numpy_1(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    """It names the same functions by the place that they had then."""
    torch.save({"model": torch.load(checkpoint), "best": np.float64(71.5)}, tmp_path / "new.pth")
    with zipfile.ZipFile(tmp_path / "new.pth") as new, zipfile.ZipFile(tmp_path / "old.pth", "w") as old:
        for name in new.namelist():
            old.writestr(name, new.read(name).replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
    assert import_(fedloom_, "old.pth").code == 0


AVERAGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "timm": ("state_dict_ema", lambda state, mean: {"state_dict": state, "state_dict_ema": mean, "epoch": 3}),
    "the mean first": ("ema", lambda state, mean: {"ema": mean, "model": state}),
    "torchvision": (
        "model_ema",
        lambda state, mean: {"model": state, "model_ema": {"n_averaged": torch.tensor(3)} | {f"module.{key}": mean[key] for key in mean}},
    ),
    "deeper": ("model.ema_state_dict", lambda state, mean: {"model": {"state_dict": state, "ema_state_dict": mean}}),
    "beside a bare state dict": ("ema", lambda state, mean: {**state, "ema": mean}),
}


@pytest.mark.parametrize(("part", "wrap"), AVERAGES.values(), ids=AVERAGES)
def test_averaged_weights_are_named_and_can_be_chosen(
    fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, part: str, wrap: Callable[..., Any]
) -> None:
    state = torch.load(checkpoint)
    mean = {key: tensor / 2 if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    torch.save(mean, tmp_path / "mean.pth")
    torch.save(wrap(state, mean), tmp_path / "both.pth")
    for file, out in ((checkpoint, "state"), ("mean.pth", "mean")):
        assert import_(fedloom_, file, "--out", f"{out}.safetensors").code == 0
    outcome = import_(fedloom_, "both.pth", "--out", "taken.safetensors")
    assert outcome.code == 0 and f"\nThe file holds other weights of this network in {part}: --part {part} takes those\n" in outcome.out
    assert (tmp_path / "taken.safetensors").read_bytes() == (tmp_path / "state.safetensors").read_bytes()
    outcome = import_(fedloom_, "both.pth", "--out", "taken.safetensors", "--part", part)
    assert outcome.code == 0 and f"\n411 tensors taken from {part}\n" in outcome.out and "other weights" not in outcome.out
    assert (tmp_path / "taken.safetensors").read_bytes() == (tmp_path / "mean.safetensors").read_bytes()


def test_a_choice_that_the_file_leaves_open(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint)
    torch.save({"student": state, "teacher": {f"module.{key}": tensor for key, tensor in state.items()}}, tmp_path / "theirs.pth")
    check_refused(import_(fedloom_, "theirs.pth"), InvalidData, "theirs.pth holds several networks: student, teacher. ", "--part NAME")
    outcome = import_(fedloom_, "theirs.pth", "--part", "techer")
    check_refused(outcome, InvalidConfig, "theirs.pth has no part 'techer'", "Did you mean 'teacher'? Known: student, teacher")
    assert "taken from teacher\n" in import_(fedloom_, "theirs.pth", "--part", "teacher").out


def test_of_two_keys_for_one_tensor_none_is_lost_without_a_word(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint)
    torch.save({f"{wrapper}.{key}": tensor for wrapper in ("model", "module") for key, tensor in state.items()}, tmp_path / "theirs.pth")
    outcome = import_(fedloom_, "theirs.pth")
    assert outcome.code == 0 and "\n411 keys left over, and unexpected: module." in outcome.out


def test_the_label_names_the_width(fedloom_: Fedloom, tmp_path: Path) -> None:
    settings = replace(PUBLIC["mobilenetv3"].make.settings, width=1.2)
    torch.save(public_state("mobilenetv3", make_supernet("mobilenetv3", settings, ImageShape(3, 224, 10))), tmp_path / "theirs.pth")
    outcome = fedloom_("import-weights", "mobilenetv3", "theirs.pth", "mobilenetv3.width=1.2")
    assert "ofa_mbv3_d234_e346_k357_w1.2 (" in outcome.out
    assert "ofa_mbv3_d234_e346_k357_w1.2 (" in read_arrays(tmp_path / "mobilenetv3.safetensors")[1]["source"]
    check_refused(fedloom_("import-weights", "mobilenetv3", "theirs.pth"), InvalidData, "not a checkpoint of once-for-all", "_w1.0 (")


def test_weights_as_safetensors(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    save_file(torch.load(checkpoint), tmp_path / "theirs.safetensors")
    assert import_(fedloom_, checkpoint, "--out", "one.safetensors").code == 0
    check_refused(import_(fedloom_, "theirs.safetensors", "--out", "theirs.safetensors"), InvalidConfig, "would be overwritten", "--out")
    assert import_(fedloom_, "theirs.safetensors").code == 0  # SPACE.safetensors if not said
    outcome = fedloom_("export", "mobilenetv3.safetensors", "--architecture", "smallest", "--out", tmp_path / "mobilenetv3.safetensors")
    check_refused(outcome, InvalidConfig, "would be overwritten")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "mobilenetv3.safetensors").read_bytes()


def test_a_settings_object_of_the_training_script_is_passed_over(
    fedloom_: Fedloom, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public NASViT code saves its yacs configuration beside the weights; that package is not needed to read them."""
    node = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", types.ModuleType("yacs.config"))
    sys.modules["yacs.config"].CfgNode = node  # type: ignore[attr-defined]
    configuration = node(RATE=0.1, MODEL=node(NAME="vit"))
    configuration.__dict__["__immutable__"] = True
    torch.save({"model": torch.load(checkpoint), "config": configuration}, tmp_path / "theirs.pth")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert import_(fedloom_, tmp_path / "theirs.pth").code == 0


def test_what_nobody_expected_is_named(fedloom_: Fedloom, checkpoint: Path, tmp_path: Path) -> None:
    torch.save({**torch.load(checkpoint), "teacher.weight": torch.ones(2)}, tmp_path / "theirs.pth")
    assert "\n1 key left over, and unexpected: teacher.weight\n" in import_(fedloom_, "theirs.pth").out
    torch.save({**torch.load(checkpoint), "\x1b[2Jx\n" + 10**6 * "x": torch.ones(2)}, tmp_path / "theirs.pth")
    said = import_(fedloom_, "theirs.pth").out.splitlines()[-1]
    assert said.startswith("1 key left over, and unexpected: \N{REPLACEMENT CHARACTER}[2Jx xxx") and len(said) < 250


def test_two_operations_leave_the_other_six_over_as_expected(fedloom_: Fedloom, tmp_path: Path) -> None:
    """In the cells that are there; a cell more than that is something else."""
    supernet = tiny("darts")
    state = public_state("darts", supernet)
    stray = {f"{place}.5.op.1.weight": torch.ones(2) for place in ("cells.3._ops.0._ops", "cells.0.more._ops")}
    torch.save(state | stray, tmp_path / "theirs.pth")
    outcome = fedloom_("import-weights", "darts", "theirs.pth", *overrides("darts"), "darts.operations=s2", "--size", 8)
    assert outcome.code == 0 and f"2 keys left over, and unexpected: {', '.join(sorted(stray))}\n" in outcome.out
    taken, *expected, _ = (int(line.split()[0]) for line in outcome.out.splitlines()[1:])
    assert taken < len(PUBLIC["darts"].make.table(supernet)) and taken + sum(expected) == len(state)


@pytest.mark.parametrize(
    ("one", "other", "fit"),
    [
        ((25, 25), (5, 5, 25), True),
        ((8, 1, 1), (8,), True),
        ((1, 8), (8, 1), True),
        ((), (1,), True),
        ((8, 16), (16, 8), False),
        ((8, 3), (8, 4), False),
    ],
)
def test_shapes_that_hold_the_same_numbers(one: tuple[int, ...], other: tuple[int, ...], fit: bool) -> None:
    assert reshapes(one, other) == reshapes(other, one) == fit


def test_every_public_name_of_the_original_instance() -> None:
    """Counted on the public code: 475 entries, 64 of them counters of batches."""
    public = PUBLIC["mobilenetv3"].make
    table = public.table(make_supernet("mobilenetv3", public.settings, ImageShape(3, 224, 1000)))
    assert len(table) == len(set(table.values())) == 411
    assert table["stage5.block4.depth.to_five"] == "blocks.20.conv.depth_conv.conv.7to5_matrix"
    assert table["first.project.norm.running_var"] == "blocks.0.conv.point_linear.bn.running_var"
    assert table["stage2.block1.squeeze.restore.bias"] == "blocks.5.conv.depth_conv.se.fc.expand.bias"


def test_the_how_to_page(fedloom_: Fedloom, tmp_path: Path) -> None:
    """Its commands and its snippet, with the original instance at its full size and random weights."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "foreign-weights.md").read_text()
    first, _, _ = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)  # the second needs a user's own settings
    supernet = make_supernet("mobilenetv3", PUBLIC["mobilenetv3"].make.settings, ImageShape(3, 224, 1000))
    torch.save({"state_dict": public_state("mobilenetv3", supernet)}, tmp_path / "ofa_mbv3_d234_e346_k357_w1.0")
    for command in first.splitlines():
        assert fedloom_(*shlex.split(command.removeprefix("$ fedloom "))).code == 0, command
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    known: dict[str, Any] = {}
    exec(compile(snippet, "foreign-weights.md", "exec"), known)
    assert known["logits"].shape == (2, 1000) and known["logits"].isfinite().all()
    assert sum(parameter.numel() for parameter in load_model(tmp_path / "mobilenetv3-smallest.safetensors")[0].parameters()) == 3_410_792
