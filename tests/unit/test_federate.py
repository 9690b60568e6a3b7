"""What members of a federation agree on, their keys, their images and what they are told has left: good and bad input."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from PIL import Image

from federation_support import FEDERATION, SITE, SITES, TINY, write_digits
from fedloom.core.boundary import Upload
from fedloom.core.errors import BadMessage, DamagedRun, InvalidConfig, InvalidData, UnusableFolder
from fedloom.core.messages import FINISH, TRAIN, Instruction, Report, payload_bytes
from fedloom.data.members import blank, classes_of_members, read_member, read_members, unlabelled
from fedloom.data.readers import DataSettings, Member, read
from fedloom.data.splits import SplitSettings, held_out, make_split
from fedloom.engine.seal import opened, private_key, public_key, signed
from fedloom.federate import serve as serve_module
from fedloom.federate.agreement import read_agreement, read_site
from fedloom.federate.certs import make_certificates
from fedloom.federate.serve import rehearsal, serve
from fedloom.federate.statement import Departure, _ranges, mend, statement
from support import Fedloom, check_refused, everything

# -- FEDERATION.toml ----------------------------------------------------------------------------

GOOD = FEDERATION.format(base=TINY, method="fedavg", port=9092, server_images="")


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*changes: tuple[str, str], more: str = "") -> Path:
        text = GOOD
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "federation.toml"
        path.write_text(text + more)
        return path

    return write


def test_what_is_agreed_on(file: Callable[..., Path], tmp_path: Path) -> None:
    agreement = read_agreement(file())
    assert agreement.sites == sorted(SITES) and agreement.settings.clients == 3 and agreement.settings.split.rule == "members"
    assert agreement.members.classes == tuple("0123456789")  # in the order in which folders are read, whatever the file's
    assert agreement.settings.data.name == "sites"
    assert agreement.server.certificate == str(tmp_path / "certs/server/server.pem")
    assert agreement.server.folder == str(tmp_path / "server-run")
    assert agreement.images().train.images.shape == (0, 3, 8, 8) and agreement.images().server is None


SITE_LIST = 'sites = ["north", "east", "west"]'
CLASS_LIST = 'classes = ["9", "8", "7", "6", "5", "4", "3", "2", "1", "0"]'


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("[federation]", "[federaton]", "federation.name must be"),  # a table that is missing
        ('name = "digits"\n', "", "federation.name must be letters, digits, dots and dashes, got ''"),
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
        (SITE_LIST, 'sites = ["nörd"]', "cannot be a site's name"),
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
def test_what_cannot_be_agreed_on(file: Callable[..., Path], old: str, new: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        read_agreement(file((old, new)))


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


def test_the_digest_is_of_what_must_be_the_same_everywhere(file: Callable[..., Path]) -> None:
    digest = read_agreement(file()).digest
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
        assert read_agreement(file(*changes)).digest == digest, changes
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
        assert read_agreement(file(change)).digest != digest, change


# -- SITE.toml --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "name must be this site's name in the federation, got ''"),
        ('name = "../x"', "got '../x'"),
        ("name = 1", "name must be text"),
        ('name = "a"\nfoldr = "x"', "Unknown key 'foldr'"),
        ('name = "a"\npoll = 0', "poll must be at least 0.01"),
        ('name = "a"\nwait = -1', "wait must be at least 0"),
        ('name = "a"\ndevice = "tpu"', "device must be one of auto, cpu, cuda"),
        ('name = "a"\nthreads = true', "threads must be a whole number"),
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


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "federation.toml").write_text(GOOD)
    make_certificates(tmp_path / "certs", SITES, ["127.0.0.1"])
    (tmp_path / "north.toml").write_text(SITE.format(name="north", port=1, onnx="false"))
    return tmp_path


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


def test_keys_of_another_kind(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "key.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    for load, name in ((private_key, "key.pem"), (public_key, "key.pub")):
        with pytest.raises(InvalidConfig, match=r"must hold a .* key of an elliptic curve"):
            load(tmp_path / name)
    with pytest.raises(InvalidConfig, match="is no readable public key"):
        public_key(tmp_path / "key.pem")


def test_a_seal_is_for_one_report_and_one_instruction() -> None:
    key, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    sealed = signed(b"report", b"instruction", key)
    assert opened(sealed, b"instruction", key.public_key(), "north") == b"report"
    lies = [(sealed, b"another", key), (sealed, b"instruction", other), (sealed[:-1] + b"x", b"instruction", key)]
    lies += [(sealed[:length], b"instruction", key) for length in range(len(sealed))]
    for data, instruction, whose in lies:
        with pytest.raises(BadMessage, match="was not signed with the site's key"):
            opened(data, instruction, whose.public_key(), "north")


# -- the server's folder --------------------------------------------------------------------------------


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

    (folder / "ledger.jsonl").write_text(final("north") + final("east") + final("west"))
    said: list[str] = []
    assert sorted(serve(agreement, nobody, said.append).ledger.final) == sorted(SITES) and said == []
    (folder / "ledger.jsonl").write_text(final("north") + final("east"))
    with pytest.raises(Reached):  # west was not there at the end, and may be now
        serve(agreement, nobody, said.append)


# -- certificates ---------------------------------------------------------------------------------------


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certs", ["a", "b.c-d_1"], ["localhost", "127.0.0.1"])
    keys = [path for path in made if path.name.endswith("key.pem")]
    assert {path.relative_to(tmp_path / "certs").as_posix() for path in keys} == {
        *("authority/ca-key.pem", "server/server-key.pem"),
        *("a/key.pem", "b.c-d_1/key.pem"),
    }
    for key in keys:
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(path.name for path in (tmp_path / "certs/a").iterdir()) == ["ca.pem", "key.pem"]  # what a site gets
    assert private_key(tmp_path / "certs/a/key.pem").public_key() == public_key(tmp_path / "certs/server/sites/a.pub")
    certificate = x509.load_pem_x509_certificate((tmp_path / "certs/server/server.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((tmp_path / "certs/a/ca.pem").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize("sites", ["../x", "a/b", "server", "authority", "a,a", ",", ".x", "a b"])
def test_bad_names_make_no_keys(fedloom_: Fedloom, tmp_path: Path, sites: str) -> None:
    check_refused(fedloom_("certs", "certs", "--sites", sites), InvalidConfig)
    assert list(tmp_path.iterdir()) == []


def test_keys_are_not_written_over(fedloom_: Fedloom, tmp_path: Path) -> None:
    assert fedloom_("certs", "certs", "--sites", "a, b").code == 0
    before = everything(tmp_path)
    check_refused(fedloom_("certs", "certs", "--sites", "a"), UnusableFolder, "is not an empty folder, and keys are not written over")
    check_refused(fedloom_("certs", "certs/a/key.pem", "--sites", "a"), UnusableFolder, "is not an empty folder")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("hosts", ["ünicode.example", "a,ß"])
def test_a_host_that_is_none(fedloom_: Fedloom, tmp_path: Path, hosts: str) -> None:
    check_refused(fedloom_("certs", "certs", "--sites", "a", "--hosts", hosts), InvalidConfig, "is no name or address of a server")
    assert list(tmp_path.iterdir()) == []


# -- the members' images -----------------------------------------------------------------------------------


def write_images(place: Path, classes: dict[str, int]) -> Path:
    for name, count in classes.items():
        (place / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (10, 12), (40 * number, 7, 100)).save(place / name / f"{number}.png")
    return place


def test_a_member_need_not_have_every_class(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 2, "owl": 3})
    write_images(tmp_path / "test", {"dog": 1, "owl": 1})
    train, test = read_member(tmp_path, ("cat", "dog", "owl"), 8)
    assert train.labels.tolist() == [0, 0, 2, 2, 2] and test.labels.tolist() == [1, 2] and train.images.shape == (5, 3, 8, 8)


def test_without_test_images_a_share_is_set_aside(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 10, "owl": 5})
    train, test = read_member(tmp_path, ("cat", "dog", "owl"), 8)
    assert sorted(test.labels.tolist()) == [0, 0, 2] and len(train) == 12
    again = read_member(tmp_path, ("cat", "dog", "owl"), 8)[1]
    assert np.array_equal(test.images, again.images)


def test_a_member_with_a_class_that_the_federation_has_not(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "cats": 2})
    with pytest.raises(InvalidData, match=r"has a class 'cats', which the federation has not \(cat, dog\)\. Rename or move it"):
        read_member(tmp_path, ("cat", "dog"), 8)


@pytest.mark.parametrize("part", ["train", "test"])
def test_one_of_train_and_test(tmp_path: Path, part: str) -> None:
    write_images(tmp_path / part, {"cat": 2})
    with pytest.raises(InvalidData, match=r"must hold train/ and test/, and has one of them\. Have both, or"):
        read_member(tmp_path, ("cat", "dog"), 8)


def test_members_without_images(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="at least 1; found 0"):
        read_member(tmp_path, ("cat", "dog"), 8)
    with pytest.raises(InvalidData, match="is missing"):
        read_member(tmp_path / "none", ("cat", "dog"), 8)
    (tmp_path / "cat").mkdir()
    with pytest.raises(InvalidData, match="holds no image"):
        read_member(tmp_path, ("cat", "dog"), 8)
    (tmp_path / "cat" / "torn.png").write_bytes(b"\x89PNG")
    with pytest.raises(InvalidData, match=r"cat/torn\.png cannot be read as an image"):
        read_member(tmp_path, ("cat", "dog"), 8)


def test_all_members_together(tmp_path: Path) -> None:
    write_images(tmp_path / "b", {"owl": 10})
    write_images(tmp_path / "a" / "train", {"cat": 4})
    write_images(tmp_path / "a" / "test", {"dog": 2})
    (tmp_path / ".hidden").mkdir()
    dataset = read_members(tmp_path, 8)
    assert dataset.classes == classes_of_members(tmp_path) == ("cat", "dog", "owl")
    assert dataset.members == (Member("a", 4, 2), Member("b", 8, 2))
    assert dataset.train.labels.tolist() == [0] * 4 + [2] * 8 and dataset.test.labels.tolist() == [1, 1, 2, 2]
    assert read(DataSettings("sites", str(tmp_path), 8)).members == dataset.members
    with pytest.raises(InvalidData, match="must hold a folder for every member"):
        read_members(tmp_path / ".hidden", 8)


def test_what_a_server_knows_of_images(tmp_path: Path) -> None:
    known = blank(("a", "b"), 16)
    assert known.classes == ("a", "b") and known.train.images.shape == (0, 3, 16, 16) and len(known.test) == 0
    write_images(tmp_path, {"any": 3})
    assert unlabelled(tmp_path / "any", 8).shape == (3, 3, 8, 8)
    with pytest.raises(InvalidData, match="holds no image for the server"):
        unlabelled(tmp_path, 8)


LABELS = np.tile(np.arange(5), 6)


def test_members_keep_their_images() -> None:
    settings = SplitSettings(rule="members", validation=0.2)
    split = make_split(settings, LABELS, LABELS[:5], 2, 3, [Member("a", 10, 2), Member("b", 20, 3)])
    for client, (first, last) in enumerate([(0, 10), (10, 30)]):
        train, validation = split.part("train", client), split.part("validation", client)
        assert sorted([*train, *validation]) == list(range(first, last))
        fit, select = held_out(settings, LABELS[first:last], 3, client)  # as the site itself divides them
        assert np.array_equal(train, first + fit) and np.array_equal(validation, first + select)
    assert split.part("test", 0).tolist() == [0, 1] and split.part("test", 1).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    "changes, clients, members, said",
    [
        ({}, 3, 2, "clients is 3, but there are 2 members. Set clients=2"),
        ({"rule": "iid"}, 2, 2, "data.name=sites and split.rule=members go together"),
        ({}, 2, 0, "data.name=sites and split.rule=members go together"),
        ({"test": 0.2}, 2, 2, "Set split.test=0 and split.server=0"),
        ({"server": 0.2}, 2, 2, "Set split.test=0 and split.server=0"),
    ],
)
def test_what_does_not_go_with_members(changes: dict[str, Any], clients: int, members: int, said: str) -> None:
    own = [Member("a", 10, 2), Member("b", 20, 3)][:members]
    with pytest.raises(InvalidConfig, match=said):
        make_split(replace(SplitSettings(rule="members"), **changes), LABELS, LABELS[:5], clients, 0, own)


def test_a_member_with_too_little(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="it needs"):
        make_split(SplitSettings(rule="members"), LABELS, LABELS[:5], 2, 0, [Member("a", 1, 2), Member("b", 29, 3)])


@pytest.mark.parametrize(
    "class_list, said", [('classes = ["cat", "dog", "owl"]', "'owl' differs"), ('classes = ["cat", "cow"]', "'cow' differs")]
)
def test_a_rehearsal_has_the_classes_that_were_agreed_on(
    file: Callable[..., Path], tmp_path: Path, nobody: Any, class_list: str, said: str
) -> None:
    """Or it would be of another network than the federation is."""
    for site in SITES:
        write_images(tmp_path / "images" / site, {"cat": 5, "dog": 5})
    with pytest.raises(InvalidData, match=f"does not have the classes that were agreed on: {said}"):
        rehearsal(read_agreement(file((CLASS_LIST, class_list))), tmp_path / "images", nobody)
    assert not (tmp_path / "server-run-rehearsal").exists()


def test_a_rehearsal_by_the_command(fedloom_: Fedloom, place: Path) -> None:
    write_digits(place / "images")
    check_refused(fedloom_("serve", "federation.toml", "--rehearse", "nowhere"), InvalidData, "nowhere")
    outcome = fedloom_("serve", "federation.toml", "--rehearse", "images")
    assert outcome.code == 0 and "over after 3 rounds; 3 of 3 sites have their personal model" in outcome.out
    assert (place / "server-run-rehearsal/clients/north/model.safetensors").exists() and not (place / "server-run").exists()


# -- the statement ----------------------------------------------------------------------------------------

UPLOADS = {"update": Upload("what training changed", like="weights"), "examples": Upload("how many", low=1)}


def test_a_departure_says_what_left() -> None:
    instruction = Instruction("north", 4, TRAIN, 0)
    report = Report("north", 4, {"update": {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}}, {"examples": 12})
    departure = Departure.of(report, instruction, "f" * 64)
    assert departure.fields == {"update": 20, "examples": len('{"examples": 12}')}
    assert departure.bytes == payload_bytes(report) == sum(departure.fields.values())
    assert json.loads(departure.to_json())["round"] == 4 and departure.at.endswith("+00:00")


def test_a_statement_adds_up(tmp_path: Path) -> None:
    log = tmp_path / "left.jsonl"
    parts = [Departure("t", round, TRAIN, {"update": 1000, "examples": 16}, 1016, "x") for round in (0, 1, 1, 4)]
    parts.append(Departure("t", 5, FINISH, {}, 0, "x"))
    log.write_text("".join(f"{part.to_json()}\n" for part in parts))
    text = statement("digits", "north", UPLOADS, log)
    assert text.startswith("What left north in the federation digits\n")
    assert "5 reports with 4,064 bytes of content left this site, in 3 rounds (1-2, 5)." in text
    assert "  update: 4,000 bytes: what training changed\n  examples: 64 bytes: how many\n" in text
    assert "did not leave" in text and "left.jsonl lists each of them" in text


def test_a_statement_of_nothing_and_of_what_was_not_declared(tmp_path: Path) -> None:
    log = tmp_path / "left.jsonl"
    log.write_text("")
    assert statement("digits", "north", {}, log) == "What left north in the federation digits\n\nNothing.\n"
    log.write_text(Departure("t", 0, TRAIN, {"labels": 8}, 8, "x").to_json() + "\n")
    assert "  labels: a field the method does not declare" in statement("digits", "north", UPLOADS, log)


@pytest.mark.parametrize(
    "content", ["torn", '{"at":"t"}', "[1]", '{"at":"t","round":0,"action":"train","fields":{},"bytes":0,"sha256":"","x":1}']
)
def test_a_statement_of_a_log_that_was_changed(tmp_path: Path, content: str) -> None:
    (tmp_path / "left.jsonl").write_text(content + "\n")
    with pytest.raises(DamagedRun, match="must not be changed by hand"):
        statement("digits", "north", UPLOADS, tmp_path / "left.jsonl")


def test_ranges() -> None:
    for numbers, text in (([], "none"), ([1], "1"), ([1, 2, 3], "1-3"), ([1, 3, 4, 9], "1, 3-4, 9")):
        assert _ranges(numbers) == text


def test_only_a_torn_line_is_mended(tmp_path: Path) -> None:
    log = tmp_path / "left.jsonl"
    mend(log)
    assert not log.exists()
    for before, after in ((b"", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"b", b"")):
        log.write_bytes(before)
        mend(log)
        assert log.read_bytes() == after
