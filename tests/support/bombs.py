"""Small messages that grow large where they are read."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any


def repeated(size: int, times: int) -> Any:
    """A record of one chunk of so many bytes, which its array names so many times."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(size * times,), stype="fedloom", data=os.urandom(size))
    record = RecordDict({"message": ArrayRecord({"bytes": array})})
    array = record["message"]["bytes"]  # a copy
    array.__dict__["_chunks"] = array.slice_array() * times
    return record


def doubling(name: str, levels: int) -> Any:
    """A tree of 2 * levels nodes in which every level names the next one twice: 2 ** levels nodes for who follows the names."""
    from flwr.proto.message_pb2 import ObjectTree

    tree = ObjectTree(object_id=sha256(b"the last").hexdigest())
    for level in range(levels):
        above = sha256(f"level {level}".encode()).hexdigest() if level < levels - 1 else name
        tree = ObjectTree(object_id=above, children=[tree, ObjectTree(object_id=tree.object_id)])
    return tree
