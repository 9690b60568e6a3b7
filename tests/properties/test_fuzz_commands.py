"""A thousand damaged files and three hundred malformed settings at the commands: a documented exit code, no traceback, no hang, no flood
of memory. Every command runs in a process of its own, with limits of time and memory."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedloom.core import errors
from fedloom.engine.run import Watcher
from fedloom.models.export import FORMATS
from fedloom.models.personal import load_model
from support.checks import shrinking
from support.federation import PROCESSES, SITES, write_digits
from support.fuzz import Kind, damaged, kinds, settings_texts

FILES, SETTINGS = 1000, 300
FIVE_MINUTES = 300  # seconds
SECONDS = 60  # for one command
MEMORY = 2 << 30  # bytes that a command may take beyond what the process has when it begins
DOCUMENTED = {0, 2, *(kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FedloomError))}
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {  # kind of file -> the commands that read it
    "settings of a run": (("show", "run"), ("report", "run"), ("resume", "run")),
    "result": (("show", "run"), ("report", "run"), ("resume", "run")),
    "ledger": (("show", "run"), ("show", "run", "--client", "client-000"), ("report", "run"), ("analyse", "costs", "run")),
    "seconds": (("resume", "run"),),
    "server state": (("resume", "run"),),
    "split": (("resume", "run"), ("report", "run")),
    "list of memories": (("resume", "run"),),
    "memory of a client": (("resume", "run"),),
    "personal model": (("export", "run", "--client", "client-000"), ("draw", "run", "--client", "client-000")),
    "model file": (("predict", "model.safetensors", "good.png"),),
    "torch program": (("predict", "model.pt2", "good.png"),),
    "ONNX": (("predict", "model.onnx", "good.png"),),
    "weights": (("export", "some.safetensors", "--architecture", "smallest"),),
    "generator": (("generate", "mobilenetv3", "--file", "generator.safetensors", "--count", "1"),),
    "checkpoint": (("import-weights", "mobilenetv3", "checkpoint.pth"),),
    "checkpoint of old torch": (("import-weights", "mobilenetv3", "old.pth"),),
    "checkpoint in safetensors": (("import-weights", "mobilenetv3", "checkpoint.safetensors"),),
    "agreement": (("site", "north.toml"),),
    "settings of a site": (("site", "north.toml"),),
    "authority": (("site", "north.toml"),),
    "key of a site": (("site", "north.toml"),),
    **{f"image, {kind.upper()}": (("predict", "good.safetensors", f"image.{kind}"),) for kind in ("png", "jpeg", "webp", "tiff", "gif")},
}


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: a signal), what it said on stderr, and its seconds."""

    code: int
    said: str
    seconds: float


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def command(folder: Path, log: Path, arguments: Sequence[str]) -> None:
    """In a process of its own, which began with everything imported."""
    limit_memory()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(out, 2)
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["fedloom", *arguments]
    from fedloom.__main__ import main

    main()


def run(folder: Path, log: Path, arguments: Sequence[str]) -> Ended:
    began = time.monotonic()
    process = PROCESSES.Process(target=command, args=(folder, log, arguments))
    process.start()
    process.join(SECONDS)
    if hung := process.is_alive():
        process.kill()
        process.join()
    code = int(process.exitcode or 0)
    return Ended(-99 if hung else code, log.read_text(errors="replace"), time.monotonic() - began)


def problem(ended: Ended) -> str:
    """What is wrong with how a command ended; nothing if it is as documented."""
    if ended.code == -99:
        return f"it hung for {SECONDS} s"
    if ended.code not in DOCUMENTED:
        return f"exit code {ended.code}: {ended.said[-300:]}"
    return f"a traceback: {ended.said[-300:]}" if "Traceback" in ended.said else ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def files(place: Path, nobody: Watcher) -> dict[str, Kind]:
    pytest.importorskip("flwr")
    found = kinds(place, nobody)
    write_digits(place / "images", SITES)
    model = place / "run" / "clients" / "client-000" / "model.safetensors"
    shutil.copy(model, place / "good.safetensors")
    (place / "good.png").write_bytes(found["image, PNG"].good)
    if all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        FORMATS["onnx"][1](place / "model.onnx", *load_model(model))
        found["ONNX"] = Kind((place / "model.onnx").read_bytes(), lambda path: None, "model.onnx")
    for kind in found.values():
        (place / kind.path).write_bytes(kind.good)
    return found


