"""`fedloom join FILE --site SITE.toml`: a site that arrives after the rounds gets its model, for every method that shares something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedloom.assemble.builder import build
from fedloom.core.errors import InvalidConfig
from fedloom.engine.newcomers import shared_state
from fedloom.engine.store import pack_state
from fedloom.federation.agreement import read_agreement
from fedloom.files import write_arrays
from fedloom.methods.base import METHODS
from support.checks import Fedloom, check_refused
from support.federation import FEDERATION, SITE, write_digits, write_server_images
from support.site import write_agreement


def write_newcomer(place: Path, method: str) -> Path:
    """A federation that is over, as a newcomer sees it: its own images, what was agreed on, and the server's file."""
    write_digits(place / "images", ("late",))
    write_agreement(place / "server", method)
    write_server_images(place / "server" / "server-images")
    text = FEDERATION.format(method=method, port=1, server_images='server = "server-images"' if method == "hapfnas" else "")
    for folder in (place, place / "server"):
        (folder / "federation.toml").write_text(text)
    (place / "tiny.toml").write_text((place / "server" / "tiny.toml").read_text())
    (place / "late.toml").write_text(SITE.format(name="late", port=1, onnx="false"))
    agreement = read_agreement(place / "server" / "federation.toml")
    settings = agreement.settings
    made = build(settings, agreement.images(serving=True), torch.device("cpu"), Path(settings.weights)).method
    arrays, facts = pack_state(shared_state(made.start(settings.seed)), settings.rounds)
    write_arrays(place / "newcomers.safetensors", arrays, {**facts, "federation": agreement.digest})
    return place


@pytest.mark.parametrize("method", [name for name in METHODS if name != "local"])
def test_a_newcomer_gets_its_model(method: str, tmp_path: Path, fedloom_: Fedloom) -> None:
    """hapfnas too, whose server has images of its own, which no newcomer has."""
    write_newcomer(tmp_path, method)
    outcome = fedloom_("join", "newcomers.safetensors", "--site", "late.toml", "--rounds", 2)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "at-late" / "digits" / "late"
    assert 0 <= json.loads((folder / "result.json").read_text())["test_accuracy"] <= 1
    assert (folder / "clients" / "late" / "model.safetensors").exists() and not (folder / "left.jsonl").exists()
    assert "Nothing." in (folder / "statement.txt").read_text()


def test_a_site_can_be_looked_at_like_a_run(tmp_path: Path, fedloom_: Fedloom) -> None:
    write_newcomer(tmp_path, "fedavg")
    assert fedloom_("join", "newcomers.safetensors", "--site", "late.toml").code == 0
    folder = Path("at-late/digits/late")
    accuracy = json.loads((folder / "result.json").read_text())["test_accuracy"]
    shown = fedloom_("show", folder)
    assert shown.code == 0 and "rounds, finished" in shown.out and f"{accuracy:.1%}" in shown.out
    assert "participations" in fedloom_("show", folder, "--client", "late").out
    assert fedloom_("report", folder).code == 0
    page = (folder / "report.html").read_text()
    assert "The only client, late, has" in page and "The images are at the sites" in page and "fedloom run" not in page
    assert fedloom_("draw", folder, "--client", "late").code == 0 and Path("late.svg").exists()
    assert fedloom_("export", folder, "--client", "late").code == 0 and Path("late.safetensors").exists()
    check_refused(fedloom_("resume", folder), InvalidConfig, "`fedloom site SITE.toml` goes on with it")


def test_a_method_that_shares_nothing_has_none(tmp_path: Path, fedloom_: Fedloom) -> None:
    write_newcomer(tmp_path, "local")
    outcome = fedloom_("join", "newcomers.safetensors", "--site", "late.toml")
    check_refused(outcome, InvalidConfig, "local shares nothing that a newcomer could use")
