"""A site goes on from its own memory of the very moment its log ends with, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.core.errors import BadMessage, DamagedRun, InvalidConfig
from fedloom.core.messages import FINISH
from fedloom.federation.agreement import keep_to
from fedloom.federation.site.rounds import _answer, join
from fedloom.federation.wire.messages import to_bytes
from fedloom.files import write_arrays
from support.checks import Fedloom, check_refused, everything, flip_last_byte
from support.federation import lines
from support.kills import disk
from support.site import Line, Place, at, write_agreement, write_site

CURE = "Restore the whole folder from one copy of its latest moment, or start anew with another `folder` in SITE.toml"


def memory(folder: Path, round: int, site: str = "north") -> Path:
    return folder / "clients" / site / f"memory-{round}.safetensors"


def cut(path: Path, count: int = 1) -> None:
    """Without its last lines."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-count]))


def without_newest(folder: Path) -> None:
    """As if folder had been moved by itself."""
    folder.with_name(".north.newest.json").unlink()


def swapped(folder: Path) -> None:
    """The memory before the round that was answered last."""
    shutil.copy(memory(folder, 0), memory(folder, 1))


def unknown_memory(folder: Path) -> None:
    shutil.copy(memory(folder, 1), memory(folder, 2))


def truncated(folder: Path) -> None:
    memory(folder, 1).write_bytes(memory(folder, 1).read_bytes()[:-10])


def log_cut(folder: Path) -> None:
    cut(folder / "left.jsonl")


def log_and_ledger_cut(folder: Path) -> None:
    cut(folder / "left.jsonl", 2)
    cut(folder / "ledger.jsonl", 2)
    without_newest(folder)


def rewritten(folder: Path) -> None:
    """Somebody makes the first report smaller."""
    first = lines(folder / "left.jsonl")[0]["bytes"]
    text = (folder / "left.jsonl").read_text()
    (folder / "left.jsonl").write_text(text.replace(f'"bytes":{first}', '"bytes":1', 1))


