"""What a run does around its rounds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.engine.run import Watcher
from fedloom.methods.base import METHODS


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_there_before_the_rounds_is_not_collected_in_them(
    tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    kind: Any = METHODS["fedavg"].make
    answer, frozen = kind.answer, []

    def watched(*given: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        if fails:
            raise KeyboardInterrupt
        return answer(*given)

    monkeypatch.setattr(kind, "answer", watched)
    try:
        new_run(tiny("method=fedavg"), tmp_path / "run", nobody)
    except KeyboardInterrupt:
        assert fails
    assert min(frozen) > 10_000 and gc.get_freeze_count() == 0
