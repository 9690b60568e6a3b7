"""What can go wrong, one class and one exit code each.

A message is one sentence or two: what is wrong, where, and the cure. The facts behind it stay readable as attributes
of ``error.facts``, so that a program can react without parsing text.
"""

from __future__ import annotations

from unicodedata import category

ACTING = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")  # control, format and private characters, surrogates, line separators


class FedloomError(Exception):
    """Anything that Fedloom refuses to do; not a bug in Fedloom."""

    exit_code = 1

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts


class InvalidConfig(FedloomError):
    """A setting, preset, override or component name that cannot be used."""

    exit_code = 3


class InvalidArchitecture(FedloomError):
    """Choices that are not a member of their search space."""

    exit_code = 4


class InvalidData(FedloomError):
    """A data set, image, split, weights or model file that is missing, damaged or impossible."""

    exit_code = 5


class UndeclaredUpload(FedloomError):
    """A client tried to release a field its method does not declare."""

    exit_code = 6


class BadReport(FedloomError):
    """A report with wrong shapes, wrong names or numbers that are not finite."""

    exit_code = 7


class BadMessage(FedloomError):
    """Bytes from the network that are not a message of Fedloom, or not the expected one."""

    exit_code = 13


class ConnectionRefused(FedloomError):
    """A server that cannot be reached, is not the expected one, or does not accept this site."""

    exit_code = 14


class ClientFailed(FedloomError):
    """A client could not answer its instruction."""

    exit_code = 8


class DamagedRun(FedloomError):
    """A run folder whose files are missing, damaged or from another run."""

    exit_code = 9


class Interrupted(FedloomError):
    """Stopped by Ctrl-C (a run also by SIGTERM); what was computed is kept."""

    exit_code = 130


class UnusableFolder(FedloomError):
    """A run folder that cannot be written, or is in use by another process."""

    exit_code = 10


class UnusablePlugin(FedloomError):
    """A plugin (file or module) that is missing, cannot be imported or breaks the rules for names."""

    exit_code = 12


class UnusableFormat(FedloomError):
    """A file format that this installation cannot write or read, or that changes what a network computes."""

    exit_code = 11


def one_line(error: BaseException, limit: int = 160) -> str:
    """Another library's complaint, short enough for a sentence."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def visible(text: str) -> str:
    """What came from elsewhere, for a terminal: a character that would act on it, and not stand on it, is replaced. Lines stay lines."""
    acts = {character for character in text if character not in "\n\t" and category(character) in ACTING}
    return "".join("\N{REPLACEMENT CHARACTER}" if character in acts else character for character in text) if acts else text


def printable(text: str, limit: int = 500) -> str:
    """What came from elsewhere on one line of a log or terminal, which it cannot forge: no line ends, no control characters."""
    plain = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in " ".join(text.split()))
    return plain if len(plain) <= limit else f"{plain[:limit]}…"