def answer_of_nobody(folder: Path) -> None:
    flip_last_byte(folder / "state" / "answer.safetensors")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "memory lost": (lambda folder: shutil.rmtree(folder / "clients"), "it has no memory, and this site answered round 2 last"),
    "newest memory lost": (lambda folder: memory(folder, 1).unlink(), "it has a memory of round 1, and this site answered round 2 last"),
    "memory older": (swapped, "memory-1.safetensors is damaged or another's"),
    "memory newer": (unknown_memory, "it has a memory of round 3, and this site answered round 2 last"),
    "memory truncated": (truncated, "memory-1.safetensors is damaged or another's"),
    "log lost": (lambda folder: (folder / "left.jsonl").unlink(), "the folder was lost, or is an older copy"),
    "log cut": (log_cut, "the folder was lost, or is an older copy"),
    "log and ledger cut": (log_and_ledger_cut, "state/answer.safetensors and left.jsonl are not of the same moment"),
    "log rewritten": (rewritten, "line 2 does not follow from the lines before it"),
    "ledger lost": (lambda folder: (folder / "ledger.jsonl").unlink(), "left.jsonl has round 2, and ledger.jsonl has not"),
    "last answer lost": (lambda folder: (folder / "state/answer.safetensors").unlink(), "state/answer.safetensors is missing"),
    "last answer damaged": (answer_of_nobody, "state/answer.safetensors is damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused(answered: Place, fault: str) -> None:
    spoil, why = FAULTS[fault]
    spoil(answered.store.folder)
    before = everything(answered.store.folder)
    with pytest.raises(DamagedRun) as refusal:
        answered.restart()
    assert why in str(refusal.value) and CURE in str(refusal.value) and "\n" not in str(refusal.value)  # one line of a log
    assert everything(answered.store.folder) == before  # nothing is begun anew


def test_memory_is_checked_before_every_answer(answered: Place) -> None:
    swapped(answered.store.folder)
    with pytest.raises(DamagedRun, match=r"memory-1\.safetensors is damaged or another's"):
        answered.participant.answer(answered.data(2))


# -- of others ----------------------------------------------------------------------------------


def test_another_sites_folder_is_refused(answered: Place, agreed: Path, tmp_path: Path) -> None:
    """With its memory under the right name, so that only the log can tell."""
    other = tmp_path / "elsewhere"
    with at(agreed, other / "east", "east") as east:
        for round in (0, 1):
            east.participant.answer(east.data(round))
    shutil.rmtree(answered.store.folder)
    shutil.copytree(other / "east", answered.store.folder)
    (answered.store.folder / "clients" / "east").rename(answered.store.folder / "clients" / "north")
    with pytest.raises(DamagedRun, match=r"line 1 .* is of another site or federation"):
        answered.restart()


def test_another_sites_memory_is_refused(answered: Place, agreed: Path, tmp_path: Path) -> None:
    with at(agreed, tmp_path / "elsewhere" / "east", "east") as east:
        for round in (0, 1):
            east.participant.answer(east.data(round))
    shutil.copy(memory(tmp_path / "elsewhere" / "east", 1, "east"), memory(answered.store.folder, 1))
    with pytest.raises(DamagedRun, match=r"memory-1\.safetensors is damaged or another's"):
        answered.restart()


def test_another_federations_folder_is_refused(answered: Place, tmp_path: Path) -> None:
    agreed = write_agreement(tmp_path / "agreed")
    text = (agreed / "federation.toml").read_text()
    (agreed / "federation.toml").write_text(text.replace("seed = 5", "seed = 6"))
    answered.store.release()
    with pytest.raises(DamagedRun, match=r"line 1 .* is of another site or federation"), at(agreed, answered.store.folder):
        pass


def test_memory_that_nothing_is_known_of_is_refused(fresh: Place, after_two_rounds: Path) -> None:
    shutil.copytree(after_two_rounds / "north" / "clients", fresh.store.folder / "clients")
    with pytest.raises(DamagedRun, match=r"it has a memory, and neither ledger.jsonl nor left.jsonl says whose"):
        fresh.restart()


# -- older ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["an older copy", "lost"])
def test_a_folder_that_is_older_or_lost_is_noticed(answered: Place, after_two_rounds: Path, lost: bool) -> None:
    """Whole and in order in itself, but this site answered round 3 afterwards."""
    folder = answered.store.folder
    answered.participant.answer(answered.data(2))
    shutil.rmtree(folder)
    if not lost:
        shutil.copytree(after_two_rounds / "north", folder)
    with pytest.raises(DamagedRun, match=r"when this site answered round 3: the folder was lost, or is an older copy"):
        answered.restart()


def test_a_whole_copy_of_the_same_moment_is_good(answered: Place, after_two_rounds: Path, agreed: Path, tmp_path: Path) -> None:
    folder = answered.store.folder
    shutil.rmtree(folder)
    shutil.copytree(after_two_rounds / "north", folder)
    report = answered.report(answered.restart().answer(answered.data(2)), answered.data(2))
    assert [line["round"] for line in lines(folder / "left.jsonl")] == [0, 1, 2]
    with at(agreed, tmp_path / "undisturbed" / "north") as other:  # whose folder nobody has touched
        for round in range(3):
            last = other.participant.answer(other.data(round))
        assert to_bytes(other.report(last, other.data(2))) == to_bytes(report)
    assert everything(folder / "clients") == everything(tmp_path / "undisturbed" / "north" / "clients")


def test_the_statement_refuses_to_undercount(answered: Place) -> None:
    """Lines that were taken out while the site ran."""
    answered.participant.answer(answered.data(3, FINISH))
    log = answered.store.folder / "left.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DamagedRun, match="line 1 does not follow"):
        answered.participant.settle()


def test_an_older_note_of_what_was_begun_opens_no_round_again(answered: Place) -> None:
    begun = answered.store.folder / "state" / "begun.json"
    begun.write_text('{"round": 0, "instruction": ""}')
    other = to_bytes(replace(answered.instruction(1), seed=1), answered.agreement.digest)
    with pytest.raises(BadMessage, match="It is not the instruction that round 2 was begun with"):
        answered.restart().answer(other)


def test_a_site_that_took_part_is_no_newcomer(answered: Place, agreed: Path, tmp_path: Path) -> None:
    """Its ledger and memory would be written over, and its log would not know of it."""
    write_arrays(tmp_path / "newcomers.safetensors", {}, {"federation": answered.agreement.digest})
    before = everything(answered.store.folder)
    answered.store.release()
    settings = replace(answered.settings, federation=str(agreed / "federation.toml"), folder=str(tmp_path))
    with pytest.raises(InvalidConfig, match="holds rounds that this site took part in"):
        join(settings, tmp_path / "newcomers.safetensors", 1, answered.said.append)
    assert everything(answered.store.folder) == before


# -- kills ---------------------------------------------------------------------------------------


def test_a_kill_at_any_step_of_any_write_loses_nothing(answered: Place, agreed: Path, tmp_path: Path) -> None:
    """Started again and asked the same, the site sends the same report, and its memory, ledger and log are as if nothing had happened."""
    kept, left, asked = answered.store.folder.parent, [], answered.data(2)

    def copy(what: str, file: str) -> None:
        left.append((f"{what} {file}", tmp_path / f"killed-{len(left)}"))
        shutil.copytree(kept, left[-1][1])

    with disk(kept, copy):
        report = answered.report(answered.participant.answer(asked), asked)
    answers = sum("answer.safetensors" in step for step, _ in left)
    assert len(left) >= 15 and answers == 3, left
    for step, folder in left:
        with at(agreed, folder / "north") as place:
            again = place.report(place.participant.answer(asked), asked)
            assert {name: array.tobytes() for name, array in again.arrays["update"].items()} == {
                name: array.tobytes() for name, array in report.arrays["update"].items()
            }, step
            rounds = [line["round"] for line in lines(folder / "north" / "left.jsonl")]
            assert rounds in ([0, 1, 2], [0, 1, 2, 2]), step
            assert [line["round"] for line in lines(folder / "north" / "ledger.jsonl")] == [0, 1, 2], step
            for name, data in everything(kept / "north" / "clients").items():
                assert (folder / "north" / "clients" / name).read_bytes() == data, (step, name)
            place.restart()


# -- version 0.1.0 ---------------------------------------------------------------------------------


def as_of_0_1_0(folder: Path) -> None:
    """It kept no last answer, and its log had no chain."""
    without_newest(folder)
    for name in ("state/answer.safetensors", "state/begun.json"):
        (folder / name).unlink()
    known = ("at", "round", "action", "fields", "bytes", "sha256")
    old = [{key: line[key] for key in known} for line in lines(folder / "left.jsonl")]
    (folder / "left.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in old))


def test_a_folder_of_version_0_1_0_goes_on(answered: Place) -> None:
    """The chain begins with the next answer, and covers the lines before it."""
    folder = answered.store.folder
    as_of_0_1_0(folder)
    old = (folder / "left.jsonl").read_bytes()
    answered.restart().answer(answered.data(2))
    assert (folder / "left.jsonl").read_bytes().startswith(old) and lines(folder / "left.jsonl")[2]["before"]
    answered.restart()
    text = (folder / "left.jsonl").read_text()
    (folder / "left.jsonl").write_text(text.replace('"round":0', '"round":1', 1))
    with pytest.raises(DamagedRun, match="line 3 does not follow"):
        answered.restart()


def test_it_goes_on_where_version_0_1_0_was_killed(answered: Place) -> None:
    """Between ledger and log: the round is asked for again, as it was then. More than one line is not what a kill leaves."""
    folder = answered.store.folder
    as_of_0_1_0(folder)
    cut(folder / "left.jsonl")
    answered.restart().answer(answered.data(1))
    assert [line["round"] for line in lines(folder / "left.jsonl")] == [0, 1]
    as_of_0_1_0(folder)
    cut(folder / "left.jsonl", 2)
    with pytest.raises(DamagedRun, match=r"ledger.jsonl has round 2, and left.jsonl ends before it"):
        answered.restart()


# -- the command -----------------------------------------------------------------------------------


def test_a_site_with_truncated_memory_ends(answered: Place, agreed: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    """With the code of a damaged folder, which is not started again, and without a connection."""
    write_site(agreed, tmp_path)
    (tmp_path / "north.toml").write_text((tmp_path / "north.toml").read_text().replace("at-north", "."))
    keep_to(answered.agreement, answered.store.folder, False, "folder")
    truncated(answered.store.folder)
    answered.store.release()
    check_refused(fedloom_("site", "north.toml"), DamagedRun, "memory-1.safetensors is damaged or another's", CURE)


def test_memory_that_is_truncated_meanwhile_ends_the_site(answered: Place) -> None:
    """It tells the server that it cannot answer, once, and what is wrong nobody but its own operator."""
    truncated(answered.store.folder)
    line = Line([answered.data(2), answered.data(2)], [])
    with pytest.raises(DamagedRun):
        _answer(line, answered.participant, 0.01, answered.said.append)  # type: ignore[arg-type]
    assert line.replies == [(None, "DamagedRun; the site's own log says more")] and len(line.arriving) == 1
