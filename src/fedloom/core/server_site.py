"""What the server itself holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServerImages:
    """Images without labels: the server half of a method gets this type, and what has no field cannot be read."""

    images: Any  # (n, channels, height, width) uint8, a tensor on the training device

    def __len__(self) -> int:
        return len(self.images)
