"""Good files of every kind that Fedloom reads, and what accident or malice could make of them."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save as save_tensors

from fedloom import config
from fedloom.analyses.pace import pace
from fedloom.assemble import new_run, reopen_run, saved_outline, saved_settings
from fedloom.assemble.simulation import so_far
from fedloom.core.messages import Instruction, Report
from fedloom.data.readers import decode, read_cifar100
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store, read_result
from fedloom.federation.agreement import ServerSettings, SiteSettings, read_agreement, read_site
from fedloom.federation.certificates import check_server, check_site, make_certificates
from fedloom.federation.wire.messages import from_bytes, to_bytes
from fedloom.federation.wire.signatures import private_key, public_key
from fedloom.files import packed, unpacked
from fedloom.generator.files import load_generator, shipped
from fedloom.models.foreign import import_weights
from fedloom.models.personal import load_model
from fedloom.models.predict import read_image, read_model
from fedloom.models.supernet_weights import take_network
from fedloom.report.neighbours import baselines_of
from fedloom.report.page.single import page
from fedloom.report.reading import open_run
from fedloom.report.terminal.show import client_view, run_view
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.foreign.state_dict import read_state
from fedloom.testing import tiny_file
from support import foreign
from support.federation import GOOD, SITE, SITES

ODD: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "\x1b[2J", "x" * 3000, [], {})
ODD += ([[]], {"a": 1}, [1] * 50, "../../x", "\ud800", -0.0, 1.5, "mobilenetv3", "mobilenetv3:0-0")
NUMBER = re.compile(rb"-?\d+(\.\d+)?")
MOST = 1 << 20  # bytes of a message


# -- what can become of a file ----------------------------------------------------------------------
def damaged(data: bytes, draw: random.Random) -> bytes:
    """One to three accidents: flips, cuts, repeats, swaps, lengths and numbers out of all proportion."""
    for _ in range(draw.randint(1, 3)):
        data = draw.choice(ACCIDENTS)(bytearray(data), draw)
    return data


def _flip(data: bytearray, draw: random.Random) -> bytes:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _cut(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randint(0, len(data))])


def _leave_out(data: bytearray, draw: random.Random) -> bytes:
    first, last = _part(data, draw)
    return bytes(data[:first] + data[last:])


def _repeat(data: bytearray, draw: random.Random) -> bytes:
    first, last = _part(data, draw)
    return bytes(data[:last] + data[first:last] * draw.choice((1, 2, 50)) + data[last:])


def _swap(data: bytearray, draw: random.Random) -> bytes:
    (a, b), (c, d) = sorted((_part(data, draw), _part(data, draw)))
    return bytes(data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]) if b <= c else bytes(data)


def _huge_length(data: bytearray, draw: random.Random) -> bytes:
    place = draw.choice((0, 0, draw.randint(0, max(0, len(data) - 8))))
    value = draw.choice((2**64 - 1, 2**63, 2**40, 2**32 - 1, 2**31, 100_000_001, len(data), 0))
    data[place : place + 8] = struct.pack("<Q", value)
    return bytes(data)


def _huge_number(data: bytearray, draw: random.Random) -> bytes:
    found = list(NUMBER.finditer(data[: 1 << 16]))
    if found:
        one = draw.choice(found)
        odd = (b"-1", b"0", b"9" * 25, b"1e999", b"NaN", b"null", b'"x"', b"[]", b"9" * 5000, b"[" * 3000)
        data[one.start() : one.end()] = draw.choice(odd)
    return bytes(data)


def _zeros(data: bytearray, draw: random.Random) -> bytes:
    first, last = _part(data, draw)
    data[first:last] = bytes(last - first)
    return bytes(data)


def _part(data: bytearray, draw: random.Random) -> tuple[int, int]:
    first = draw.randint(0, len(data))
    return first, min(len(data), first + draw.choice((1, 2, 8, 64, 1000)))


Accident = Callable[[bytearray, random.Random], bytes]
ACCIDENTS: tuple[Accident, ...] = (_flip, _cut, _leave_out, _repeat, _swap, _huge_length, _huge_number, _zeros)


def forged_table(table: Any, draw: random.Random) -> Any:
    """A copy with one value replaced, removed or added, anywhere in it."""
    table = json.loads(json.dumps(table))
    holder: Any = table
    while isinstance(holder, dict | list) and holder:
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
        inside = holder[key]
        if not (isinstance(inside, dict | list) and inside) or draw.random() < 0.3:
            if draw.random() < 0.2:
                del holder[key]
            else:
                holder[key] = draw.choice(ODD)
            return table
        holder = inside
    return draw.choice(ODD)


def forged_json(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(forged_table(json.loads(data), draw)).encode()


def forged_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = forged_json(lines[place], draw)
    return b"\n".join(lines) + b"\n"


def forged_packed(data: bytes, draw: random.Random) -> bytes:
    """A file that is whole, digest and all, and says something else."""
    arrays, facts = unpacked(data)
    name = draw.choice(sorted(arrays)) if arrays else ""
    which = draw.randrange(6) if arrays else 5
    if which == 0:
        del arrays[name]
    elif which == 1:
        arrays[name] = draw.choice((np.zeros(0, np.float32), np.full(3, np.nan, np.float32), np.ones((2, 2), np.int64), np.array(True)))
    elif which == 2:
        arrays[f"{name}x"] = arrays.pop(name)
    else:
        facts = forged_table(facts, draw)
    try:
        return packed(arrays, facts)
    except (TypeError, ValueError):  # facts that are no table
        return packed(arrays, {})


def forged_toml(data: bytes, draw: random.Random) -> bytes:
    lines = data.decode().splitlines()
    place = draw.randrange(len(lines))
    key = lines[place].partition("=")[0]
    numbers = ("-1", "0", "1e308", "nan", "inf", "9" * 30, "0x" + "f" * 6000, "1979-05-27")
    value = draw.choice((*numbers, "[]", "{}", "[[1]]", '"\\u001b[2J"', "true", "[" * 900))
    lines[place] = draw.choice((f"{key} = {value}", f"{key}.x = {value}", f"[{key.strip(' []')}]", f"{key * 40}", "", f"x{key} = {value}"))
    return "\n".join(lines).encode()


def forged_archive(data: bytes, draw: random.Random) -> bytes:
    """A zip archive that is whole, with one part of it changed."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(made, "w") as target:
        chosen = draw.choice(source.namelist())
        for name in source.namelist():
            content = source.read(name)
            if name == chosen:
                content = forged_json(content, draw) if name.endswith(".json") and draw.random() < 0.8 else damaged(content, draw)
            target.writestr(name, content)
    return made.getvalue()


