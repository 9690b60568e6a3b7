"""The live view: a bar on a terminal, plain lines on a stream; both say round, clients, accuracy and time left."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from fedloom.core.result import Ledger, LedgerEntry, RunResult
from fedloom.report.terminal import live
from fedloom.report.terminal.live import LiveView


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live.time, "monotonic", clock.monotonic)
    return clock


def entry(client: int, round: int = 0, accuracy: float | None = 0.5, final: bool = False) -> LedgerEntry:
    return LedgerEntry(f"client-{client}", round, final, 0, 0, (), {}, "", accuracy, accuracy, 0, 0, 0.0, 0.0)


RESULT = RunResult("fedavg", "toy", "digits", "clean", 0, 2, True, (), Ledger(), 1.0, {})


def play(view: LiveView, clock: Clock, done: int = 0, accuracies: Sequence[float | None] = (0.25, 0.75), rounds: int = 4) -> None:
    """A round takes ten seconds."""
    with view:
        view.begin(rounds, 3, done)
        for round in range(done, rounds):
            entries = [entry(client, round, accuracy) for client, accuracy in enumerate(accuracies)]
            for one in entries:
                clock.now += 10 / len(entries)
                view.participation(one)
            view.round_done(round + 1, entries)
        for client in range(3):
            clock.now += 5
            view.participation(entry(client, rounds, 0.9, final=True))
        view.end(RESULT)


def on_stream(clock: Clock, done: int = 0, accuracies: Sequence[float | None] = (0.25, 0.75)) -> list[str]:
    stream = io.StringIO()
    play(LiveView(Console(file=stream, width=40)), clock, done, accuracies)
    return stream.getvalue().splitlines()


def test_plain_lines(clock: Clock) -> None:
    assert on_stream(clock) == [
        "round 1/4: 2 clients, accuracy 50.0%, about 30 s of rounds left",
        "round 2/4: 2 clients, accuracy 50.0%, about 20 s of rounds left",
        "round 3/4: 2 clients, accuracy 50.0%, about 10 s of rounds left",
        "round 4/4: 2 clients, accuracy 50.0%",
        "personal model 1 (client-0) 90.0%, about 10 s left",
        "personal model 2 (client-1) 90.0%, about 5 s left",
        "personal model 3 (client-2) 90.0%",
    ]


def test_the_time_left_follows_the_last_rounds(clock: Clock) -> None:
    """Rounds that search take ten times as long as those before; a mean of all would promise 60 s."""
    stream = io.StringIO()
    with LiveView(Console(file=stream, width=80)) as view:
        view.begin(16, 3, 0)
        for round in range(1, 13):
            clock.now += 3 if round <= 7 else 30
            view.round_done(round, [entry(0)])
    assert stream.getvalue().splitlines()[-1].endswith("about 120 s of rounds left")


def test_a_long_round_and_a_long_personal_model_are_not_silent(clock: Clock) -> None:
    stream = io.StringIO()
    with LiveView(Console(file=stream, width=80)) as view:
        clock.now += 10
        view.break_silence()
        view.begin(2, 3, 0)
        view.stage("client-1", "train")
        clock.now += 9
        view.break_silence()
        clock.now += 2
        view.break_silence()  # too soon
        view.participation(entry(1))
        view.round_done(1, [entry(1)])
        view.stage("client-0", "search")
        clock.now += 9
        view.break_silence()
        view.participation(entry(1))
        clock.now += 9
        view.break_silence()
        view.round_done(2, [entry(0)])
        view.participation(entry(0, 2, 0.9, final=True))
        view.stage("client-2", "finetune")
        clock.now += 8
        view.break_silence()
    assert [line for line in stream.getvalue().splitlines() if not line.startswith(("round", "personal model 1"))] == [
        "reading images, preparing the run",
        "in round 1/2, 0 clients have answered, client-1: train for 9 s",
        "in round 2/2, 0 clients have answered, client-0: search for 9 s, about 2 s of rounds left",
        "in round 2/2, 1 client has answered, client-0: search for 18 s",
        "personal models: 1 of 3, client-2: finetune for 8 s",
    ]


def test_silence_is_broken_while_the_run_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LONGEST_SILENCE", 0.5)
    stream = io.StringIO()
    with LiveView(Console(file=stream, width=80)) as view:
        view.begin(1, 1, 0)
        time.sleep(1.3)
    assert stream.getvalue().startswith("in round 1/1, 0 clients have answered")


def test_a_resumed_run_says_so_and_judges_the_time_left_by_its_own_rounds(clock: Clock) -> None:
    lines = on_stream(clock, done=2)
    assert lines[0] == "going on after round 2 of 4"
    assert lines[1] == "round 3/4: 2 clients, accuracy 50.0%, about 10 s of rounds left"


def test_an_unknown_accuracy_is_left_out(clock: Clock) -> None:
    assert on_stream(clock, accuracies=(None, None))[0] == "round 1/4: 2 clients, about 30 s of rounds left"
    assert on_stream(clock, accuracies=(None, 0.5))[0] == "round 1/4: 2 clients, accuracy 50.0%, about 30 s of rounds left"


def test_quick_rounds_do_not_flood_a_stream(clock: Clock) -> None:
    """A line at most every two seconds, and always the last round's."""
    stream = io.StringIO()
    view = LiveView(Console(file=stream, width=80))
    with view:
        view.begin(1000, 3, 0)
        for round in range(1, 1001):
            clock.now += 0.011
            view.round_done(round, [entry(0)])
    lines = stream.getvalue().splitlines()
    assert 5 <= len(lines) <= 7 and lines[-1].startswith("round 1000/1000")
    assert len(set(lines)) == len(lines)


