"""`fedloom pretrain`: stages and their files, going on, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.assemble import pretraining
from fedloom.core.errors import Interrupted, InvalidConfig, InvalidData, UnusableFolder
from fedloom.data.readers import DataSettings, read
from fedloom.files import claimed, read_arrays
from fedloom.generator import files as shelf
from fedloom.generator import pretrain as module
from fedloom.generator.files import load_generator
from fedloom.generator.generator import AnyGenerator
from fedloom.generator.pretrain import _blocks
from fedloom.generator.proxy import ProxySettings, make_proxy
from fedloom.spaces.mobilenetv3 import MobileNetV3
from support.checks import Fedloom, check_refused, everything, flip_last_byte
from support.generator import CPU, assert_same_states, global_states, tiny_space
from support.pretrain import SMALL, STAGES, Stopped, Told, pretrain


@pytest.fixture(scope="module", autouse=True)
def little_to_draw_and_to_keep() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DRAWN", 40)
        patch.setattr(module, "BLOCK", 4)
        yield


def without_seconds(folder: Path) -> dict[str, Any]:
    """All that a folder says, bit for bit; but for the time it took."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        if path.name == "card.json":
            found[path.name] = {**json.loads(path.read_text()), "seconds": None}
            continue
        arrays, facts = read_arrays(path)
        facts["seconds"] = None
        if "card" in facts:
            facts["card"]["seconds"] = None
        found[path.name] = facts, {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}
    return found


# -- stages and files -----------------------------------------------------------------------
def test_every_stage_leaves_a_file(made: tuple[Path, AnyGenerator, Told]) -> None:
    place, generator, told = made
    assert {path.name for path in place.iterdir()} == {*(f"{stage}.safetensors" for stage in (*STAGES, "generator")), "card.json"}
    assert list(dict.fromkeys(stage for stage, *_ in told)) == [*STAGES, "quality"]
    assert [entry[1:3] for entry in told if entry[0] == "labels"] == [(4, 12), (8, 12), (12, 12)]
    card = json.loads((place / "card.json").read_text())
    assert card == generator.facts["card"] == read_arrays(place / "generator.safetensors")[1]["card"]
    assert card["validity"] == 1 and card["data"] == "digits" and card["device"] == "cpu" and set(card["seconds"]) == set(STAGES)
    assert (card["architectures"], card["tasks"], card["held_out_tasks"], card["held_out_classes"]) == (12, 6, 3, 2)
    assert all(value is None or -1 <= value <= 1 for value in card["rank_correlation"].values())


def test_what_the_labels_say(made: tuple[Path, AnyGenerator, Told]) -> None:
    arrays, _ = read_arrays(made[0] / "labels.safetensors")
    proxy = make_proxy(read(DataSettings(name="digits")), ProxySettings(reserved=90), CPU)
    assert arrays["accuracies"].shape == (12, 9) and arrays["choices"].shape == (12, 45) and len(arrays["tasks"]) == 9
    assert 0 <= arrays["accuracies"].min() < arrays["accuracies"].max() <= 1
    tasks = [set(row[row >= 0].tolist()) for row in arrays["tasks"]]
    assert [len(task) for task in tasks] == [2, 3] * 3 + [2] * 3  # only two classes are held out
    held_out = set(proxy.held_out.tolist())
    assert not set.union(*tasks[:6]) & held_out and set.union(*tasks[6:]) == held_out


@pytest.mark.parametrize(("labelled", "learned"), [(8, 6), (12, 10), (100, 95), (10_240, 9728)])
def test_a_predictor_is_tested_on_architectures_it_has_not_seen(labelled: int, learned: int) -> None:
    labels = module.Labels(np.arange(labelled)[:, None], torch.arange(labelled)[:, None] * torch.ones(3), [], 2, "")
    known, accuracies = labels.learned
    unknown, true = labels.tested
    assert len(known) == learned and accuracies.shape[1] == 2 and true.shape[1] == 3  # no held-out task is learned from
    assert known[:, 0].tolist() == accuracies[:, 0].tolist() and unknown[:, 0].tolist() == true[:, 0].tolist()
    assert sorted([*known[:, 0], *unknown[:, 0]]) == list(range(labelled))
    assert np.diff(unknown[:, 0]).max() <= 20  # from every block


