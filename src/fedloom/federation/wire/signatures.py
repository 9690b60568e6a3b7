"""Reports signed with their site's key: Flower signs requests but not what they carry, so a registered site could answer for another.

The signature is over the instruction and the report together, so that an old report, or one for another instruction, does not pass.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path
from typing import Any

from fedloom.core.errors import BadMessage, InvalidConfig, one_line

LENGTH = 2  # bytes in front that say how long the signature is


def signed(report: bytes, instruction: bytes, key: Any) -> bytes:
    signature = sign(_what(report, instruction), key)
    return len(signature).to_bytes(LENGTH, "big") + signature + report


def opened(data: bytes, instruction: bytes, public: Any, site: str) -> bytes:
    """The report inside, if this site signed it for this instruction."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "big")
    signature, report = data[LENGTH:end], data[end:]
    if not _fits(signature, _what(report, instruction), public):
        what = "The report is damaged, is not an answer to this round's instruction, or was not signed with the site's key"
        raise BadMessage(what, client=site)
    return report


def sign(data: bytes, key: Any) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec

    return bytes(key.sign(data, ec.ECDSA(_sha256())))


def verified(signature: bytes, data: bytes, public: bytes) -> bool:
    """Whether this was signed with the private half of a key; public: as ``der`` writes it."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    try:
        key = load_der_public_key(public)
    except (ValueError, UnsupportedAlgorithm):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey) and _fits(signature, data, key)


def der(public: Any) -> bytes:
    """A public key as bytes that are the same everywhere; their SHA-256 is its fingerprint."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def fingerprint(public: Any) -> str:
    return hashlib.sha256(der(public)).hexdigest()


def _fits(signature: bytes, data: bytes, public: Any) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public.verify(signature, data, ec.ECDSA(_sha256()))
    except InvalidSignature:
        return False
    return True


def _what(report: bytes, instruction: bytes) -> bytes:
    return b"fedloom report" + hashlib.sha256(instruction).digest() + hashlib.sha256(report).digest()


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def private_key(path: Path) -> Any:
    """Refused, as ssh does, if others can read it: everybody, or the group of a file that is this user's own."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key, found = _elliptic(path, lambda data: load_pem_private_key(data, None), "private key"), path.stat()
    mode = found.st_mode & 0o777
    if mode & (0o077 if found.st_uid == os.getuid() else 0o007):
        what = f"{path} is a private key, and others than its owner can use it (mode {mode:04o})"
        raise InvalidConfig(f"{what}. Run: chmod 600 {shlex.quote(str(path))}", path=str(path))
    return key


def public_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return _elliptic(path, load_pem_public_key, "public key")


def public_bytes(key: Any) -> bytes:
    """A public key as Flower registers it."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return bytes(public_key_to_bytes(key))


def _elliptic(path: Path, load: Any, what: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = load(path.read_bytes())
    except FileNotFoundError:
        raise InvalidConfig(f"There is no {what} at {path}. `fedloom certs` makes keys to try with", path=str(path)) from None
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfig(f"{path} is no readable {what} ({one_line(error)})", path=str(path)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        raise InvalidConfig(f"{path} must hold a {what} of an elliptic curve (NIST P-384)", path=str(path))
    return key
