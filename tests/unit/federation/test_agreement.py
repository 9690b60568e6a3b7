"""What members of a federation agree on (FEDERATION.toml) and what a site says of itself (SITE.toml): good and bad input."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData
from fedloom.federation.agreement import Agreement, read_agreement, read_site
from fedloom.testing.plugged import taken_back
from support.checks import Fedloom, check_refused
from support.federation import CLASS_LIST, SITE, SITES, write_digits

EMPTY = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def test_what_is_agreed_on(agreement_file: Callable[..., Path], tmp_path: Path) -> None:
    agreement = read_agreement(agreement_file())
    assert agreement.sites == sorted(SITES) and agreement.settings.clients == 3 and agreement.settings.split.rule == "members"
    assert agreement.members.classes == tuple("0123456789")  # in the order in which folders are read, whatever the file's
    assert agreement.settings.data.name == "sites"
    assert agreement.server.certificate == str(tmp_path / "certs/server/server.pem")
    assert agreement.server.folder == str(tmp_path / "server-run")
    assert agreement.images().train.images.shape == (0, 3, 8, 8) and agreement.images().server is None


def test_the_federation_in_containers() -> None:
    """Its files are whole, and its services are the members."""
    place = Path(__file__).parents[3] / "examples" / "federation"
    agreement = read_agreement(place / "federation.toml")
    services = re.findall(r"^  (\w+):\n    <<: \*fedloom\n    command: \[(.*)\]$", (place / "compose.yaml").read_text(), re.MULTILINE)
    assert dict(services) == {"server": '"serve", "federation.toml"'} | {name: f'"site", "{name}.toml"' for name in agreement.sites}
    port = agreement.server.address.rpartition(":")[2]
    for name in agreement.sites:
        site = read_site(place / f"{name}.toml")
        assert site.name == name and site.server == f"server:{port}" and Path(site.federation) == place / "federation.toml"
        assert Path(site.key).parts[-3:] == ("certs", name, "key.pem")  # where `fedloom certs certs` puts it


SITE_LIST = 'sites = ["north", "east", "west"]'


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("[federation]", "[federaton]", "federation.name must be"),  # a table that is missing
        ('name = "digits"\n', "", "federation.name must be another, got ''. Use only the letters a to z"),
        ('name = "digits"\n', 'name = "../digits"\n', "got '../digits'"),
        ('name = "digits"\n', 'name = ".."\n', "got '..'"),
        ('name = "digits"\n', "name = 3\n", "federation.name must be text, got 3"),
        ('name = "digits"\n', f'name = "{"x" * 64}"\n', "federation.name must be"),
        ('name = "digits"\n', 'name = "digits"\nowner = "me"\n', "Unknown key 'federation.owner'"),
        (SITE_LIST, "", "federation.sites must name at least 1, each once"),
        (SITE_LIST, "sites = []", "federation.sites must name at least 1, each once"),
        (SITE_LIST, 'sites = "north"', "federation.sites must be a list"),
        (SITE_LIST, "sites = [1]", r"federation.sites\[0\] must be text, got 1"),
        (SITE_LIST, 'sites = ["north", "north"]', "each once"),
        (SITE_LIST, 'sites = ["../x"]', "'../x' cannot be a site's name"),
        (SITE_LIST, 'sites = ["a/b"]', "'a/b' cannot be a site's name"),
        (SITE_LIST, 'sites = [".hidden"]', "'.hidden' cannot be a site's name"),
        (SITE_LIST, 'sites = [""]', "'' cannot be a site's name"),
        (SITE_LIST, 'sites = ["a\\n"]', "cannot be a site's name"),
        (SITE_LIST, 'sites = ["nörd"]', "cannot be a site's name. Use only the letters a to z .*, such as noerd"),
        (SITE_LIST, 'sites = ["Kliniken São Paulo"]', "such as Kliniken-Sao-Paulo"),
        (CLASS_LIST, "", "federation.classes must name at least 2, each once"),
        (CLASS_LIST, 'classes = ["only"]', "federation.classes must name at least 2, each once"),
        (CLASS_LIST, 'classes = ["a", "a"]', "federation.classes must name at least 2, each once"),
        ("rounds = 3", 'rounds = "three"', "rounds must be a whole number"),
        ("rounds = 3", "rouns = 3", "Unknown key 'rouns'"),
        ("participants = 3", "participants = 4", "participants is 4, but the federation has only 3 clients"),
        ('method = "fedavg"', 'method = "fedavgg"', "no method named 'fedavgg'"),
        ("[server]", "[serve]", "Unknown key 'serve'"),
        ('folder = "server-run"', "folder = 1", "server.folder must be text"),
        ('folder = "server-run"', 'port = 1\nfolder = "x"', "Unknown key 'server.port'"),
        ("[server.round]", "[server.round]\nminimum = -1", "server.round.minimum must be at least 0"),
        ("[server.round]", "[server.round]\nmessage_mb = 0", "server.round.message_mb must be at least 1"),
        ("[server.round]", "[server.round]\ntimeout = nan", "server.round.timeout must be a finite number"),
        ("[server.round]", "[server.round]\nminimun = 1", "Unknown key 'server.round.minimun'. Did you mean 'minimum'"),
        ("[data]", "[hardware]\ndeadline = 3\n[data]", "simulates machines, and here they are real"),
        ("[data]", "[split]\ntest = 0.2\n[data]", "a site's test images are in its folder"),
        ("[data]", "[split]\nserver = 0.2\n[data]", "the server's in data.server"),
        ("image_size = 8", "image_size = 7", "data.image_size must be at least 8"),
    ],
)
def test_what_cannot_be_agreed_on(agreement_file: Callable[..., Path], old: str, new: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        read_agreement(agreement_file((old, new)))


@pytest.mark.parametrize("name", ["federation", "server", "data", "split", "training"])
def test_what_must_be_a_table(tmp_path: Path, name: str) -> None:
    members = '[federation]\nname = "x"\nsites = ["a"]\nclasses = ["b", "c"]\n' if name != "federation" else ""
    (tmp_path / "federation.toml").write_text(f"{name} = 3\n{members}")
    with pytest.raises(InvalidConfig, match=f"{name} is a table of settings, not a value"):
        read_agreement(tmp_path / "federation.toml")


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, said in (("none.toml", "There is no file"), ("torn.toml", "is not a readable TOML file"), ("x.txt", "ends in .toml")):
        (tmp_path / "torn.toml").write_text('[federation\nname = "x"')
        with pytest.raises(InvalidConfig, match=said):
            read_agreement(tmp_path / name)


def test_the_digest_is_of_what_must_be_the_same_everywhere(agreement_file: Callable[..., Path]) -> None:
    digest = read_agreement(agreement_file()).digest
    same = [
        ((SITE_LIST, SITE_LIST),),
        ((CLASS_LIST, 'classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]'),),
        (("127.0.0.1:9092", "0.0.0.0:443"),),
        (('folder = "server-run"', 'folder = "elsewhere"'),),
        (("[server.round]", "[server.round]\nminimum = 2"),),
        (("[server.round]", "[inline]\nthreads = 2\n[run]\nfolder = 'x'\n[server.round]"),),
        (("seed = 5", 'seed = 5\nweights = "w.safetensors"'),),
        (("image_size = 8", 'image_size = 8\nserver = "mine"'),),
    ]
    for changes in same:
        assert read_agreement(agreement_file(*changes)).digest == digest, changes
    other = [
        ("rounds = 3", "rounds = 4"),
        ("seed = 5", "seed = 6"),
        ("image_size = 8", "image_size = 9"),
        ('method = "fedavg"', 'method = "local"'),
        ('name = "digits"', 'name = "numbers"'),
        (SITE_LIST, 'sites = ["north", "east", "south"]'),
        ('"0"]', '"10"]'),
        ("[server.round]", "[training]\nrate = 0.2\n[server.round]"),
        ("[server.round]", "[split]\nvalidation = 0.2\n[server.round]"),
        ("participants = 3", "participants = 2"),
    ]
    for change in other:
        assert read_agreement(agreement_file(change)).digest != digest, change


def test_claims_of_images_have_one_number_for_each_site(agreement_file: Callable[..., Path]) -> None:
    before, after = read_agreement(agreement_file()), read_agreement(agreement_file((SITE_LIST, f"{SITE_LIST}\nimages = [30, 20, 10]")))
    assert before.claims == {} and after.claims == {"north": 30, "east": 20, "west": 10} and after.digest != before.digest
    with pytest.raises(InvalidConfig, match="2 numbers for 3 sites"):
        read_agreement(agreement_file((SITE_LIST, f"{SITE_LIST}\nimages = [30, 20]")))


def test_a_plugins_path_is_its_members_own(agreement_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "own_method.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedloom.core.settings import setting\n"
        "from fedloom.methods.base import METHODS\n"
        "from fedloom.methods.local import Local\n"
        "@dataclass(frozen=True)\n"
        "class Own:\n"
        "    table: str = setting('', 'a file that each member has', path=True)\n"
        "    speed: int = setting(1, 'of all')\n"
        "METHODS.add('own', Own, 'nothing')(Local)\n"
    )

    def agreed(own: str) -> Agreement:
        return read_agreement(agreement_file(("seed = 5", 'seed = 5\nplugins = ["own_method.py"]'), more=f"\n[own]\n{own}\n"))

    with taken_back():
        north, south = agreed('table = "here.csv"'), agreed('table = "there.csv"')
        assert north.settings.components["own"].table == str(tmp_path / "here.csv")
        assert north.digest == south.digest != agreed('table = "here.csv"\nspeed = 2').digest


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "name must be this site's name in the federation, got ''"),
        ('name = "../x"', "got '../x'"),
        ("name = 1", "name must be text"),
        ('name = "a"\nfoldr = "x"', "Unknown key 'foldr'"),
        ('name = "a"\npoll = 0', "poll must be at least 0.01"),
        ('name = "a"\nwait = -1', "wait must be at least 0"),
        ('name = "a"\ndevice = "tpu"', "device must be one of auto, cpu, cuda, mps"),
        ('name = "a"\nthreads = true', "threads must be a whole number"),
        ('name = "a"\nthreads = 1025', "threads must be at least 0 and at most 1024"),
        ("name", "is not a readable TOML file"),
    ],
)
def test_a_site_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(InvalidConfig, match=said):
        read_site(tmp_path / "site.toml")


def test_a_sites_paths_are_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('name = "a"\nimages = "/elsewhere"')
    site = read_site(tmp_path / "site.toml")
    assert site.key == str(tmp_path / "key.pem") and site.federation == str(tmp_path / "federation.toml") and site.images == "/elsewhere"


@pytest.mark.parametrize("file", ["ca.pem", "key.pem"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x00" * 3000, EMPTY, None])
def test_a_site_with_a_damaged_certificate_or_key(fedloom_: Fedloom, place: Path, file: str, content: bytes | None) -> None:
    path = place / "certs" / "north" / file
    path.unlink()
    os.mkfifo(path) if content is None else path.write_bytes(content)
    check_refused(fedloom_("site", "north.toml"), InvalidConfig, path)


@pytest.mark.parametrize("file", ["server.pem", "server-key.pem", "sites/north.pub"])
@pytest.mark.parametrize("content", [b"", b"nonsense", EMPTY, None])
def test_a_server_with_a_damaged_certificate_or_key(fedloom_: Fedloom, place: Path, file: str, content: bytes | None) -> None:
    path = place / "certs" / "server" / file
    path.unlink()
    os.mkfifo(path) if content is None else path.write_bytes(content)
    check_refused(fedloom_("serve", "federation.toml"), InvalidConfig, path)


def test_a_key_of_an_unknown_kind(fedloom_: Fedloom, place: Path) -> None:
    """Its kind is a number among its first bytes."""
    for path, command in (
        (place / "certs/north/key.pem", ("site", "north.toml")),
        (place / "certs/server/sites/north.pub", ("serve", "federation.toml")),
    ):
        head, *lines, tail = path.read_text().splitlines()
        data = bytearray(base64.b64decode("".join(lines)))
        place_of_kind = data.index(bytes.fromhex("2a8648ce3d0201")) + 6
        data[place_of_kind] = 3
        path.write_text("\n".join([head, base64.b64encode(data).decode(), tail, ""]))
        check_refused(fedloom_(*command), InvalidConfig, path, "of a kind that is not read")


def test_a_server_key_with_a_password_is_refused_and_not_asked_for(fedloom_: Fedloom, place: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    path = place / "certs" / "server" / "server-key.pem"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    check_refused(fedloom_("serve", "federation.toml"), InvalidConfig, path, "password")


@pytest.mark.parametrize(
    "server",
    ["", "localhost", ":9092", "localhost:", "localhost:0", "localhost:99999", "local host:1", "a@b:1", "b:1/x", "\u001b[2J:1", "ü.org:1"]
    + [f"{'a' * 64}.org:9092", "a..org:9092", "[::1:9092", "localhost:9092\n", "https://localhost:9092"],
)
def test_an_address_that_is_none(fedloom_: Fedloom, place: Path, server: str) -> None:
    text = re.sub(r"(?m)^server = .*$", lambda _: f"server = {json.dumps(server)}", (place / "north.toml").read_text())
    (place / "north.toml").write_text(text)
    check_refused(fedloom_("site", "north.toml"), InvalidConfig, "north.toml: server must be HOST:PORT")


def test_a_site_says_what_is_missing_before_it_connects(fedloom_: Fedloom, place: Path) -> None:
    def refused(*words: str, kind: Any = InvalidConfig) -> None:
        check_refused(fedloom_("site", "north.toml"), kind, *words)

    refused("images/north is missing", kind=InvalidData)
    (place / "certs/north/ca.pem").rename(place / "away")
    refused("There is no certificate of an authority at", "certs/north/ca.pem")
    (place / "certs/north/key.pem").unlink()
    refused("There is no private key at", "certs/north/key.pem", "fedloom certs")
    (place / "certs/north/key.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    refused("is no readable private key")
    (place / "north.toml").write_text(SITE.format(name="south", port=1, onnx="false"))
    refused("has no site 'south'; it has east, north, west")
    (place / "federation.toml").unlink()
    refused("There is no file", "federation.toml")


def test_a_sites_folder_goes_on_with_its_own_federation_only(fedloom_: Fedloom, place: Path) -> None:
    """Its memory and its last round are of other rounds than those it would be asked for."""
    write_digits(place / "images")
    folder = place / "at-north/digits/north"
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_text("")
    check_refused(fedloom_("site", "north.toml"), DamagedRun, "does not say which federation", "Choose another folder")
    (folder / "federation.json").write_text(json.dumps({"digest": "0" * 64}))
    check_refused(fedloom_("site", "north.toml"), InvalidConfig, "under other settings", "choose another folder")