def test_a_second_call_finds_everything_and_changes_nothing(folder: Path) -> None:
    before, states = everything(folder), global_states()
    _, told = pretrain(folder)
    assert_same_states(states, global_states())
    assert everything(folder) == before
    assert [(stage, remark) for stage, _, _, remark in told if stage != "quality"] == [(stage, "found") for stage in STAGES]


def test_a_stopped_run_goes_on_to_the_same_files(made: tuple[Path, AnyGenerator, Told], tmp_path: Path) -> None:
    """Stopped in the middle of the supernet, then in the middle of the labels, then at the end of the predictor."""
    place, told = tmp_path / "stopped", []
    for stage, done, kept in (("supernet", 2, "supernet"), ("labels", 8, "labels"), ("predictor", 2, "labels")):
        with pytest.raises(Stopped):
            pretrain(place, stop=(stage, done))
        assert (place / f"{kept}.safetensors").exists() and not (place / "generator.safetensors").exists()
        if stage == "supernet":
            assert read_arrays(place / "supernet.safetensors")[1]["epochs_done"] == 1
        if stage == "labels":
            assert len(read_arrays(place / "labels.safetensors")[0]["accuracies"]) == 4
    _, told = pretrain(place)
    assert [entry for entry in told if entry[0] == "labels"] == [("labels", 12, 12, "found")]
    assert without_seconds(place) == without_seconds(made[0])


def test_parts_that_are_there_are_not_repeated(made: tuple[Path, AnyGenerator, Told], folder: Path) -> None:
    with pytest.raises(Stopped):  # as a kill would leave it: eight of twelve labelled
        (folder / "labels.safetensors").unlink()
        pretrain(folder, stop=("labels", 12))
    _, told = pretrain(folder)
    assert [entry[:3] for entry in told if entry[0] == "labels"] == [("labels", 8, 12), ("labels", 12, 12)]
    assert [entry for entry in told if entry[0] == "predictor"] == [("predictor", 1, 1, "found")]  # the same labels, to the bit
    assert without_seconds(folder) == without_seconds(made[0])


