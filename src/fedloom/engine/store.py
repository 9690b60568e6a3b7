"""The run folder: what a run writes as it goes, and everything needed to go on after it was stopped.

    config.toml            resolved settings
    result.json            the result so far
    ledger.jsonl           one line per participation
    state/                 server.safetensors (method state after the last checkpoint), split.safetensors, lock,
                           memories.json (clients that have a memory, and since which round),
                           seconds.json (wall time so far),
                           weights.safetensors (what the run began with, if `weights` was set)
    clients/<name>/        memory-<round>.safetensors (private memory), model.safetensors (personal model)

Order of writes in a round: client memories, ledger lines, seconds, server state, result. A run killed between any two of them goes on from
the last server state; ledger lines and memories of later rounds are then dropped or written again. Seconds, server state and result may be
written in a thread beside the next round; its memories and ledger lines wait for them, so the order is the same.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from fedloom.core.client_site import ClientMemory, PersonalModel
from fedloom.core.errors import DamagedRun, UnusableFolder, one_line, printable
from fedloom.core.judgement import Judgement
from fedloom.core.messages import Arrays, frozen
from fedloom.core.method import State, is_per_client
from fedloom.core.privacy import READERS
from fedloom.core.reading import parse_json
from fedloom.core.result import SCHEMA, ClientResult, LedgerEntry, possible
from fedloom.files import (
    append_lines,
    open_plain,
    packed,
    patiently,
    read_arrays,
    read_plain,
    unwritable,
    without_waiting,
    write_arrays,
    write_file,
)

FEDERATION = "federation.json"  # in the folder of a real federation's server or site: which one it is
MEMORIES = "state/memories.json"
SECONDS = "state/seconds.json"
NAMED = 5  # clients that a message names; of more it says how many


@dataclass(frozen=True)
class Spent:
    """Wall time of a run so far; the remark says in words what is not in it, if anything was lost."""

    seconds: float = 0.0
    remark: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"{self.seconds} is no number of seconds")


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = 0  # the round a resume would start from
        self._remembers_since: dict[str, int] = {}  # client -> the round that left its first memory
        self._lock: IO[str] | None = None
        self._beside: Future[None] | None = None  # what a thread writes

    # -- the folder -------------------------------------------------------------
    def claim(self) -> None:
        """Make the folder and take its lock; the lock ends with the process, however that ends."""

        def opened() -> IO[str]:
            (self.folder / "state").mkdir(parents=True, exist_ok=True)
            return open(self.folder / "state" / "lock", "a", opener=without_waiting)  # held until the process ends

        try:
            lock = patiently(opened, self.folder)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UnusableFolder(f"{self.folder} is in use by another process; wait for it or choose another run.folder") from None
        self._lock = lock

    def release(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def beside(self, write: Callable[[], None]) -> None:
        """Write a checkpoint in a thread. Clients' memories and the ledger wait for it."""
        self.settle()
        executor = ThreadPoolExecutor(1)
        self._beside = executor.submit(copy_context().run, write)
        executor.shutdown(wait=False)

    def settle(self) -> None:
        """Wait for what is written beside; its error, if it has one, is raised here."""
        if self._beside is not None:
            wait([self._beside])  # whoever interrupts this may wait again
            written, self._beside = self._beside, None
            written.result()

    def write_text(self, name: str, text: str) -> None:
        write_file(self.folder / name, text.encode())

    def read_text(self, name: str) -> str:
        try:
            return read_plain(self.folder / name).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise DamagedRun(f"{self.folder / name} cannot be read ({error}); {self.folder} is not a whole run folder") from error

    # -- server state --------------------------------------------------------------
    def save_state(self, state: Any, round: int) -> None:
        if self._remembers_since:
            self.write_text(MEMORIES, json.dumps(self._remembers_since, sort_keys=True))
        write_arrays(self.folder / "state" / "server.safetensors", *pack_state(state, round))
        self.checkpoint = round

    def load_state(self, template: State) -> State | None:
        """The saved state, of the same type as ``template``; nothing if the run had not come to its first checkpoint."""
        path = self.folder / "state" / "server.safetensors"
        if not path.exists():
            return None
        state, self.checkpoint = read_state(path, template)
        if (self.folder / MEMORIES).exists():
            try:
                self._remembers_since = {str(client): int(since) for client, since in parse_json(self.read_text(MEMORIES)).items()}
            except (ValueError, TypeError, AttributeError, OverflowError) as error:
                raise DamagedRun(f"{self.folder / MEMORIES} is damaged ({error}). Restore it from a copy") from error
        return state

    def save_spent(self, spent: Spent) -> None:
        """result.json says it too, but may be lost: a resume writes that again from all the rest."""
        self.write_text(SECONDS, json.dumps(asdict(spent)))

    def load_spent(self) -> Spent | None:
        """Nothing if it is missing, as in runs of earlier versions, or damaged: result.json may still say it."""
        try:
            kept = parse_json(self.read_text(SECONDS))
            return Spent(float(kept["seconds"]), str(kept["remark"]))
        except (DamagedRun, ValueError, KeyError, TypeError, OverflowError):
            return None

    def save_split(self, arrays: Arrays, facts: dict[str, Any]) -> None:
        write_arrays(self.folder / "state" / "split.safetensors", arrays, facts)

    def load_split(self) -> tuple[Arrays, dict[str, Any]] | None:
        path = self.folder / "state" / "split.safetensors"
        return read_arrays(path) if path.exists() else None

    # -- ledger ------------------------------------------------------------------------
    def append(self, entries: list[LedgerEntry]) -> None:
        self.settle()
        append_lines(self.folder / "ledger.jsonl", [entry.to_json() for entry in entries])

    def read_ledger(self) -> Iterator[LedgerEntry]:
        """All entries; a torn last line is passed over."""
        path = self.folder / "ledger.jsonl"
        if not path.exists():
            return
        try:
            file = open_plain(path)
        except OSError as error:
            raise DamagedRun(f"{path} cannot be read ({error.strerror})", path=str(path)) from error
        with file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield LedgerEntry.from_json(line.decode())
                except (ValueError, TypeError, KeyError) as error:
                    raise DamagedRun(f"{path}, line {number} is damaged ({one_line(error)}). Restore it from a copy") from error

    def check_whole(self, over: bool) -> None:
        """A run that has begun has a ledger, without which nobody could say what left the clients, and its server's state, which is written
        before the first participation: without it the run would begin again and drop every line of the ledger."""
        needed = (self.folder / "ledger.jsonl", self.folder / "state" / "server.safetensors")
        lost = next((path for path in needed if not path.exists()), None)
        if lost and (over or self.checkpoint > 0 or next(self.read_ledger(), None)):
            raise DamagedRun(f"{lost} is missing; the run folder is incomplete. Restore it from a copy", path=str(lost))

    def rewind_ledger(self, rounds_over: bool) -> None:
        """Drop what was written after the last checkpoint: those rounds will be run again."""
        kept = [e.to_json() for e in self.read_ledger() if (e.final and rounds_over) or (not e.final and e.round < self.checkpoint)]
        write_file(self.folder / "ledger.jsonl", "".join(f"{line}\n" for line in kept).encode())

    # -- clients (each client's own disk, in a simulation) ----------------------------
    def client_folder(self, client: str) -> Path:
        return self.folder / "clients" / client

    def load_memory(self, client: str, round: int) -> ClientMemory:
        """The memory a client had before this round, even if it answered the round already and is asked again."""
        known = self.memories(client)
        earlier = [number for number in known if number < round]
        if not earlier and self._remembers_since.get(client, round) < round:
            path = self.client_folder(client)
            raise DamagedRun(f"{path} has lost the client's memory; without it the run would become another. Restore it from a copy")
        if not earlier:
            return ClientMemory()
        arrays, facts = read_arrays(known[max(earlier)])
        return ClientMemory(arrays, facts)

    def packed_memory(self, client: str, memory: ClientMemory) -> bytes:
        """What its file will hold; empty if the client has nothing to remember and never had."""
        return packed(memory.arrays, memory.facts) if memory.arrays or memory.facts or self.memories(client) else b""

    def save_memory(self, client: str, round: int, memory: ClientMemory) -> None:
        self.settle()  # what may be removed depends on the checkpoint
        if data := self.packed_memory(client, memory):
            self.write_memory(client, round, data)

    def write_memory(self, client: str, round: int, data: bytes) -> None:
        """Keep this round's memory, and of the earlier ones those that a resume from the last checkpoint would need."""
        write_file(self.client_folder(client) / f"memory-{round}.safetensors", data)
        self._remembers_since.setdefault(client, round)
        before = {number: path for number, path in self.memories(client).items() if number < self.checkpoint}
        for number, path in before.items():
            if number != max(before):
                path.unlink()

    def memories(self, client: str) -> dict[int, Path]:
        """round -> the memory that it left behind, of those that are kept"""
        folder = self.client_folder(client)
        names = os.listdir(folder) if folder.exists() else []
        found = [re.fullmatch(r"memory-(\d+)\.safetensors", name) for name in names]  # copies have other names
        return {int(one[1]): folder / one[0] for one in found if one}

    def rewind_memories(self) -> None:
        """Drop those that were left after the last checkpoint, by a final participation for example: rounds go on without them."""
        for client in os.listdir(self.folder / "clients") if (self.folder / "clients").is_dir() else ():
            for number, path in self.memories(client).items():
                if number >= self.checkpoint:
                    path.unlink()

    def model_path(self, client: str) -> Path:
        return self.client_folder(client) / "model.safetensors"

    def save_model(self, client: str, model: PersonalModel, description: dict[str, Any]) -> None:
        write_arrays(self.model_path(client), model.arrays, {**description, "architecture": model.architecture})

    def missing_models(self, clients: Iterable[str]) -> str:
        """Which of these clients' personal models have no file any more, and the cure, in words; empty if all are there."""
        lost = [printable(client, 40) for client in clients if not os.path.isfile(self.model_path(client))]
        if not lost:
            return ""
        many = len(lost) > 1
        names = ", ".join(lost[:NAMED]) + ", …" * (len(lost) > NAMED)
        what = f"{len(lost)} personal model{'s are' if many else ' is'} missing in {self.folder}/clients/ ({names})"
        again = f"`fedloom run {self.folder}/config.toml run.folder=ANOTHER`"
        return f"{what}. Restore {'them' if many else 'it'} from a copy, or repeat the run in another folder: {again}"


