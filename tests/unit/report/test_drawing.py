"""Pictures of architectures: valid SVG that says everything, for every space and from the command line."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DamagedRun, InvalidArchitecture, InvalidConfig, UnusableFolder
from fedloom.core.seeds import rng
from fedloom.report.drawing import KINDS, OTHER, PILL, draw, kind_of, width_of
from fedloom.spaces.base import SPACES, BlockDiagram, Box, CellGraph, Drawing, ImageShape, SearchSpace
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from support.checks import Fedloom, check_refused

IMAGE = ImageShape(channels=3, size=32, classes=10)
SVG = "{http://www.w3.org/2000/svg}"
OPERATIONS = ("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5")
NODES = ("input 0", "input 1", "node 1", "node 2", "node 3", "node 4", "output")
EDGES = [(a, 2 + node) for node in range(4) for a in range(2 + node)]


def cell(seed: int, title: str = "normal cell") -> CellGraph:
    """All 14 edges of a DARTS cell, and its output."""
    edges = tuple((a, b, OPERATIONS[choice]) for (a, b), choice in zip(EDGES, rng(seed).integers(len(OPERATIONS), size=14), strict=True))
    return CellGraph(title, NODES, edges + tuple((node, 6, "") for node in range(2, 6)))


def parsed(picture: str) -> ET.Element:
    root = ET.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def rectangles(root: ET.Element) -> list[tuple[float, float, float, float]]:
    """(left, top, right, bottom) of every box; the first is the paper."""
    found = [[float(element.get(name, "0")) for name in ("x", "y", "width", "height")] for element in root.iter(f"{SVG}rect")]
    return [(x, y, x + width, y + height) for x, y, width, height in found]


def check_sound(picture: str) -> ET.Element:
    """What holds for any picture: self-contained, named for those who listen, everything on the paper, no text cut."""
    root = parsed(picture)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    assert width > 0 and height > 0 and root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"] and root.get("role") == "img"
    assert "prefers-color-scheme: dark" in picture and "href" not in picture and "url(" not in picture and "@import" not in picture
    for left, top, right, bottom in rectangles(root):
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    for element in root.iter(f"{SVG}text"):
        x, y, size = (float(element.get(name, "0")) for name in ("x", "y", "font-size"))
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")]
        wide = width_of(element.text or "", size)
        assert x - share * wide >= 0 and x + (1 - share) * wide <= width + 0.1 and size <= y <= height
    for element in root.iter(f"{SVG}path"):
        assert "nan" not in element.get("d", "nan") and "e" not in element.get("d", "e")  # numbers that every program reads
    return root


# -- every space -------------------------------------------------------------------------


@pytest.fixture(params=list(SPACES))
def space(request: pytest.FixtureRequest) -> SearchSpace:
    return SPACES[request.param].make(SPACES[request.param].settings(), IMAGE)


def operations(drawing: Drawing) -> list[str]:
    if isinstance(drawing, BlockDiagram):
        return [text for title, boxes in drawing.stages for text in (title, *(part for box in boxes for part in (box.label, box.detail)))]
    return [text for graph in drawing for text in (graph.title, *graph.nodes, *(operation for _, _, operation in graph.edges if operation))]


def test_every_part_of_an_architecture_is_written_out(space: SearchSpace) -> None:
    for architecture in (*space.named.values(), *(space.sample(rng("draw", seed)) for seed in range(5))):
        drawing = space.drawing(architecture)
        picture = draw(drawing, "a title", "a subtitle")
        written = texts(check_sound(picture))
        assert written[:2] == ["a title", "a subtitle"]
        for text in operations(drawing):
            assert written.count(text) >= operations(drawing).count(text) > 0
        assert picture == draw(space.drawing(architecture), "a title", "a subtitle")
        described = parsed(picture).findtext(f"{SVG}desc") or ""
        assert all(text in described for text in operations(drawing))


def test_two_architectures_have_two_pictures(space: SearchSpace) -> None:
    different = {*space.named.values(), space.sample(rng(1))}
    assert len({draw(space.drawing(architecture), "") for architecture in different}) == len(different) > 3


def test_a_mobilenetv3_block_in_words() -> None:
    space = MobileNetV3(MobileNetV3Settings(), IMAGE)
    stages = dict(space.drawing(space.named["largest"]).stages)
    assert list(stages) == [
        "stem, 32 pixels",
        *("stage 1, 32 pixels", "stage 2, 16 pixels", "stage 3, 8 pixels", "stage 4, 4 pixels", "stage 5, 4 pixels"),
        "head, 2 pixels",
    ]
    first, second, *_ = stages["stage 2, 16 pixels"]
    assert (first.label, first.detail) == ("7×7 ×6", "24→144→40, ½, SE") and first.share == 144 / 1280
    assert (second.label, second.detail) == ("7×7 ×6", "40→240→40, SE")
    assert [(box.label, box.detail) for box in stages["stem, 32 pixels"]] == [("3×3", "3→16"), ("3×3", "16→16")]
    assert stages["head, 2 pixels"][-1].detail == "1280→10"
    assert [len(boxes) for boxes in stages.values()] == [2, 4, 4, 4, 4, 4, 3]
    shares = [box.share for boxes in stages.values() for box in boxes]
    assert min(shares) > 0 and max(shares) == 1


def test_wider_blocks_are_higher_boxes() -> None:
    narrow, wide = Box("3×3 a", "", 0.1), Box("3×3 b", "", 0.9)
    _, *boxes = rectangles(parsed(draw(BlockDiagram((("stage", (narrow, wide)),)), "")))
    (_, top, _, bottom), (_, higher, _, lower), *_ = boxes
    assert lower - higher > bottom - top > 2 * 12  # and room for two lines in both


# -- cells ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_labels_of_a_whole_cell_do_not_meet(seed: int) -> None:
    root = check_sound(draw((cell(seed), cell(seed + 100, "reduction cell")), "darts"))
    _, *boxes = rectangles(root)
    labels = [box for box in boxes if box[3] - box[1] == PILL]
    assert len(labels) == 28 and len(boxes) >= 28 + 14
    for (left, top, right, bottom), (other, above, far, below) in combinations(boxes, 2):
        assert right <= other or far <= left or bottom <= above or below <= top
    assert [text for text in texts(root) if text.endswith(" cell")] == ["normal cell", "reduction cell"]


def test_edges_run_in_lanes_of_their_own_and_around_nodes() -> None:
    root = parsed(draw((cell(3),), ""))
    nodes = [box for box in rectangles(root)[1:] if box[3] - box[1] == 30]
    assert len(nodes) == 7
    runs = []
    for element in root.iter(f"{SVG}path"):
        found = re.match(r"M\S+ \S+C\S+ \S+ \S+ \S+ (\S+) (\S+)H(\S+?)C", element.get("d", ""))
        if found:
            start, level, end = map(float, found.groups())
            runs.append((start, level, end))
            assert not any(left < end and start < right and top < level < bottom for left, top, right, bottom in nodes)
    assert len(runs) == 18
    for (start, level, end), (other, height, stop) in combinations(runs, 2):
        assert level != height or end <= other or stop <= start


def test_an_operation_has_one_colour_in_every_picture() -> None:
    kinds = {operation: kind_of(operation) for operation in OPERATIONS}
    assert kinds["sep_conv_3x3"] == kinds["sep_conv_5x5"] != kinds["dil_conv_3x3"] == kinds["dil_conv_5x5"]
    assert len({kind.colour for kind in kinds.values()}) == 6 and OTHER not in kinds.values()
    assert kind_of("something else") == OTHER


def test_colours_can_be_read_on_both_papers() -> None:
    def light(colour: str) -> float:
        """Relative luminance (WCAG 2)."""
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    for kind in (*KINDS, OTHER):
        assert contrast(kind.colour, "#ffffff") >= 3 and contrast(kind.colour, "#16181d") >= 3  # lines
        assert contrast("#1c1c1c", kind.tint) >= 7  # text


# -- anything -------------------------------------------------------------------------------

TEXT = st.text(max_size=40)


@given(st.lists(st.tuples(TEXT, st.lists(st.builds(Box, TEXT, TEXT, st.floats(0, 1)), max_size=5)), max_size=4), TEXT)
def test_any_text_makes_a_sound_block_diagram(stages: list[tuple[str, list[Box]]], title: str) -> None:
    check_sound(draw(BlockDiagram(tuple((name, tuple(boxes)) for name, boxes in stages)), title))


@given(st.lists(TEXT, min_size=1, max_size=7), st.data())
def test_any_graph_makes_a_sound_picture(nodes: list[str], data: st.DataObject) -> None:
    pairs = [(a, b) for b in range(len(nodes)) for a in range(b)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=16)) if pairs else []
    graph = CellGraph("cell", tuple(nodes), tuple((a, b, data.draw(TEXT)) for a, b in chosen))
    check_sound(draw((graph,), "any"))


def test_special_characters_are_escaped() -> None:
    graph = CellGraph("<cell> & 'more'", ("<in>", 'o"ut'), ((0, 1, "a<b>&c\x00]]>"),))
    root = check_sound(draw((graph,), "<script>alert(1)</script>"))
    assert texts(root)[:2] == ["<script>alert(1)</script>", "<cell> & 'more'"]
    assert {"<in>", 'o"ut', "a<b>&c\ufffd]]>"} <= set(texts(root)) and root.find(f".//{SVG}script") is None


# -- the command line -------------------------------------------------------------------------


def test_draw_by_name_id_and_chance(fedloom_: Fedloom, tmp_path: Path) -> None:
    outcome = fedloom_("draw", "mobilenetv3:largest")
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out.startswith("mobilenetv3-largest.svg: mobilenetv3:2-2-") and "6,396,570 parameters" in outcome.out
    first = (tmp_path / "mobilenetv3-largest.svg").read_text()
    assert texts(check_sound(first))[:2] == ["mobilenetv3:largest", "6,396,570 parameters, 49,554,816 multiply-accumulates"]
    number = "mobilenetv3:" + "-".join("2" * 45)
    assert fedloom_("draw", number, "--out", "pictures/b.svg").code == 0
    assert texts(parsed((tmp_path / "pictures" / "b.svg").read_text()))[1:] == texts(parsed(first))[1:]
    assert fedloom_("draw", number).code == 0 and (tmp_path / f"{number.replace(':', '-')}.svg").exists()
    for seed in (1, 2):
        assert fedloom_("draw", "mobilenetv3:random", f"seed={seed}", "--out", f"{seed}.svg").code == 0
    assert (tmp_path / "1.svg").read_text() != (tmp_path / "2.svg").read_text()


def test_draw_follows_the_settings_of_the_space(fedloom_: Fedloom, tmp_path: Path) -> None:
    outcome = fedloom_("draw", "mobilenetv3:smallest", "mobilenetv3.width=0.5", "--size", "64", "--classes", "100", "--out", "a.svg")
    assert outcome.code == 0
    assert {"stem, 64 pixels", "640→100"} <= set(texts(parsed((tmp_path / "a.svg").read_text())))


def test_draw_the_architecture_of_a_client(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    outcome = fedloom_("draw", finished_run, "--client", "client-001")
    assert outcome.code == 0 and outcome.out.startswith("client-001.svg: mobilenetv3:0-0-")
    written = texts(check_sound((tmp_path / "client-001.svg").read_text()))
    assert written[0] == f"client-001 of {finished_run}" and "stem, 8 pixels" in written  # its own images


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["largest"], InvalidConfig, ("largest is not an architecture", "mobilenetv3:largest")),
        (["."], InvalidConfig, ("is not an architecture", "--client NAME")),
        (["mobilenet:largest"], InvalidConfig, ("no search space named 'mobilenet'", "Did you mean 'mobilenetv3'?")),
        (["mobilenetv3:largst"], InvalidArchitecture, ("no architecture named 'largst'", "Did you mean 'largest'?")),
        (["mobilenetv3:0-1"], InvalidArchitecture, ("is not a mobilenetv3 architecture of 45 genes",)),
        (["mobilenetv3:largest", "mobilenetv3.with=2"], InvalidConfig, ("Unknown key 'mobilenetv3.with'", "Did you mean 'width'?")),
        (["nowhere", "--client", "client-000"], DamagedRun, ("nowhere is not a run folder",)),
    ],
)
def test_draw_refuses(fedloom_: Fedloom, tmp_path: Path, arguments: list[str], kind: type[InvalidConfig], words: tuple[str, ...]) -> None:
    check_refused(fedloom_("draw", *arguments), kind, *words)
    assert list(tmp_path.iterdir()) == []


def test_draw_names_the_clients_there_are(fedloom_: Fedloom, finished_run: Path) -> None:
    check_refused(fedloom_("draw", finished_run, "--client", "client-01"), InvalidConfig, "no personal model of 'client-01'", "client-001")


def test_draw_into_a_place_that_is_taken(fedloom_: Fedloom, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    check_refused(fedloom_("draw", "mobilenetv3:largest", "--out", "taken"), UnusableFolder, "taken cannot be written")
    assert list(tmp_path.rglob("*")) == [tmp_path / "taken"]
