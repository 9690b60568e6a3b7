"""Masks that cancel in a sum (Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017).

Every pair of clients shares a secret, from which both compute the same mask; one adds it and the other subtracts it. Every client also adds
a mask of its own. Keys are X25519's, secrets are stretched by HKDF-SHA256 and bound to a context, masks are the key stream of ChaCha20, and
the shares that replace a lost client's secrets are Shamir's, by pycryptodome, in GF(2^128).

``cryptography`` and ``pycryptodome`` come with Flower and are loaded by those who call these functions: simulations make the same sums
without masks.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedloom.maths.sums import Words

KEY, SEED = 32, 16  # bytes of a key, and of what Shamir's scheme shares
CHUNK = 1 << 18  # bytes of a mask at a time, which fit into a fast cache
NO_NONCE = bytes(16)  # of the key stream, counter and nonce: every mask has a key of its own
NONCE = 12  # bytes, of what is sealed


def new_private() -> bytes:
    return secrets.token_bytes(KEY)


def public_of(private: bytes) -> bytes:
    return bytes(_x25519().X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw())


def agreed(private: bytes, public: bytes) -> bytes:
    """The secret of a pair, the same from both ends. ValueError for a public key that would give everybody the same."""
    key = _x25519()
    return bytes(key.X25519PrivateKey.from_private_bytes(private).exchange(key.X25519PublicKey.from_public_bytes(public)))


def derived(secret: bytes, *context: str) -> bytes:
    """A key for this context and no other. The parts of a context have their lengths before them, so that none imitates two."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    parts = [part.encode() for part in context]
    info = b"fedloom sums" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return bytes(HKDF(SHA256(), KEY, None, info).derive(secret))


def add_mask(values: Words, key: bytes, sign: int = 1) -> None:
    """In place: values plus (or minus) the key stream, modulo the words' size."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(key, NO_NONCE), mode=None).encryptor()
    zeros, room = memoryview(bytes(CHUNK)), bytearray(CHUNK)
    some = CHUNK // values.itemsize
    operation = np.add if sign > 0 else np.subtract
    for start in range(0, values.size, some):
        part = values[start : start + some]
        stream.update_into(zeros[: part.nbytes], room)
        operation(part, np.frombuffer(room, values.dtype, part.size), out=part)


def pairwise(values: Words, own: str, private: bytes, publics: Mapping[str, bytes], *context: str) -> None:
    """In place: the masks that a client shares with others (their public keys by name). Of two the first by name adds."""
    for other, public in publics.items():
        first, second = sorted((own, other))
        add_mask(values, derived(agreed(private, public), *context, first, second), 1 if own == first else -1)


# -- shares ------------------------------------------------------------------------------------------------------------
def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret of 16 or 32 bytes, for clients 1 to ``count``; any ``threshold`` of them give it back, fewer say nothing."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [Shamir.split(threshold, count, secret[start : start + SEED], ssss=False) for start in range(0, len(secret), SEED)]
    return [b"".join(bytes(half[number][1]) for half in halves) for number in range(count)]


def combined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from shares by their clients' numbers, from 1; of more than ``threshold`` the first."""
    from Crypto.Protocol.SecretSharing import Shamir

    if len(shares) < threshold:
        raise ValueError(f"there are {len(shares)} shares, and {threshold} are needed")
    some = sorted(shares.items())[:threshold]
    length = len(some[0][1])
    halves = range(0, length, SEED)
    return b"".join(
        bytes(Shamir.combine([(number, share[start : start + SEED]) for number, share in some], ssss=False)) for start in halves
    )


def sealed(key: bytes, content: bytes) -> bytes:
    """Encrypted and authenticated, with a random nonce in front."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + bytes(_aead(key).encrypt(nonce, content, None))


def unsealed(key: bytes, content: bytes) -> bytes:
    """ValueError for what this key did not seal."""
    from cryptography.exceptions import InvalidTag

    try:
        return bytes(_aead(key).decrypt(content[:NONCE], content[NONCE:], None))
    except (InvalidTag, ValueError):  # the second for what is too short
        raise ValueError("it was not sealed for this site, or was changed on its way") from None


def threshold(count: int, least: int) -> int:
    """How many of a sum's clients must be left to open it: more than two thirds.

    A server that lies could tell some that a client is lost, and others that it arrived, to take both its masks away. Each client helps
    once, so two groups of this size have more than a third of all in common, and these would have to collude.
    """
    return max(2 * count // 3 + 1, least)


def _x25519() -> Any:
    from cryptography.hazmat.primitives.asymmetric import x25519

    return x25519


def _aead(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key)