# -- good files and what reads them -----------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """A kind of file: a good one, what could be made of it, and what reads it."""

    good: bytes
    read: Callable[[Path], object]
    path: str  # below the folder of the test
    forge: Callable[[bytes, random.Random], bytes] | None = None

    def bad(self, draw: random.Random) -> bytes:
        return self.forge(self.good, draw) if self.forge and draw.random() < 0.5 else damaged(self.good, draw)


def kinds(place: Path, nobody: Watcher, pages: bool = True) -> dict[str, Kind]:
    """Every kind of file, below ``place``. pages: also write the page of a run, with its figures, whenever one of its files is read."""
    return {**_of_runs(place, nobody, pages), **_of_networks(place), **_of_federations(place), **_of_images(place)}


def run_folder(place: Path, nobody: Watcher) -> Path:
    folder = place / "run"
    new_run(config.load(str(tiny_file(place)), ["method=perfedsde", "participants=3"]), folder, nobody)
    return folder


def _of_runs(place: Path, nobody: Watcher, pages: bool) -> dict[str, Kind]:
    folder = run_folder(place, nobody)
    store = Store(folder)
    settings = saved_settings(folder)

    def opened(path: Path) -> object:
        """As `show` and `report` do."""
        saved_outline(folder)
        entries, console = list(store.read_ledger()), Console(file=io.StringIO(), markup=False)
        views = [run_view(read_result(folder), entries)] if read_result(folder) else []
        for part in (part for view in [*views, client_view("client-000", entries, None, "")] for part in view):
            console.print(part)
        view, baselines = open_run(folder), baselines_of(folder)
        return page(view, baselines) if pages else view

    def ledger(path: Path) -> object:
        return opened(path), pace(store)

    def state(path: Path) -> object:
        return reopen_run(folder, torch.device("cpu")).state()

    def memories(path: Path) -> object:
        return [store.load_memory("client-000", round) for round in range(settings.rounds + 2)], state(path)

    def kind(path: str, read: Callable[[Path], object], forge: Callable[[bytes, random.Random], bytes]) -> Kind:
        return Kind((folder / path).read_bytes(), read, f"run/{path}", forge)

    found = {
        "settings of a run": kind("config.toml", opened, forged_toml),
        "result": kind("result.json", lambda path: (opened(path), so_far(store)), forged_json),
        "ledger": kind("ledger.jsonl", ledger, forged_lines),
        "seconds": kind("state/seconds.json", lambda path: so_far(store), forged_json),
        "server state": kind("state/server.safetensors", state, forged_packed),
        "split": kind("state/split.safetensors", opened, forged_packed),
        "personal model": kind("clients/client-000/model.safetensors", load_model, forged_packed),
    }
    for name, path in {"list of memories": "state/memories.json"}.items():
        if (folder / path).exists():
            found[name] = kind(path, memories, forged_json)
    if kept := sorted((folder / "clients" / "client-000").glob("memory-*.safetensors")):
        found["memory of a client"] = kind(str(kept[-1].relative_to(folder)), memories, forged_packed)
    return found