def test_every_personal_model_has_its_line(clock: Clock) -> None:
    """However quickly they come: a log without one of them looks as if that client had failed."""
    stream = io.StringIO()
    with LiveView(Console(file=stream, width=80)) as view:
        view.begin(1, 50, 1)
        for client in range(50):
            clock.now += 0.01
            view.participation(entry(client, 1, 0.9, final=True))
    assert [line for line in stream.getvalue().splitlines() if line.startswith("personal model")] == [
        f"personal model {client + 1} (client-{client}) 90.0%" for client in range(50)
    ]


def test_who_was_too_late_is_counted(clock: Clock) -> None:
    stream = io.StringIO()
    with LiveView(Console(file=stream, width=80)) as view:
        view.begin(1, 3, 0)
        view.round_done(1, [entry(0), replace(entry(1), late=True), replace(entry(2), late=True)])
    assert stream.getvalue().startswith("round 1/1: 3 clients, 2 of them too late, accuracy 50.0%")


def test_no_line_is_lost_on_a_stream_that_is_closed_early(clock: Clock) -> None:
    """An error in the middle ends the view and goes on to whoever handles it."""
    stream = io.StringIO()
    view = LiveView(Console(file=stream, width=80))
    with pytest.raises(ZeroDivisionError), view:
        view.begin(4, 3, 0)
        clock.now += 10
        view.round_done(1, [entry(0)])
        raise ZeroDivisionError
    assert stream.getvalue().startswith("round 1/4: 1 client, accuracy 50.0%")


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_shows_bars(clock: Clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=140, legacy_windows=False)
    play(LiveView(console), clock)
    text = visible(stream.getvalue())
    assert "\x1b" in stream.getvalue() and "of rounds left" not in text  # a bar, no plain lines
    last = text.split("\r")[-1] if "\r" in text else text
    assert "rounds" in last and "personal models" in last
    assert "4/4" in text and "3/3" in text and "2 clients, accuracy 50.0%" in text and "client-2 90.0%" in text
    assert re.search(r"\d:\d\d:\d\d", text)  # time passed, time left


def test_a_terminal_shows_the_rounds_that_were_done_before(clock: Clock) -> None:
    stream = io.StringIO()
    view = LiveView(Console(file=stream, force_terminal=True, width=140, legacy_windows=False))
    with view:
        view.begin(4, 3, 3)
    text = visible(stream.getvalue())
    assert "3/4" in text and "0/3" in text


def test_a_method_without_rounds_fills_their_bar_at_its_end(clock: Clock) -> None:
    """Local training has only the final participation."""
    stream = io.StringIO()
    view = LiveView(Console(file=stream, force_terminal=True, width=140, legacy_windows=False))
    with view:
        view.begin(4, 1, 0)
        view.participation(entry(0, 0, 0.9, final=True))
        view.end(RESULT)
    text = visible(stream.getvalue())
    assert "4/4" in text and "1/1" in text and "client-0 90.0%" in text


def test_a_terminal_shows_who_is_at_work_and_where_the_time_goes(clock: Clock) -> None:
    stream = io.StringIO()
    view = LiveView(Console(file=stream, force_terminal=True, width=140, legacy_windows=False))
    with view:
        view.begin(4, 3, 0)
        view.stage("client-0", "train")
        clock.now += 7
        text = drawn(view)
        assert "at work" in text and "client-0: train, 7 s" in text and "rounds end" not in text
        for round, accuracy in enumerate((0.25, 0.5)):
            done = replace(entry(0, round, accuracy), seconds={"train": 6.0, "score": 2.0})
            view.participation(done)
            view.round_done(round + 1, [done])
        text = drawn(view)
        assert "at work" not in text and "▁█  25.0% -> 50.0%" in text
        assert "train 12.0 s" in text and "score 4.0 s" in text and text.index("train 12.0") < text.index("score 4.0")
        assert "rounds end" in text
        for number in range(12):
            view.stage(f"client-{number}", "score")
        assert "and 4 more" in drawn(view)


def drawn(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(view._dashboard())
    return console.file.getvalue()  # type: ignore[attr-defined]
