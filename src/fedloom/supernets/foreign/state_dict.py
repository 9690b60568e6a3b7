"""Checkpoints that others wrote, read safely: a state dict in .pth or .safetensors. Nothing in a file is executed."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.errors import InvalidConfig, InvalidData, one_line, printable
from fedloom.core.registry import did_you_mean
from fedloom.files import open_plain

NAMED = 3  # keys that a refusal names
USUAL = ("state_dict", "model")  # where training scripts put the weights inside a checkpoint; averages of them lie beside
DEEP = 3  # and how deep
WRAPPER = re.compile(r"(module|model|network|net)\.")  # what nn.DataParallel, EMA and training frameworks put in front of every key
INNER_WRAPPER = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # what torch puts anywhere in a key
AGAIN = "Copy or download it again"
SAVE = "Save the state dict alone: torch.save(network.state_dict(), FILE)"
ZIP, LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch.save begin, since and before torch 1.6


class PassedOver:
    """Stands for an object beside the weights: takes whatever it is made from and keeps nothing."""

    def __init__(self, *given: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


# What public training scripts save beside the tensors. Nobody looks at it: settings are read as dictionaries, numpy's numbers and
# arrays as nothing, so that no code of these packages runs. torch refuses every other class before one is made.
NUMPY = ("dtype", "ndarray", *(f"{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")))
PASSENGERS: list[Any] = [(OrderedDict, "argparse.Namespace"), (OrderedDict, "yacs.config.CfgNode")]
PASSENGERS += [(PassedOver, f"numpy.{name}") for name in NUMPY]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one network by name, without the prefixes of wrappers."""

    tensors: dict[str, Tensor]
    part: str  # which dictionary of the file they are, such as state_dict; empty for the outermost
    others: tuple[str, ...]  # further dictionaries with tensors of this network


def read_state(path: Path, expects: Callable[[str], bool], part: str | None = None) -> Checkpoint:
    """One state dict of a checkpoint. ``expects`` knows the names of the network.

    ``part`` chooses among several dictionaries; "" takes the usual one, None refuses to choose.
    """
    parts = {name: _unwrapped(tensors, expects) for name, tensors in _parts(_content(path)).items()}
    if not parts:
        raise InvalidData(f"{path} holds no tensors by name: it is not the state dict of a network", file=str(path))
    if part and part not in parts:
        raise InvalidConfig(f"{path} has no part {part!r} with tensors. {did_you_mean(part, [some([name]) for name in parts if name])}")
    fitting = [name for name, tensors in parts.items() if any(map(expects, tensors))] or [max(parts, key=lambda name: len(parts[name]))]
    usual = [name for name in fitting if set(name.split(".")) <= {"", *USUAL}]
    if not part and len(fitting) > 1 and (part is None or not usual):
        cure = "Save the state dict of one alone" if part is None else "Choose one with --part NAME"
        raise InvalidData(f"{path} holds several networks: {some(fitting, 20)}. {cure}", file=str(path))
    chosen = part or (usual or fitting)[0]
    for key, tensor in parts[chosen].items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise InvalidData(f"{path}: {some([key])} is no plain tensor: its numbers are sparse or left out", file=str(path))
    return Checkpoint(parts[chosen], chosen, tuple(name for name in fitting if name != chosen))


def some(keys: Sequence[str], count: int = NAMED) -> str:
    """The first of these names, which may come from anybody's file."""
    return ", ".join(printable(key, 160) for key in keys[:count]) + (f" and {len(keys) - count} more" if len(keys) > count else "")


