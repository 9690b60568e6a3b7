"""Flower, which carries the messages: the one version this was written for, and bytes as its records.

A link state and a Fleet API of one's own are no part of Flower's public interface, so another version may not fit.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata
from typing import Any

from fedloom.core.errors import UnusableFormat

FLOWER = "1.41.0"
QUIET = {  # Flower calls home and looks for updates unless told otherwise
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}


def need_flower() -> None:
    """Refuse with the cure when Flower is missing or another one than this was written for; keep it from calling home."""
    os.environ.update(QUIET)
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        cure = "Install it with: pip install 'fedloom[federate]'"
        raise UnusableFormat(f"A federation over a network needs Flower, which is not installed here. {cure}", package="flwr") from None
    if found != FLOWER:
        raise UnusableFormat(f"Flower {found} is installed, and this was written for {FLOWER}. Install flwr=={FLOWER}", package="flwr")
    import flwr  # noqa: F401 - it sets up its logger

    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what matters is said by us, in one line each


def as_record(data: bytes) -> Any:
    """Bytes as Flower carries them: one array, which it cuts into chunks."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(data),), stype="fedloom", data=data)
    return RecordDict({"message": ArrayRecord({"bytes": array})})


def from_record(message: Any, most: int) -> bytes:
    data = bytes(message.content.array_records["message"]["bytes"].data)
    if len(data) > most:
        raise ValueError(f"{len(data):,} bytes, more than the {most:,} that are accepted")
    return data