@contextmanager
def made_bad(place: Path, kind: Kind, draw: random.Random) -> Iterator[None]:
    """A bad file in the place of a good one; afterwards the whole run folder is as it was, as a resume may have changed it."""
    saved = place / "saved"
    if kind.path.startswith("run/"):
        shutil.copytree(place / "run", saved)
    (place / kind.path).write_bytes(kind.bad(draw))
    try:
        yield
    finally:
        (place / kind.path).write_bytes(kind.good)
        if saved.exists():
            shutil.rmtree(place / "run")
            saved.rename(place / "run")
        shutil.rmtree(place / "at-north", ignore_errors=True)


def check(count: int, of: str, tried: Callable[[random.Random], tuple[str, Ended]]) -> None:
    codes: Counter[int] = Counter()
    problems: list[str] = []
    began, slowest = time.monotonic(), 0.0
    for number in range(count):
        what, ended = tried(random.Random(f"{of} {number}"))
        codes[ended.code] += 1
        slowest = max(slowest, ended.seconds)
        if wrong := problem(ended):
            problems.append(f"{number} ({what}): {wrong}")
    shown = ", ".join(f"{code}: {times}" for code, times in sorted(codes.items()))
    print(f"{count} {of}: exit codes {shown}; {len(problems)} problems; {time.monotonic() - began:.0f} s, slowest {slowest:.1f} s")
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_damaged_files(files: dict[str, Kind], place: Path) -> None:
    names = sorted(set(COMMANDS) & set(files))
    tiny = [change for change in shrinking() if change.startswith("mobilenetv3.")]

    def tried(draw: random.Random) -> tuple[str, Ended]:
        name = draw.choice(names)
        arguments = draw.choice(COMMANDS[name])
        with made_bad(place, files[name], draw):
            return f"{name}, {arguments[0]}", run(place, place / "log", [*arguments, *(tiny if arguments[0] == "import-weights" else ())])

    check(FILES, "damaged files", tried)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hundred_malformed_settings(files: dict[str, Kind], place: Path) -> None:
    def tried(draw: random.Random) -> tuple[str, Ended]:
        text = settings_texts(draw).replace("\x00", "\x01")  # which no argument can hold
        if draw.random() < 0.5:
            source = place / "bad.toml"
            source.write_bytes(damaged((place / "tiny.toml").read_bytes(), draw))
            arguments = ["run", str(source), "rounds=1"]
        else:
            arguments = ["run", str(place / "tiny.toml"), "rounds=1", text.encode(errors="replace").decode()]
        try:
            return str(arguments)[:200], run(place, place / "log", [*arguments, "run.folder=made"])
        finally:
            shutil.rmtree(place / "made", ignore_errors=True)

    check(SETTINGS, "malformed settings", tried)


def read_for(place: Path, seconds: float, log: Path) -> None:
    """Every reader in turn, in this process, for so many seconds; what went wrong is written down."""
    silent = SimpleNamespace(**dict.fromkeys(("begin", "stage", "participation", "round_done", "end"), lambda *facts, **named: None))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Pillow's, about images
    found = kinds(place, silent)
    limit_memory()
    count, problems, slowest, until = Counter[str](), [], 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        for name, kind in found.items():
            number, began = count.total(), time.monotonic()
            (place / kind.path).write_bytes(kind.bad(random.Random(f"readers {number}")))
            count[name] += 1
            try:
                kind.read(place / kind.path)
            except errors.FedloomError:
                pass
            except Exception as error:
                problems.append(f"{number} ({name}): {error!r}"[:500])
            (place / kind.path).write_bytes(kind.good)
            slowest = max(slowest, time.monotonic() - began)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    summary = f"{count.total()} files of {len(count)} kinds; {len(problems)} problems; slowest {slowest:.1f} s, most memory {grown} MB"
    log.write_text("\n".join([summary, *problems]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_minutes_of_the_readers_themselves(tmp_path: Path) -> None:
    """In a process of its own, with a limit of memory: many more files than there can be commands."""
    pytest.importorskip("flwr")
    log = tmp_path / "log"
    process = PROCESSES.Process(target=read_for, args=(tmp_path, FIVE_MINUTES, log))
    process.start()
    process.join(FIVE_MINUTES + 300)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, process.exitcode
    print(log.read_text())
    assert " 0 problems;" in log.read_text(), log.read_text()
