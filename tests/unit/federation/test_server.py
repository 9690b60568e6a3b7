"""What a server needs before it listens, its folder, and the rehearsal of all of it in one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.assemble.builder import make_tools
from fedloom.config import to_toml
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData, UnusableFolder
from fedloom.engine.store import Store
from fedloom.federation.agreement import read_agreement
from fedloom.federation.server import rounds as serve_module
from fedloom.federation.server.rounds import rehearsal, serve
from fedloom.methods.base import METHODS
from support.checks import Fedloom, check_refused
from support.federation import CLASS_LIST, SITES, write_digits, write_images


def test_a_server_says_what_is_missing_before_it_listens(fedloom_: Fedloom, place: Path) -> None:
    (place / "certs/server/sites/east.pub").rename(place / "away")
    check_refused(fedloom_("serve", "federation.toml"), InvalidConfig, "There is no public key at", "east.pub")
    assert not (place / "server-run").exists()
    (place / "away").rename(place / "certs/server/sites/east.pub")
    (place / "certs/server/server.pem").unlink()
    check_refused(fedloom_("serve", "federation.toml"), InvalidConfig, "are no certificate and its key")


def test_two_sites_with_one_key_are_refused(fedloom_: Fedloom, place: Path) -> None:
    """Either could answer for the other."""
    (place / "certs/server/sites/east.pub").write_bytes((place / "certs/server/sites/west.pub").read_bytes())
    check_refused(fedloom_("serve", "federation.toml"), InvalidConfig, "east and west", "the same key")
    assert not (place / "server-run").exists()


def test_a_folder_goes_on_with_its_own_federation_only(fedloom_: Fedloom, place: Path) -> None:
    folder = place / "server-run"
    (folder / "state").mkdir(parents=True)
    agreement = read_agreement(place / "federation.toml")
    (folder / "config.toml").write_text("")
    check_refused(fedloom_("serve", "federation.toml"), DamagedRun, "does not say which federation", "Choose another server.folder")
    (folder / "federation.json").write_text(json.dumps({"name": "digits", "digest": "0" * 64}))
    check_refused(fedloom_("serve", "federation.toml"), InvalidConfig, "under other settings", "choose another server.folder")
    (folder / "federation.json").write_text(json.dumps({"digest": agreement.digest})[:-3])
    check_refused(fedloom_("serve", "federation.toml"), DamagedRun, "does not say which federation")


def test_a_federation_that_is_over_needs_no_network_unless_somebody_waits_for_its_model(
    place: Path, nobody: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def superlink(*arguments: Any) -> None:
        raise Reached

    monkeypatch.setattr(serve_module, "SuperLink", superlink)
    agreement = read_agreement(place / "federation.toml")
    folder = place / "server-run"
    (folder / "state").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "federation.json").write_text(json.dumps({"digest": agreement.digest}))
    (folder / "result.json").write_text(json.dumps({"cost": {"seconds": 1.0}, "finished": True}))

    def final(name: str) -> str:
        known = {"client": name, "round": 3, "final": True, "bytes_down": 1, "bytes_up": 0, "uploads": [], "seconds": {}}
        known |= {"architecture": "", "validation_accuracy": None, "test_accuracy": None, "trained_macs": 0, "notes": {}}
        return json.dumps({**known, "evaluated_architectures": 0, "peak_memory_mb": 0.0, "process_memory_mb": 0.0}) + "\n"

    settings = agreement.settings
    tools = make_tools(settings, agreement.images(serving=True), torch.device("cpu"))
    state = METHODS[settings.method].make(settings.components[settings.method], tools).start(settings.seed)
    Store(folder).save_state(replace(state, round=settings.rounds), settings.rounds)
    (folder / "ledger.jsonl").write_text(final("north") + final("east") + final("west"))
    said: list[str] = []
    assert sorted(serve(agreement, nobody, said.append).ledger.final) == sorted(SITES) and said == []
    (folder / "ledger.jsonl").write_text(final("north") + final("east"))
    with pytest.raises(Reached):  # west was not there at the end, and may be now
        serve(agreement, nobody, said.append)


@pytest.mark.parametrize(
    "class_list, said", [('classes = ["cat", "dog", "owl"]', "'owl' differs"), ('classes = ["cat", "cow"]', "'cow' differs")]
)
def test_a_rehearsal_has_the_classes_that_were_agreed_on(
    agreement_file: Callable[..., Path], tmp_path: Path, nobody: Any, class_list: str, said: str
) -> None:
    """Or it would be of another network than the federation is."""
    for site in SITES:
        write_images(tmp_path / "images" / site, {"cat": 5, "dog": 5})
    with pytest.raises(InvalidData, match=f"does not have the classes that were agreed on: {said}"):
        rehearsal(read_agreement(agreement_file((CLASS_LIST, class_list))), tmp_path / "images", nobody)
    assert not (tmp_path / "server-run-rehearsal").exists()


def test_a_rehearsal_by_the_command(fedloom_: Fedloom, place: Path) -> None:
    write_digits(place / "images")
    check_refused(fedloom_("serve", "federation.toml", "--rehearse", "nowhere"), InvalidData, "nowhere")
    outcome = fedloom_("serve", "federation.toml", "--rehearse", "images")
    assert outcome.code == 0 and "over after 3 rounds; 3 of 3 sites have their personal model" in outcome.out
    assert (place / "server-run-rehearsal/clients/north/model.safetensors").exists() and not (place / "server-run").exists()
    again = fedloom_("serve", "federation.toml", "--rehearse", "images")
    check_refused(again, UnusableFolder, "holds a rehearsal already. `fedloom report ", "remove the folder to rehearse again")
    assert "run.folder" not in again.err  # which no file of a federation has


def test_a_rehearsal_names_the_site_that_has_too_few_images(fedloom_: Fedloom, place: Path) -> None:
    write_digits(place / "images")
    shutil.rmtree(place / "images" / "east")
    write_images(place / "images" / "east", {"3": 1})
    outcome = fedloom_("serve", "federation.toml", "--rehearse", "images")
    check_refused(outcome, InvalidData, "east would have 1 training images, it needs 2. Add images to its folder")
    assert "split.alpha" not in outcome.err


def test_a_folder_of_a_federation_is_not_resumed(fedloom_: Fedloom, place: Path) -> None:
    folder = place / "server-run"
    (folder / "state").mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(read_agreement(place / "federation.toml").settings))
    (folder / "federation.json").write_text("{}")
    check_refused(fedloom_("resume", folder), InvalidConfig, "`fedloom site SITE.toml` goes on with it")
    (folder / "state" / "server.safetensors").touch()
    check_refused(fedloom_("resume", folder), InvalidConfig, "`fedloom serve FEDERATION.toml` goes on with it")
    check_refused(fedloom_("export", folder, "--client", "east"), InvalidConfig, "at the sites: the server knows none of them")
