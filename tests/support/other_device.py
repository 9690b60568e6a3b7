"""A device of its own kind, as a Mac's GPU is to torch: neither CPU nor CUDA, without float64, and its tensors meet no others.

Its tensors lie in memory and torch's own CPU operations compute them. torch registers such a device once in a process and for good, so this
is a script for a process of its own: ``python other_device.py FILE.toml FOLDER METHOD`` runs a federation on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register

import fedloom
from fedloom.assemble import simulation

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)  # what may see two devices


class There(Tensor):
    """A tensor on the device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        if held.dtype == torch.float64:
            raise TypeError("the device has no float64")
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        there = Tensor._make_wrapper_subclass(cls, held.size(), **shape, device="other:0")
        there.held = held
        return there

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return computed(operation, args, kwargs or {})


class Device(TorchDispatchMode):
    """Inside of it the device exists."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return computed(operation, args, kwargs or {})


def computed(operation: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given, form = tree.tree_flatten((args, kwargs))
    there = {id(one.held): one for one in given if isinstance(one, There)}
    elsewhere = [one for one in given if isinstance(one, Tensor) and not isinstance(one, There) and one.ndim]
    if there and elsewhere and operation not in COPIES:
        raise RuntimeError(f"{operation} was given tensors on two devices")
    wanted = kwargs.get("device")
    stays = torch.device(wanted).type == "other" if wanted is not None else bool(there)
    own = [one.held if isinstance(one, There) else torch.device("cpu") if isinstance(one, torch.device) else one for one in given]
    args, kwargs = tree.tree_unflatten(own, form)
    found = operation(*args, **kwargs)
    return tree.tree_map_only(Tensor, lambda one: there[id(one)] if id(one) in there else There(one), found) if stays else found


def main() -> None:
    file, folder, method = sys.argv[1:]
    torch.set_num_threads(1)
    register("other")
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) is made here and moved, so that it is seen
    with Device():
        there = torch.ones(2, device="other")
        with pytest.raises(TypeError, match="no float64"):
            there.double()
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(2)
        simulation.usable_device = lambda wanted, key: there.device  # type: ignore[assignment]
        fedloom.run(file, folder=folder, method=method)


if __name__ == "__main__":
    main()
