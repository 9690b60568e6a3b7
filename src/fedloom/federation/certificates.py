"""Certificates and keys: those of a server and a site checked before anything listens or connects, and some to try a federation with."""

from __future__ import annotations

import ipaddress
import json
import os
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from fedloom.core.errors import InvalidConfig, UnusableFolder, one_line
from fedloom.federation.agreement import NAME, ServerSettings, SiteSettings, name_cure
from fedloom.federation.wire.flower import need_flower
from fedloom.federation.wire.signatures import fingerprint, private_key, public_key
from fedloom.files import open_plain, unwritable, write_file

DAYS = 365
TAKEN = ("server", "authority")  # folders that are nobody's site


def check_server(settings: ServerSettings, sites: Sequence[str]) -> None:
    """Refuse files that the server cannot use."""
    for key, path in (("certificate", settings.certificate), ("key", settings.key)):
        _check_plain(path, f"server.{key}")
    for site in sites:
        _check_key(Path(settings.sites) / f"{site}.pub", "server.sites", public_key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is the first
        what = f"{settings.certificate} and {settings.key} are no certificate and its key in PEM, or the key has a password"
        raise InvalidConfig(f"{what} ({one_line(error)}). `fedloom certs` makes some to try with", key="server.certificate") from error


def check_site(settings: SiteSettings) -> None:
    """Refuse files that a site cannot use."""
    _check_plain(settings.authority, "authority")
    _check_key(Path(settings.key), "key", private_key)
    try:
        ssl.create_default_context(cafile=settings.authority)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        cure = "Ask the federation's operator for it again: ca.pem"
        what = f"{settings.authority} is no certificate of an authority in PEM ({one_line(error)})"
        raise InvalidConfig(f"{what}. {cure}", key="authority") from error


def _check_plain(path: str | Path, key: str) -> None:
    try:
        open_plain(path).close()
    except FileNotFoundError:
        pass  # whoever needs it says so
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read ({error.strerror}). Set {key} to a file", key=key) from error


def _check_key(path: Path, key: str, read: Callable[[Path], object]) -> None:
    need_flower()  # it brings cryptography along
    from cryptography.exceptions import UnsupportedAlgorithm

    _check_plain(path, key)
    try:
        if path.exists():
            read(path)
    except UnsupportedAlgorithm as error:
        raise InvalidConfig(f"{path} holds a key of a kind that is not read ({one_line(error)}). Use one of NIST P-384", key=key) from error


def _no_password() -> NoReturn:
    """Asked for, it would wait at the terminal of a server that nobody sits at."""
    raise ValueError("the key has a password")


def make_certificates(folder: Path, sites: Sequence[str], hosts: Sequence[str]) -> list[Path]:
    """folder/server: what the server needs; folder/SITE: what that site needs. Private keys can be read by their owner only."""
    need_flower()  # it brings cryptography along
    from cryptography.hazmat.primitives.asymmetric import ec

    for site in sites:
        if not NAME.fullmatch(site) or site in TAKEN:
            cure = "That folder is for something else: choose another name" if site in TAKEN else name_cure(site)
            raise InvalidConfig(f"{site!r} cannot be a site's name. {cure}", key="sites")
    if not sites or len(set(sites)) != len(sites):
        raise InvalidConfig("Name the sites, each once: --sites north,south", key="sites")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UnusableFolder(f"{folder} is not an empty folder, and keys are not written over. Choose another")
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate("Fedloom test authority", authority.public_key(), authority, None, ())
    own = _certificate(hosts[0], server.public_key(), authority, root, hosts)
    made = [_secret(folder / "authority" / "ca-key.pem", authority), _public(folder / "authority" / "ca.pem", root)]
    made += [_secret(folder / "server" / "server-key.pem", server), _public(folder / "server" / "server.pem", own)]
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())
        made += [_secret(folder / site / "key.pem", key), _public(folder / site / "ca.pem", root)]
        made.append(_public(folder / "server" / "sites" / f"{site}.pub", key.public_key()))
    return made


def fingerprints_line(folder: Path, sites: Sequence[str]) -> str:
    """``federation.keys`` of these sites, as TOML has it. folder: what ``make_certificates`` filled."""
    found = [fingerprint(public_key(folder / "server" / "sites" / f"{site}.pub")) for site in sites]
    return f"keys = {json.dumps(found)}"


def _certificate(name: str, public: Any, authority: Any, issuer: Any, hosts: Sequence[str]) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    usage = {"digital_signature": issuer is not None, "key_cert_sign": issuer is None, "crl_sign": issuer is None}
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only")
    builder = builder.add_extension(x509.KeyUsage(**usage, **dict.fromkeys(others, False)), critical=True)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise InvalidConfig(f"{host!r} is no name or address of a server: {error}", key="hosts") from error


def _secret(path: Path, key: Any) -> Path:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # never readable by others, not even for a moment
        with open(handle, "wb") as file:
            file.write(data)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def _public(path: Path, what: Any) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if isinstance(what, x509.Certificate):
        write_file(path, what.public_bytes(Encoding.PEM))
    else:
        write_file(path, what.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path
