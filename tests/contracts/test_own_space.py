"""A search space in two files of one's own: a generator from `fedloom pretrain`, then a federation on it, stopped and resumed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.commands import app as cli
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.seeds import rng
from fedloom.data.readers import DataSettings, read
from fedloom.generator import pretrain
from fedloom.generator.files import load_generator
from fedloom.generator.generator import AnyGenerator
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.testing.plugged import plugged, taken_back
from support.checks import Fedloom, check_refused
from support.kills import content, disk
from support.toy import SECONDS, TOY

DRAWS = 400


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    with taken_back():
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generator that the command has left."""
    folder = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch, taken_back():
        patch.setattr(pretrain, "DRAWN", 500)
        patch.setattr(sys, "argv", ["fedloom", "pretrain", "toy", "--plugin", TOY, "--folder", str(folder), *SECONDS])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
    return folder / "generator.safetensors"


@pytest.fixture
def generator(file: Path) -> AnyGenerator:
    with plugged(TOY):
        space = SPACES["toy"].make(SPACES["toy"].settings(), ImageShape(1, 8, 10))
        return load_generator(space, str(file), "", torch.device("cpu"))


def test_the_generator_draws_as_the_space_does(generator: AnyGenerator) -> None:
    space = generator.tokens.space
    drawn, random = generator.draw(DRAWS, rng("generator")), [space.sample(rng("random", number)) for number in range(DRAWS)]
    for architecture in drawn:
        space.check(architecture)
    assert len(set(drawn)) > 0.9 * len(set(random)) > 0.5 * DRAWS
    for gene, size in enumerate(space.sizes):
        ours, theirs = (np.bincount([a.choices[gene] for a in some], minlength=size) / DRAWS for some in (drawn, random))
        assert np.abs(ours - theirs).max() < 0.12, space.genes[gene].name


def test_a_clients_images_guide_it(generator: AnyGenerator) -> None:
    """Guided architectures are valid, gain more by the predictor's own account, and are not all the same."""
    assert generator.guided
    pool = read(DataSettings(name="digits")).train
    for classes in ((0, 1, 2), (3, 5, 8, 9)):
        own = np.isin(pool.labels, classes)
        task = generator.task(torch.from_numpy(pool.images[own]), torch.from_numpy(pool.labels[own]))
        gain = generator.guide(task)
        assert gain is not None
        means = []
        for guiding in (None, task):
            drawn = generator.draw(DRAWS, rng("guided"), guiding)
            for architecture in drawn:
                generator.tokens.space.check(architecture)
            assert len(set(drawn)) > DRAWS // 10
            with torch.no_grad():
                means.append(float(gain(*generator.certain(np.array([a.choices for a in drawn]))).mean()))
        assert means[1] > means[0] + 0.5  # in standard deviations of the gain over random architectures


def test_a_federation_on_it(fedloom_: Fedloom, tiny_file: Path, file: Path) -> None:
    """Stopped in the middle, it goes on by what its folder says: the plugin is imported again. Then its models are used."""
    shutil.copytree(Path(TOY).parent, "mine", ignore=shutil.ignore_patterns("__pycache__"))
    changes = ('plugins=["mine/toy_supernet.py"]', "space=toy", f"perfedsde.generator_file={file}")
    copies: list[Path] = []

    def copy(what: str, name: str) -> None:
        if (what, name) == ("replace", "state/server.safetensors"):
            copies.append(Path(shutil.copytree("it", f"copy-{len(copies)}")))

    with taken_back(), disk(Path("it"), copy):
        ran = fedloom_("run", tiny_file, *changes, "run.folder=it")
    assert ran.code == 0, ran.err
    assert "toy" not in SPACES
    expected = content(Path("it"))
    lines = expected["ledger.jsonl"]
    assert all(line["architecture"].startswith("toy:") for line in lines) and lines[0]["notes"]["guided"] == 1
    with taken_back():
        resumed = fedloom_("resume", copies[1])
    assert resumed.code == 0, resumed.err
    assert content(copies[1]) == expected

    for format, ending in (("safetensors", "safetensors"), ("torch", "pt2")):
        with taken_back():
            exported = fedloom_("export", "it", "--client", "client-000", "--format", format, "--trust-plugins")
        assert exported.code == 0, exported.err
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save("image.png")
        check_refused(
            fedloom_("predict", f"client-000.{ending}", "image.png"), InvalidData, "'toy', which is unknown here", "--plugin FILE"
        )
        with taken_back():
            seen = fedloom_("predict", f"client-000.{ending}", "image.png", "--plugin", TOY, "--json")
        assert seen.code == 0 and len(json.loads(seen.out)[0]["classes"]) == 3, seen.err
    with taken_back():
        assert fedloom_("draw", "it", "--client", "client-000", "--trust-plugins").code == 0


def test_without_its_plugin_or_its_generator(fedloom_: Fedloom, tiny_file: Path) -> None:
    check_refused(fedloom_("pretrain", "toy"), InvalidConfig, "There is no search space named 'toy'")
    ran = fedloom_("run", tiny_file, f'plugins=["{TOY}"]', "space=toy")
    check_refused(ran, InvalidConfig, "No generator for toy comes with Fedloom. Train one with `fedloom pretrain toy`")