def _parts(content: Any) -> dict[str, dict[str, Tensor]]:
    """Every dictionary of tensors in a checkpoint by the keys that lead to it; at each depth the usual ones first."""
    parts: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    queue: list[tuple[tuple[str, ...], Any]] = [((), content)]
    for path, found in queue:  # which grows meanwhile
        if not isinstance(found, dict) or id(found) in seen:
            continue
        seen.add(id(found))
        entries = {key: value for key, value in found.items() if isinstance(key, str)}
        if tensors := {key: value for key, value in entries.items() if isinstance(value, Tensor)}:
            parts[".".join(path)] = tensors
        if len(path) < DEEP:
            queue += [((*path, key), entries[key]) for key in (*USUAL, *entries) if key in entries]
    return parts


def _unwrapped(tensors: Mapping[str, Tensor], expects: Callable[[str], bool]) -> dict[str, Tensor]:
    """Without the prefixes of wrappers, if keys of the network come out. Of two keys that become one the second stays as it is."""
    names: dict[str, str] = {}
    for key in tensors:
        short = key if expects(key) else INNER_WRAPPER.sub("", key)
        while not expects(short) and (wrapper := WRAPPER.match(short)):
            short = short[wrapper.end() :]
        names[key if short in tensors or short in names else short] = key
    return {name: tensors[key] for name, key in names.items()} if any(map(expects, names)) else dict(tensors)


# -- files ----------------------------------------------------------------------------
def _content(path: Path) -> Any:
    """What a file holds: tensors and plain values."""
    start, safetensors = b"", False
    try:
        with open_plain(path) as file:
            start = file.read(64)
        safetensors = start[5:9] == b"\0\0\0{"  # a length of eight bytes, then JSON
        if not start:
            raise InvalidData(f"{path} is empty. {AGAIN}", file=str(path))
        if all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in start):
            cure = "Often a web page or a Git LFS pointer was saved in place of the weights: download the file itself"
            raise InvalidData(f"{path} is text, not weights. {cure}", file=str(path))
        if safetensors:
            return load_file(path)
        if start.startswith(ZIP):
            _check_archive(path)
        with torch.serialization.safe_globals(PASSENGERS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about versions of pickle; what cannot be read is refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except InvalidData:
        raise
    except OSError as error:
        raise InvalidData(f"{path} cannot be read: {error.strerror or one_line(error)}", file=str(path)) from error
    except Exception as error:  # damaged bytes can raise anything
        asked = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, UnpicklingError) else None
        said = printable(re.sub(r"(?s).*WeightsUnpickler error:|Check the documentation.*", "", str(error)), 80).rstrip(".")
        if asked:
            what = f"asks for {printable(asked[1], 160)}, and making one could run code. {SAVE}"
        elif start.startswith(ZIP) and "weights_only" in str(error):  # its checksums are right
            what = f"cannot be read as weights ({said}). {SAVE}"
        elif safetensors or start.startswith((ZIP, LEGACY)):
            what = f"is incomplete or damaged{said and f' ({said})'}. {AGAIN}"
        else:
            what = f"is of another format, compressed or damaged: it begins like no file of torch or safetensors. {SAVE}"
        raise InvalidData(f"{path} {what}", file=str(path)) from error


def _check_archive(path: Path) -> None:
    """Refuse a zip file of which bytes are missing or changed; torch compares no checksums."""
    if not zipfile.is_zipfile(path):
        raise InvalidData(f"{path} is incomplete: its end is missing. {AGAIN}", file=str(path))
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                raise InvalidData(f"{path} is a zip archive, but not one of torch.save. Give the weights file inside it", file=str(path))
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise InvalidData(f"{path} is compressed or overlaps itself, and torch.save writes no such archive. {SAVE}", file=str(path))
            unchecked = not any(entry.CRC for entry in archive.infolist())  # torch.serialization.set_crc32_options(False)
            wrong = None if unchecked else archive.testzip()
    except InvalidData:
        raise
    except Exception as error:  # likewise
        raise InvalidData(f"{path} is incomplete or damaged. {AGAIN}", file=str(path)) from error
    if wrong:
        raise InvalidData(f"{path} is damaged: the checksum of {some([wrong])} inside it is wrong. {AGAIN}", file=str(path))
