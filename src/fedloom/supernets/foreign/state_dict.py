"""Checkpoints that others wrote, read safely: a state dict in .pth or .safetensors. Nothing in a file is executed."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.errors import InvalidData, one_line

NAMED = 3  # keys that a refusal names
NESTS = ("state_dict", "model")  # where training scripts put the state dict inside a checkpoint
DEEP = 3  # and how deep
SAVE = "Save the state dict alone: torch.save(network.state_dict(), FILE)"
# Settings that public training scripts save beside the tensors: read as dictionaries, and nobody looks at them. torch refuses
# every other class before one is made.
PASSENGERS: list[Any] = [(OrderedDict, "argparse.Namespace"), (OrderedDict, "yacs.config.CfgNode")]


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if not start:
            raise InvalidData(f"{path} is empty. Copy or download it again", file=str(path))
        if start[8:] == b"{":
            content: Any = load_file(path)
        else:
            with torch.serialization.safe_globals(PASSENGERS), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about versions of pickle; what cannot be read is refused below
                content = torch.load(path, map_location="cpu", weights_only=True)
    except InvalidData:
        raise
    except OSError as error:
        raise InvalidData(f"{path} cannot be read: {error.strerror or one_line(error)}", file=str(path)) from error
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        asked = f"asks for {found[1]}, and making one could run code" if found else "is damaged or no weights file"
        raise InvalidData(f"{path} {asked}. {SAVE}", file=str(path)) from error
    except Exception as error:  # damaged bytes can raise anything
        said = f": {one_line(error, 80)}" if isinstance(error, RuntimeError | SafetensorError) else ""  # others are no sentences
        raise InvalidData(f"{path} is damaged or no weights file{said}. {SAVE}", file=str(path)) from error
    for _ in range(DEEP):
        if isinstance(content, dict):
            content = next((content[key] for key in NESTS if isinstance(content.get(key), dict)), content)
    entries = content.items() if isinstance(content, dict) else ()
    tensors = {key: value for key, value in entries if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        raise InvalidData(f"{path} holds no tensors by name: it is not the state dict of a network", file=str(path))
    if all(key.startswith("module.") for key in tensors):  # saved from nn.DataParallel
        tensors = {key.removeprefix("module."): value for key, value in tensors.items()}
    return tensors


def some(keys: Sequence[str], count: int = NAMED) -> str:
    return ", ".join(keys[:count]) + (f" and {len(keys) - count} more" if len(keys) > count else "")
