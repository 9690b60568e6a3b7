"""What docs/how-to/federation.md says, held against the settings there are and, with sockets, against what happens."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fedloom import config
from fedloom.federation.agreement import Members, ServerSettings, SiteSettings, read_agreement, read_site

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "federation.md"
TABLES = ((Members, "federation."), (ServerSettings, "server."), (SiteSettings, ""))
LITTLE = {"rounds": "1", "width": "0.1", "epochs": "1", "finetune_epochs": "1", "population": "6", "iterations": "1"}  # instead of good
SITES = ("east", "north", "west")
SAME = ("architecture", "test_accuracy", "validation_accuracy")  # in the rehearsal


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def named(language: str, name: str) -> str:
    """The block that begins with a comment of this name."""
    (found,) = (block for block in blocks(language) if block.startswith(f"# {name}\n"))
    return found


def rows(kind: type, prefix: str) -> list[str]:
    explained = config.explain_table(kind, prefix)
    return [f"| `{key}` | `{default}` | {escaped(meaning)} |" for key, default, meaning in explained]


def escaped(text: str) -> str:
    return text.replace("|", r"\|")


def table(kind: type, prefix: str) -> str:
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows(kind, prefix)]) + "\n"


@pytest.mark.parametrize(("kind", "prefix"), TABLES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_setting_is_in_its_table(kind: type, prefix: str) -> None:
    assert len(rows(kind, prefix)) > 2
    assert table(kind, prefix) in PAGE.read_text(), f"The page should have:\n{table(kind, prefix)}"


def test_the_files_it_shows_can_be_read(tmp_path: Path) -> None:
    shown = [block for block in blocks("toml") if not block.startswith("# ")]
    (tmp_path / "federation.toml").write_text(named("toml", "federation.toml"))
    (tmp_path / "north.toml").write_text(named("toml", "north.toml"))
    own = read_site(tmp_path / "north.toml")
    agreement = read_agreement(Path(own.federation))
    assert own.name in agreement.sites == sorted(SITES)
    server, site, secure, rule = shown
    (tmp_path / "real.toml").write_text('[federation]\nname = "a"\nsites = ["b", "c"]\nclasses = ["d", "e"]\n' + server + rule)
    real = read_agreement(tmp_path / "real.toml")
    assert (real.server.round.minimum, real.settings.components["perfedsde"].averaging) == (2, "trimmed_mean")
    (tmp_path / "secure.toml").write_text('[federation]\nname = "a"\nsites = ["b", "c", "d"]\nclasses = ["d", "e"]\n' + hidden(secure))
    agreed = read_agreement(tmp_path / "secure.toml")
    assert agreed.settings.privacy.secure and list(agreed.fingerprints) == ["b", "c", "d"]
    (tmp_path / "site.toml").write_text(site)
    assert read_site(tmp_path / "site.toml").server == "fl.example.org:9092"


def hidden(secure: str) -> str:
    """With fingerprints, and in the table that is begun already."""
    for number in range(3):
        secure = secure.replace("…", f"{number}" * 64, 1)
    return secure.removeprefix("[federation]\n")


def test_what_the_network_costs_is_what_was_measured() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "network.json").read_text())
    rows = []
    for size, found in record["sizes"].items():
        seconds, carried = found["seconds_per_round"], found["loopback_per_payload"]["fedloom"]
        assert found["within"], "ours may add 10 % or 0.5 s to Flower's floor"
        rows.append(f"| {size} | {seconds['flower']:.1f} s | {seconds['carried']:.1f} s | {seconds['fedloom']:.1f} s | {carried:.2f} |\n")
    text = (ROOT / "docs" / "explain" / "flower.md").read_text()
    assert "".join(rows) in text, f"The page should have:\n{''.join(rows)}"
    assert f"commit {record['environment']['commit']}, load {record['load_before']:.1f} on {record['cores']} cores" in text


# -- with processes and sockets --------------------------------------------------------------------
def shell(commands: str, folder: Path, seconds: float = 200) -> str:
    """What bash says to the commands; they are ended, and all that they started, if they take too long or fail."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, module in (("fedloom", "-m fedloom"), ("python", "")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    log = folder / "said.txt"
    with log.open("w") as said:
        process = subprocess.Popen(
            ["bash", "-ec", commands], cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        finally:
            if process.poll() is None or process.returncode:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text()
    return log.read_text()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


@pytest.mark.network
@pytest.mark.timeout(500)
def test_one_server_and_three_sites_on_one_machine(tmp_path: Path) -> None:
    """All of that section as it is printed, with another port and little training; the rehearsal ends as the real one did."""
    port, text = free_port(), named("toml", "federation.toml")
    for key, value in LITTLE.items():
        text, changed = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert changed == 1, key
    (tmp_path / "images.py").write_text(named("python", "images.py"))
    alike = "secret = false  # or its draws would not be those of the rehearsal\n"
    for name, content in (("federation.toml", text), ("north.toml", named("toml", "north.toml") + alike)):
        assert content.count("127.0.0.1:9092") == 1
        (tmp_path / name).write_text(content.replace(":9092", f":{port}"))
    real, rehearsal = (block for block in blocks("bash") if "fedloom serve" in block)
    said = shell(real, tmp_path)
    assert "The federation is over after 1 rounds; 3 of 3 sites have their personal model" in said
    shell(rehearsal, tmp_path)
    expected = {client["name"]: client for client in json.loads((tmp_path / "at-server-rehearsal" / "result.json").read_text())["clients"]}
    assert sorted(expected) == sorted(SITES)
    for name in SITES:
        own = tmp_path / f"at-{name}" / "digits" / name
        found = json.loads((own / "result.json").read_text())
        assert [expected[name][key] for key in SAME] == [found[key] for key in SAME]
        assert (own / "model.onnx").stat().st_size > 10_000
        statement = (own / "statement.txt").read_text()
        assert statement.startswith(f"What left {name} in the federation digits\n\n2 reports with ")
        assert len((own / "left.jsonl").read_text().splitlines()) == 2


@pytest.mark.network
def test_keys_and_certificates_made_with_openssl_connect(tmp_path: Path) -> None:
    """The commands of all four owners, in one folder; then a site connects with what came out, and one with another key does not."""
    from fedloom.core.errors import ConnectionRefused
    from fedloom.federation.server.superlink import SuperLink
    from fedloom.federation.site.connection import Connection
    from fedloom.federation.wire.signatures import private_key, public_bytes, public_key

    owners = [block for block in blocks("bash") if "openssl" in block]
    assert len(owners) == 4
    said = shell("\n".join(owners).replace("fl.example.org", "localhost"), tmp_path)
    assert re.search(r"^[0-9a-f]{64}  -$", said, re.MULTILINE)
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in ("key.pem", "ca-key.pem", "server-key.pem"))
    north = {"north": public_bytes(public_key(tmp_path / "north.pub"))}
    pair = tmp_path / "server.pem", tmp_path / "server-key.pem"
    with closing(SuperLink("127.0.0.1:0", *pair, north, 1 << 20, lambda text: None)) as superlink:
        server = superlink.address.replace("127.0.0.1", "localhost")
        with Connection(server, tmp_path / "ca.pem", private_key(tmp_path / "key.pem"), 1 << 20):
            assert set(superlink.online()) == {"north"}
        with pytest.raises(ConnectionRefused):
            Connection(server, tmp_path / "ca.pem", private_key(tmp_path / "server-key.pem"), 1 << 20)
