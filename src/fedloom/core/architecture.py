"""An architecture is a value: a space's name and one choice per gene."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.core.errors import InvalidArchitecture


@dataclass(frozen=True, order=True)
class Architecture:
    """A frozen tuple of choices; its text id is identity, file form and wire form at once.

    >>> Architecture("toy", (2, 0, 1)).id
    'toy:2-0-1'
    >>> Architecture.parse("toy:2-0-1").choices
    (2, 0, 1)
    """

    space: str
    choices: tuple[int, ...]

    @property
    def id(self) -> str:
        return f"{self.space}:{'-'.join(map(str, self.choices))}"

    @classmethod
    def parse(cls, text: str) -> Architecture:
        space, colon, genes = text.partition(":")
        try:
            if not (space and colon):
                raise ValueError
            architecture = cls(space, tuple(int(gene) for gene in genes.split("-")))
            if architecture.id != text:  # one architecture, one text
                raise ValueError
            return architecture
        except ValueError:
            raise InvalidArchitecture(
                f"{text!r} is not an architecture: write SPACE:choice-choice-…, for example toy:2-0-1", text=text
            ) from None