def _of_networks(place: Path) -> dict[str, Kind]:
    model = (place / "run" / "clients" / "client-000" / "model.safetensors").read_bytes()
    public = foreign.tiny("mobilenetv3")
    state = foreign.public_state("mobilenetv3", public)
    zipped, old = io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": state, "epoch": 3}, zipped)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    weights = place / "weights.safetensors"
    (place / "public.pth").write_bytes(zipped.getvalue())
    import_weights("mobilenetv3", place / "public.pth", foreign.overrides("mobilenetv3"), 8, weights)
    space = SPACES["mobilenetv3"].make(config.load(None, []).components["mobilenetv3"], ImageShape(3, 32, 10))

    def generator(path: Path) -> object:
        return load_generator(space, str(path), "", torch.device("cpu"))

    def checkpoint(path: Path) -> object:
        return read_state(path, lambda key: True, "")

    return {
        "model file": Kind(model, read_model, "model.safetensors", forged_packed),
        "torch program": Kind(archive_of(model), read_model, "model.pt2", forged_archive),
        "weights": Kind(weights.read_bytes(), lambda path: take_network(path, "medium"), "some.safetensors", forged_packed),
        "generator": Kind(shipped("mobilenetv3").read_bytes(), generator, "generator.safetensors", forged_packed),
        "checkpoint": Kind(zipped.getvalue(), checkpoint, "checkpoint.pth", forged_archive),
        "checkpoint of old torch": Kind(old.getvalue(), checkpoint, "old.pth"),
        "checkpoint in safetensors": Kind(save_tensors(state), checkpoint, "checkpoint.safetensors"),
        "architecture": Kind(space.named["medium"].id.encode(), lambda path: _architecture(space, path), "architecture.txt"),
    }


def _architecture(space: Any, path: Path) -> object:
    return space.find(path.read_bytes().decode(errors="replace"), np.random.default_rng(0))


