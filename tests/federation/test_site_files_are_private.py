"""What a site keeps is for its user alone, and so must its key be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH
from fedloom.federation.agreement import read_site
from fedloom.federation.site import rounds
from fedloom.federation.wire.signatures import private_key
from support.checks import Fedloom, check_refused
from support.site import Line, Place, write_site


@pytest.fixture
def place(agreed: Path, tmp_path: Path) -> Path:
    """With the file of a site and its key."""
    return write_site(agreed, tmp_path)


class Connected(Line):
    def __enter__(self) -> Connected:
        return self

    def __exit__(self, *reason: object) -> None:
        return None


def test_all_that_a_site_writes(place: Path, fresh: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first round to the statement, also where an earlier version wrote for everybody."""
    instructions = [fresh.data(0), b"nonsense", fresh.data(3, FINISH)]
    monkeypatch.setattr(rounds, "_connected", lambda *_: Connected(instructions, []))
    folder = place / "at-north" / "digits" / "north"
    folder.mkdir(parents=True, mode=0o755)
    (folder / "statement.txt").write_text("of an earlier version")
    before = os.umask(0o022)
    try:
        assert rounds.attend(read_site(place / "north.toml"), lambda text: None) == folder
        assert os.umask(0o022) == 0o022  # as it was
    finally:
        os.umask(before)
    modes = {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    some = {"left.jsonl", "ledger.jsonl", "refused.json", "statement.txt", "result.json", "state/answer.safetensors"}
    assert some | {"clients/north/memory-0.safetensors", "clients/north/model.safetensors"} <= set(modes)
    for name, mode in modes.items():
        assert mode == (0o700 if (folder / name).is_dir() else 0o600), name
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.with_name(".north.newest.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(place: Path, fedloom_: Fedloom, mode: int) -> None:
    key = place / "certs/north/key.pem"
    key.chmod(mode)
    check_refused(fedloom_("site", "north.toml"), InvalidConfig, f"(mode {mode:04o})", f"Run: chmod 600 {key}")
    key.chmod(0o400)
    assert private_key(key).public_key()


def test_a_key_of_root_may_be_its_groups(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root:fedloom 0640, as for services: its group is the one user that needs it. Everybody is still too many."""
    key = place / "certs/north/key.pem"
    monkeypatch.setattr(os, "getuid", lambda: key.stat().st_uid + 1)
    key.chmod(0o640)
    assert private_key(key).public_key()
    key.chmod(0o644)
    with pytest.raises(InvalidConfig, match="others than its owner can use it"):
        private_key(key)
