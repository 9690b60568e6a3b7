"""A site's own secret: it is mixed into the seed that the server sends, so that nobody else can repeat what the site draws."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from pathlib import Path

from fedloom.core.errors import DamagedRun
from fedloom.core.messages import Instruction
from fedloom.core.seeds import derive_seed
from fedloom.files import read_plain, write_file

SECRET = Path("state") / "secret"
BYTES = 32


def own_secret(folder: Path) -> str:
    """Made once, at the first start; a site that is killed and started again draws the same."""
    path = folder / SECRET
    if not path.exists():
        write_file(path, f"{secrets.token_hex(BYTES)}\n".encode())
    try:
        text = read_plain(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedRun(f"{path} cannot be read ({error})", path=str(path)) from error
    if not re.fullmatch(f"[0-9a-f]{{{2 * BYTES}}}", text):
        raise DamagedRun(
            f"{path} does not hold this site's secret. Restore it from a copy, or remove it: another one is made", path=str(path)
        )
    return text


def in_private(instruction: Instruction, secret: str) -> Instruction:
    """The instruction as the method's client half sees it: every draw of a participation follows from its seed."""
    return replace(instruction, seed=derive_seed(secret, instruction.seed))