def archive_of(model: bytes) -> bytes:
    """The numbers and the description of a model file as torch.export writes them; the program is left out, as nobody reads it."""
    arrays, facts = unpacked(model)
    table, made = {}, io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for number, (name, array) in enumerate(arrays.items()):
            steps = [step // array.itemsize for step in array.strides]
            sizes, strides = ([{"as_int": value} for value in values] for values in (array.shape, steps))
            meta = {"dtype": 7, "sizes": sizes, "strides": strides, "storage_offset": {"as_int": 0}}
            table[name] = {"path_name": f"weight_{number}", "tensor_meta": meta, "use_pickle": False}
            archive.writestr(f"m/data/weights/weight_{number}", array.astype(np.float32).tobytes())
        archive.writestr("m/data/weights/model_weights_config.json", json.dumps({"config": table}))
        archive.writestr("m/extra/fedloom.json", json.dumps(facts))
    return made.getvalue()


def _of_federations(place: Path) -> dict[str, Kind]:
    make_certificates(place / "certs", SITES, ["127.0.0.1"])
    (place / "federation.toml").write_text(GOOD)
    (place / "north.toml").write_text(SITE.format(name="north", port=1, onnx="false").replace("wait = 60", "wait = 0.1"))
    server, north = place / "certs" / "server", place / "certs" / "north"
    site = SiteSettings(authority=str(north / "ca.pem"), key=str(north / "key.pem"))
    serving = ServerSettings(certificate=str(server / "server.pem"), key=str(server / "server-key.pem"), sites=str(server / "sites"))
    report = Report("north", 1, {"update": {"a": np.ones((3, 2), np.float32)}}, {"examples": 3})
    order = Instruction("north", 1, "train", 7, {"weights": {"a": np.ones((3, 2), np.float32)}}, {"rate": 0.1})

    def kind(path: str, read: Callable[[Path], object], forge: Callable[[bytes, random.Random], bytes] | None = None) -> Kind:
        return Kind((place / path).read_bytes(), read, path, forge)

    return {
        "agreement": kind("federation.toml", read_agreement, forged_toml),
        "settings of a site": kind("north.toml", read_site, forged_toml),
        "authority": kind("certs/north/ca.pem", lambda path: check_site(site)),
        "key of a site": kind("certs/north/key.pem", lambda path: (check_site(site), private_key(path))),
        "public key of a site": kind("certs/server/sites/north.pub", lambda path: (check_server(serving, SITES), public_key(path))),
        "certificate of a server": kind("certs/server/server.pem", lambda path: check_server(serving, SITES)),
        "key of a server": kind("certs/server/server-key.pem", lambda path: check_server(serving, SITES)),
        "report": Kind(to_bytes(report, "f"), partial(_message, Report), "report", forged_packed),
        "instruction": Kind(to_bytes(order, "f"), partial(_message, Instruction), "order", forged_packed),
    }


def _message(kind: Any, path: Path) -> object:
    return from_bytes(kind, path.read_bytes(), MOST, "f")


def _of_images(place: Path) -> dict[str, Kind]:
    found, pixels = {}, np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)

    def decoded(path: Path) -> object:
        return decode([path], 8, resize=True), read_image(path, 3, 8)

    for format in ("PNG", "JPEG", "WEBP"):
        made = io.BytesIO()
        Image.fromarray(pixels).save(made, format)
        found[f"image, {format}"] = Kind(made.getvalue(), decoded, f"image.{format.lower()}")
    for format in ("BMP", "GIF", "TIFF", "PPM"):
        made = io.BytesIO()
        Image.fromarray(pixels).save(made, format)
        found[f"image, {format}"] = Kind(made.getvalue(), lambda path: read_image(path, 3, 8), f"image.{format.lower()}")
    cifar = place / "cifar-100"
    cifar.mkdir()
    rows = {b"data": np.zeros((4, 3072), np.uint8), b"fine_labels": [0, 1, 2, 3]}
    names = {b"fine_label_names": [str(number).encode() for number in range(100)]}
    for name, content in {"train": rows, "test": rows, "meta": names}.items():
        (cifar / name).write_bytes(pickle.dumps(content, protocol=2))
    for name in ("train", "meta"):
        found[f"CIFAR, {name}"] = Kind((cifar / name).read_bytes(), lambda path: read_cifar100(cifar, 32), f"cifar-100/{name}")
    return found


def settings_texts(draw: random.Random) -> str:
    """A malformed ``key=value``."""
    known = [key for key, _, _ in config.explain()]
    one = draw.choice(known)
    key = draw.choice((one, one, f"{one}.x", f"x{one}", "", ".", "a." * 3000, "\x1b", "when.fedavg"))
    value = draw.choice(
        ("", "nan", "-inf", "-1", "9" * 40, "0x" + "f" * 5000, "[" * 5000, "{a=" * 2000, "[]", "{}", '"\\u001b[2J"', "1979-05-27")
        + (
            "x" * 50_000,
            "[1, [2]]",
            '"""',
            "'",
            "\\",
            "\x00",
            "\ud800",
            "1 # x",
            "1\nseed = 2",
            '{"a"=1}',
            "1e999",
            "true",
            "../x",
            "a.b",
            "'\x1b'",
        )
    )
    return f"{key}{draw.choice(('=', '=', '=', '==', '', ' = '))}{value}"