def pack_state(state: Any, round: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Any frozen dataclass of numbers, text, arrays and named arrays: every field is saved, so nothing is forgotten."""
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for item in fields(state):
        value = getattr(state, item.name)
        if isinstance(value, dict):
            arrays |= {f"{item.name}/{name}": array for name, array in value.items()}
            if value or is_per_client(item):
                facts[item.name] = "named arrays"
        elif hasattr(value, "dtype"):
            arrays[item.name] = value
        else:
            facts[item.name] = value
    return arrays, {"state": type(state).__name__, "round": round, "fields": facts}


def read_state(path: Path, template: State) -> tuple[State, int]:
    """The state in a file, of the same type as ``template``, and its round."""
    arrays, facts = read_arrays(path)
    try:
        if facts["state"] != type(template).__name__:
            raise ValueError(f"it holds a {facts['state']}, not a {type(template).__name__}")
        values = {item.name: _restored(item, getattr(template, item.name), arrays, facts) for item in fields(template)}
        return type(template)(**values), int(facts["round"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedRun(f"{path} does not hold the state of this run's method and settings: {error}", path=str(path)) from error


def _restored(item: Field[Any], model: Any, arrays: dict[str, Any], facts: dict[str, Any]) -> Any:
    """One field of a state, of the kind, names and shapes that ``model`` has."""
    name = item.name
    if isinstance(model, dict):  # in the model's order: the file's is its own
        saved = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
        if not model or is_per_client(item):  # filled in later rounds
            return frozen(saved)
        named = {key: saved[key] for key in model}
        more = sorted(set(saved) - set(model))
        if more:
            raise ValueError(f"it holds {more[0]}, which is not part of it")
        odd = [key for key in model if named[key].shape != model[key].shape]
        if odd:
            raise ValueError(f"{odd[0]} has shape {named[odd[0]].shape}, not {model[odd[0]].shape}")
        return frozen(named)
    if hasattr(model, "dtype"):
        return frozen({name: arrays[name]})[name]
    value = facts["fields"][name]
    return tuple(value) if isinstance(model, tuple) else value


# -- folders of real federations -----------------------------------------------------
def of_federation(folder: Path) -> bool:
    """Whether the folder is that of a real federation's server or site."""
    return (folder / FEDERATION).exists()


def not_a_run(folder: Path) -> str:
    """Why a folder without config.toml is none of a run."""
    return f"{folder} is not a run folder: it {'has no config.toml' if folder.exists() else 'does not exist'}"


def how_to_go_on(folder: Path) -> str:
    """The command that goes on with what is in a folder."""
    if not of_federation(folder):
        return f"fedloom resume {folder}"
    return "fedloom serve FEDERATION.toml" if (folder / "state" / "server.safetensors").exists() else "fedloom site SITE.toml"


# -- result.json, as it was written ------------------------------------------------
KINDS: dict[str, type] = {  # of what result.json must have
    **dict.fromkeys(("method", "space", "dataset", "protocol"), str),
    **dict.fromkeys(("seed", "rounds"), int),
    **dict.fromkeys(("cost", "environment", "accuracy"), dict),
    **dict.fromkeys(("clients", "uploads"), list),
    "finished": bool,
}


def read_result(folder: Path) -> dict[str, Any]:
    """result.json; empty if the run has not come to its first checkpoint."""
    path = folder / "result.json"
    if not path.exists():
        return {}
    try:
        result = parse_json(read_plain(path))
        if result["schema"] != SCHEMA:
            raise ValueError(f"its schema is {result['schema']!r}, not {SCHEMA!r}")
        for key, kind in KINDS.items():
            if not isinstance(result[key], kind):
                raise ValueError(f"{key} is {printable(str(result[key]), 40)!r}")
        for key in ("uploads", "one_class"):
            if odd := [name for name in result.get(key, ()) if not isinstance(name, str)]:
                raise ValueError(f"{key} holds {printable(str(odd[0]), 40)!r}")
        for row in result["clients"]:
            client_result(row)
        cost = {**result["cost"], **{f"stages.{stage}": seconds for stage, seconds in result["cost"]["stages"].items()}}
        for key in ("seconds", "bytes_up", "bytes_down", *(name for name in cost if name.startswith("stages."))):
            if type(cost[key]) not in (int, float) or not (possible(cost[key]) or key.startswith("bytes")):
                raise ValueError(f"cost.{key} is {printable(str(cost[key]), 40)!r}")
        _check_privacy(result.get("privacy"))
        if odd := [row for row in result.get("judged", {}).get("classes", ()) if not isinstance(row["name"], str)]:
            raise ValueError(f"judged.classes holds {printable(str(odd[0]), 40)!r}")
        return dict(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else printable(str(error), 160)
        raise DamagedRun(f"{path} is damaged ({what}). `{how_to_go_on(folder)}` writes it again", path=str(path)) from error


def _check_privacy(said: Any) -> None:
    """Absent without noise; else numbers."""
    if said is None:
        return
    named = {name: said[name] for name in ("clip", "noise", "delta")} | {f"epsilon.{who}": said["epsilon"][who] for who in READERS}
    if odd := [name for name, value in named.items() if type(value) not in (int, float) or not possible(value)]:
        raise ValueError(f"privacy.{odd[0]} is {printable(str(named[odd[0]]), 40)!r}")


def client_result(row: Any) -> ClientResult:
    """Raises KeyError, TypeError or ValueError for what is no client's line."""
    kinds: dict[str, Any] = {"str": str, "float": (int, float), "int": int}
    named = [item for item in fields(ClientResult) if item.name != "judged"]
    for item in named:
        if not isinstance(row[item.name], kinds[str(item.type)]) or isinstance(row[item.name], bool):
            raise ValueError(f"{item.name} of a client is {printable(str(row[item.name]), 40)!r}")
        if isinstance(row[item.name], float) and not math.isfinite(row[item.name]):
            raise ValueError(f"{item.name} of a client is not finite")
    judged = None if row.get("judged") is None else Judgement.of(row["judged"])  # earlier versions have none
    return ClientResult(**{item.name: row[item.name] for item in named}, judged=judged)