@pytest.mark.parametrize(("images", "parts"), [(2, 3), (70, 2), (10_000, 1)])
def test_blocks_of_architectures_see_different_images(images: int, parts: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Twelve architectures in blocks of four; as many parts of the images as there are, in turn, then the first again."""
    seen: list[torch.Tensor] = []
    returned: list[module.Labels] = []
    score, labels = module.score_architectures, module.Pretraining.labels

    def watched(supernet: Any, weights: Any, proxy: Any, architectures: Any, images: torch.Tensor, *more: Any) -> Any:
        assert len(architectures) == 4
        seen.append(images)
        return score(supernet, weights, proxy, architectures, images, *more)

    def kept(self: module.Pretraining, *given: Any) -> module.Labels:
        returned.append(labels(self, *given))
        return returned[-1]

    monkeypatch.setattr(module, "score_architectures", watched)
    monkeypatch.setattr(module.Pretraining, "labels", kept)
    for stage in ("labels", "predictor"):
        (folder / f"{stage}.safetensors").unlink()
    pretrain(folder, f"labels.images={images}")
    scoring = make_proxy(read(DataSettings(name="digits")), ProxySettings(reserved=90), CPU).scoring
    assert len(seen) == 3
    for turn, part in enumerate(seen):
        first = turn % parts * images
        assert torch.equal(part, scoring[:, first : first + images])
    arrays, _ = read_arrays(folder / "labels.safetensors")  # as measured; what a predictor learns from is equally hard
    measured = torch.from_numpy(arrays["accuracies"]).float()
    found = returned[0].accuracies
    for part in range(parts):
        rows = np.arange(12) // 4 % parts == part
        assert torch.allclose(found[rows].mean(0), measured.mean(0), atol=1e-6)
        assert torch.allclose(found[rows] - found[rows].mean(0), measured[rows] - measured[rows].mean(0), atol=1e-6)
    assert parts == 1 or not torch.equal(found, measured)


def test_tasks_in_conditions(tmp_path: Path) -> None:
    """24 architectures, two conditions: each architecture is scored in one of them, on the tasks of that condition."""
    generator, told = pretrain(tmp_path, 'proxy.conditions=["plain","farther"]', "labels.architectures=24", "proxy.held_out_tasks=4")
    accuracies = torch.from_numpy(read_arrays(tmp_path / "labels.safetensors")[0]["accuracies"])
    farther = np.array([False, False, True, True, False, False] + [False, False, True, True])  # of sizes two and three each
    block = np.arange(24) // 4 % 2 == 1
    assert torch.equal(accuracies.isfinite(), torch.from_numpy(block[:, None] == farther))
    assert [entry[3].split()[-1] for entry in told if entry[0] == "labels"] == ["(plain)", "(farther)"] * 3
    assert generator.predictor is not None and all(tensor.isfinite().all() for tensor in generator.predictor.state_dict().values())
    assert generator.facts["card"]["rank_correlation"]["held_out_tasks"] is None  # no order among equals


def test_too_few_architectures_for_the_conditions(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"labels.architectures is 12, too few to see 2 conditions. Label at least 16"):
        pretrain(tmp_path, 'proxy.conditions=["plain","grey"]')
    with pytest.raises(InvalidConfig, match=r"proxy.conditions is empty"):
        pretrain(tmp_path, "proxy.conditions=[]")


def test_another_seed_makes_another_generator(made: tuple[Path, AnyGenerator, Told], tmp_path: Path) -> None:
    pretrain(tmp_path, "seed=4")
    ours, other = without_seconds(made[0]), without_seconds(tmp_path)
    assert all(ours[name][1] != other[name][1] for name in ours if name != "card.json")


@pytest.mark.parametrize(
    ("change", "stage", "named"),
    [
        ("seed=4", "denoiser", " (seed differ)"),
        ("denoiser.steps=3", "denoiser", " (steps differ)"),
        ("features.epochs=2", "features", " (epochs differ)"),
        ("supernet.rate=0.1", "supernet", " (rate differ)"),
        ("mobilenetv3.width=0.1", "supernet", " (space differ)"),
        ("labels.images=3", "labels", " (images differ)"),
        ("proxy.reserved=91", "features", " (data differ)"),
        ("proxy.tasks=7", "labels", " (tasks differ)"),
        (f"features.file={shelf.shipped('features')}", "predictor", " (features differ)"),
        ("predictor.width=16", "predictor", " (width differ)"),
    ],
)
def test_other_settings_need_another_folder(folder: Path, change: str, stage: str, named: str) -> None:
    before = everything(folder)
    with pytest.raises(UnusableFolder) as caught:
        pretrain(folder, change)
    path = folder / f"{stage}.safetensors"
    assert str(caught.value) == (f"{path} was made with other settings{named}. Choose another folder, or remove the file to make it again")
    assert everything(folder) == before


def test_what_a_predictor_was_trained_with_must_not_change(folder: Path) -> None:
    (folder / "denoiser.safetensors").unlink()
    with pytest.raises(UnusableFolder, match=r"predictor.safetensors was made with other settings \(denoiser differ\)"):
        pretrain(folder, "denoiser.steps=3")


def test_tasks_of_labels_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rounding, as on another device, may find other classes alike; what was labelled stays what it is."""
    before = everything(folder)
    monkeypatch.setattr(module, "class_likeness", lambda *_: pytest.fail("tasks were drawn again"))
    pretrain(folder)
    changed = [name for name, content in everything(folder).items() if content != before[name]]
    assert changed in ([], ["card.json", "generator.safetensors"])  # which tell the seconds


def test_a_damaged_stage_is_refused(folder: Path) -> None:
    flip_last_byte(folder / "supernet.safetensors")
    with pytest.raises(UnusableFolder, match=r"supernet.safetensors is damaged. Remove it: the same command makes it again, and only it"):
        pretrain(folder)


def test_a_last_block_is_never_short() -> None:
    assert _blocks(12, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert _blocks(9, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert _blocks(3, 4).tolist() == [0, 0, 0]


def test_one_process_at_a_time(folder: Path) -> None:
    before = everything(folder)
    with claimed(folder), pytest.raises(UnusableFolder, match="is in use by another process"):
        pretrain(folder)
    assert everything(folder) == before


def test_a_folder_that_cannot_be_one_shows_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UnusableFolder, match=r"file cannot be written"):
        pretrain(tmp_path / "file", stop=("denoiser", 1))
    assert (tmp_path / "file").read_text() == "mine"


def test_an_unguided_generator_does_not_replace_a_guided_one(folder: Path) -> None:
    before = everything(folder)
    with pytest.raises(UnusableFolder, match=r"generator.safetensors is guided, and guided=false would replace it"):
        pretrain(folder, "guided=false")
    assert everything(folder) == before


@pytest.mark.parametrize("stage", ["denoiser", "supernet", "predictor"])
def test_training_that_diverged_leaves_no_generator(tmp_path: Path, stage: str) -> None:
    with pytest.raises(InvalidConfig, match=f"stage {stage} diverged: its weights are no longer numbers. Lower {stage}.rate"):
        pretrain(tmp_path, f"{stage}.rate=1e30")
    assert not (tmp_path / f"{stage}.safetensors").exists() and not (tmp_path / "generator.safetensors").exists()


def test_other_values_of_a_gene_need_another_supernet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genes = tiny_space("mobilenetv3").genes
    larger = replace(genes[0], values=tuple(2 * value for value in genes[0].values))
    monkeypatch.setattr(MobileNetV3, "genes", (larger, *genes[1:]))
    with pytest.raises(UnusableFolder, match=r"supernet.safetensors was made with other settings \(values differ\)"):
        pretrain(folder)


def test_without_guidance_no_data_are_needed(fedloom_: Fedloom) -> None:
    outcome = fedloom_("pretrain", "nasvit", *SMALL, "guided=false", "strength=3", "--device", "cpu", "--folder", "mine")
    assert outcome.code == 0 and outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0] == "a generator for nasvit, into mine" and lines[1].startswith("denoiser 2/2 loss ")
    assert lines[-1].endswith("use it with perfedsde.generator_file=mine/generator.safetensors")
    card = json.loads(outcome.out[outcome.out.index("{") : outcome.out.rindex("}") + 1])
    assert "rank_correlation" not in card and card["data"] == "" and card["validity"] == 1
    assert sorted(path.name for path in Path("mine").iterdir()) == ["card.json", "denoiser.safetensors", "generator.safetensors"]
    generator = load_generator(tiny_space("nasvit"), "mine/generator.safetensors", "", CPU)
    assert not generator.guided and generator.strength == 3


# -- refusals -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["darst"], InvalidConfig, ("'darst'", "Did you mean 'darts'?")),
        (["darts", "denoiser.stepz=1"], InvalidConfig, ("Unknown key 'denoiser.stepz'", "Did you mean 'steps'?")),
        (["darts", "stepz=1"], InvalidConfig, ("Unknown key 'stepz'",)),
        (["darts", "darts.cels=3"], InvalidConfig, ("Unknown key 'darts.cels'", "Did you mean 'cells'?")),
        (["darts", "nasvit.width=1"], InvalidConfig, ("nasvit is not darts, the space that gets a generator",)),
        (["darts", "denoiser.steps=0"], InvalidConfig, ("denoiser.steps must be at least 1",)),
        (["darts", "denoiser=3"], InvalidConfig, ("denoiser is a table of settings",)),
        (["darts", "data.name=digitz"], InvalidConfig, ("data.name", "digits")),
        (["darts"], InvalidData, ("tinyimagenet is not at data/tiny-imagenet-200", "tiny-imagenet-200.zip")),
        (["darts", "data.name=digits", "proxy.reserved=500"], InvalidData, ("training images of '0'", "proxy.reserved")),
        (["darts", "data.name=digits", "proxy.task_sizes=[]"], InvalidConfig, ("proxy.task_sizes is empty",)),
        (
            ["darts", *SMALL, "guided=false", "denoiser.heads=3"],
            InvalidConfig,
            ("denoiser.width must be even and a multiple of denoiser.heads",),
        ),
        (["darts", *SMALL, "guided=false", "denoiser.heads=3", "denoiser.width=9"], InvalidConfig, ("got 9 and 3",)),
        (["darts", "guided=false", "--device", "gpu"], InvalidConfig, ("--device must be auto, cpu, cuda or mps, got 'gpu'",)),
        (["darts", "guided=false", "--device", "cuda"], InvalidConfig, ("--device is cuda, but torch finds no GPU",)),
    ],
)
def test_pretrain_refuses(
    fedloom_: Fedloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: Any, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_refused(fedloom_("pretrain", *arguments), kind, *words)
    assert list(tmp_path.iterdir()) == []


def test_features_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"missing.pth cannot be read"):
        pretrain(tmp_path, f"features.file={tmp_path}/missing.pth")
    assert not list(tmp_path.iterdir())  # before anything is trained


def test_an_interrupted_pretrain_says_how_to_go_on(fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretraining, "pretrain", interrupted)
    check_refused(fedloom_("pretrain", "darts"), Interrupted, "The same command goes on with what is in pretrain/darts")
