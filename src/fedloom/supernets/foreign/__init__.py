"""Public networks whose weights can be imported, by space: one module each, with how it names tensors and the images it expects."""

from __future__ import annotations

from fedloom.supernets.foreign import darts, mobilenetv3, nasvit
from fedloom.supernets.foreign.base import PublicNetwork

PUBLIC: dict[str, PublicNetwork] = {"darts": darts.NETWORK, "mobilenetv3": mobilenetv3.NETWORK, "nasvit": nasvit.NETWORK}
