"""What all launches share: how many blocks, of how many channels, and the way to a compiled kernel."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

PROGRAMS = 1024  # blocks that fill a large GPU; only speed and the order of sums depend on it
TILE = 4096  # numbers in a tile of an element-wise kernel


def group_step(tensor: Tensor | None, unit: int) -> int:
    """From one group to the next, in units; 0 where all groups share the tensor."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0) // unit


def block_lanes(c: int, most: int, waste: float) -> int:
    """Channels of a block: as many as possible, but with little waste in the last block."""
    fits = [width for width in (128, 64, 32, 16) if width <= most and -(-c // width) * width <= waste * c]
    return fits[0] if fits else 8


def in_units(c: int) -> tuple[int, int]:
    """c as units of UNIT channels."""
    return (c // 8, 8) if c % 8 == 0 else (c, 1)


_compiled: dict[Hashable, Any] = {}
_first_constant: dict[int, int] = {}  # of a kernel's arguments


def launch(kernel: Any, blocks: int, *arguments: Any, num_warps: int = 4) -> None:
    """``kernel[(blocks,)](*arguments)``. Triton looks for the compiled kernel at every launch, which takes Python a
    while; here it is found by what it was compiled for: precision and alignment of tensors, and constants, which come last."""
    if not hasattr(kernel, "device_caches"):  # in Triton's interpreter
        kernel[(blocks,)](*arguments, num_warps=num_warps)
        return
    name = id(kernel)
    if name not in _first_constant:
        _first_constant[name] = [parameter.is_constexpr for parameter in kernel.params].index(True)
    constants, small = _first_constant[name], True
    seen: list[Hashable] = [name, num_warps, arguments[constants:]]
    for argument in arguments[:constants]:
        if isinstance(argument, Tensor):
            seen += (argument.dtype, argument.device.index, argument.data_ptr() % 16 == 0)
        else:
            small = small and argument < 2**31
    key = (*seen, small)
    found = _compiled.get(key)
    if found is None:
        _compiled[key] = kernel[(blocks,)](*arguments, num_warps=num_warps)
    else:
        found[(blocks, 1, 1)](*arguments)
