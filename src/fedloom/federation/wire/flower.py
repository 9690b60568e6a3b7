"""Flower, which carries the messages: the one version this was written for, and bytes as its records.

A link state and a Fleet API of one's own are no part of Flower's public interface, so another version may not fit.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from fedloom.core.errors import UnusableFormat

FLOWER = "1.41.0"
CHUNK = 5 << 20  # bytes of a message that travel in one piece
OUTER = 128 << 10  # bytes of an object that is no chunk: it names the others, in 65 bytes each
AROUND = ("Message", "RecordDict", "ArrayRecord", "Array")  # what Flower puts around the chunks of our bytes
ENVIRONMENT = {  # Flower calls home and looks for updates unless told otherwise
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(CHUNK),
}


def need_flower() -> None:
    """Refuse with the cure when Flower is missing or another one than this was written for; keep it from calling home."""
    os.environ.update(ENVIRONMENT)
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


def joined(name: str, fetch: Callable[[Sequence[str]], Mapping[str, bytes]], most: int) -> bytes:
    """The bytes of a message that ``as_record`` made, from its parts. fetch: parts by their names; most: bytes that are accepted.

    Flower's own inflation takes any form, and a chunk that is named a thousand times a thousand times. Here only our form is followed, and
    every mention of a chunk is counted before the first is copied.
    """
    names, body = [name], memoryview(b"")
    for kind in AROUND:
        (name,) = names
        names, body = _opened(fetch([name])[name], kind, OUTER)
    if len(names) > parts(most) - len(AROUND):
        raise ValueError(more_than(most))
    order = json.loads(bytes(body))["arraychunk_ids"]
    contents = fetch(names)
    chunks = [_opened(contents[chunk], "ArrayChunk", CHUNK + OUTER)[1] for chunk in names]
    if sum(len(chunks[number]) for number in order) > most:
        raise ValueError(more_than(most))
    return b"".join([chunks[number] for number in order])


def check_tree(tree: Any, most: int) -> None:
    """Refuse a tree of parts that is deeper or wider than a message of this many bytes, or names a part twice.

    Flower stores a part's children by name and walks them under the lock that heartbeats need, so a few kB of nested repetitions keep it
    busy for ever.
    """
    known: set[str] = set()
    level = [tree]
    for _ in range(len(AROUND) + 1):
        count = len(known) + len(level)
        known.update(node.object_id for node in level)
        if len(known) < count:
            raise ValueError("it names a part twice")
        if count > parts(most):
            raise ValueError(f"it has more parts than the {parts(most)} of the largest report")
        level = [child for node in level for child in node.children]
    if level:
        raise ValueError("its parts are nested deeper than those of a report")


def parts(most: int) -> int:
    """How many objects Flower makes of a message of so many bytes."""
    return len(AROUND) + max(1, -(-most // CHUNK))


def more_than(most: int) -> str:
    return f"more than the {most:,} bytes that are accepted"


def _opened(content: bytes, kind: str, most: int) -> tuple[list[str], memoryview]:
    """The parts that an object names, and its own content. It is written as: kind, names, length, a zero, content."""
    end = content.find(b"\0", 0, OUTER)
    if end < 0 or len(content) > most:
        raise ValueError(f"its {kind} has no head, or is {more_than(most)}")
    found, names, _ = content[:end].decode().split(" ")
    if found != kind:
        raise ValueError(f"it has a {found[:20]} where a {kind} belongs")
    return names.split(",") if names else [], memoryview(content)[end + 1 :]
