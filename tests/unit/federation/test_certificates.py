"""Certificates, keys and signatures."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedloom.core.errors import BadMessage, InvalidConfig, UnusableFolder
from fedloom.federation.certificates import make_certificates
from fedloom.federation.wire.signatures import opened, private_key, public_key, signed
from support.checks import Fedloom, check_refused, everything


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
