"""Pictures of generation: they show what the generator believed and drew, in bars of the right length, the same bytes every time."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import generator_figures as figures
import numpy as np
import pytest
import torch
from generation_pictures import ABSENT, SCALE, Course, colours_of, denoising, draw_denoising, draw_marginals, marginals, shortened

from fedloom.core.seeds import rng
from fedloom.generator.generator import Generator
from fedloom.generator.predictor import Predictor, PredictorSettings
from fedloom.generator.tokens import Tokens
from fedloom.spaces.base import Gene
from support.generator import Toy, tiny_space, untrained

SVG = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z")


def guided_generator(tokens: Tokens) -> Generator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        predictor = Predictor(tokens, 4, PredictorSettings(width=8)).eval().requires_grad_(False)
    return Generator(tokens, untrained(tokens), predictor, strength=6.0)


def texts(picture: str, bold: bool = False) -> list[str]:
    found = [element for element in ET.fromstring(picture).iter(f"{SVG}text") if not bold or element.get("font-weight")]
    return [element.text or "" for element in found]


def boxes(picture: str, colour: str) -> list[tuple[float, ...]]:
    """(left, top, width, height) of the bars of a colour."""
    paths = [element.get("d", "") for element in ET.fromstring(picture).iter(f"{SVG}path") if element.get("fill") == colour]
    return [tuple(map(float, found)) for path in paths for found in BOX.findall(path)]


def check_on_paper(picture: str) -> None:
    root = ET.fromstring(picture)
    width, height = (float(root.get(name, "0")) for name in ("width", "height"))
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x", "")) <= width and 0 <= float(element.get("y", "")) <= height
    for path in root.iter(f"{SVG}path"):
        for x, y, wide, tall in (map(float, found) for found in BOX.findall(path.get("d", ""))):
            assert 0 <= x <= x + wide <= width and 0 <= y <= y + tall <= height


# -- what the generator does -------------------------------------------------------
@pytest.mark.parametrize("strength", [0.0, 6.0])
@pytest.mark.parametrize("name", ["mobilenetv3", "darts", "nasvit"])
def test_denoising_is_how_draw_comes_to_its_architecture(name: str, strength: float) -> None:
    generator = guided_generator(Tokens(tiny_space(name)))
    tokens, task = generator.tokens, torch.linspace(-1, 1, generator.predictor.numbers)
    course = denoising(generator, rng(0, "one"), task, strength)
    (drawn,) = generator.draw(1, rng(0, "one"), task, strength)
    assert course.symbols.tolist() == tokens.encode(np.array([drawn.choices]))[0].tolist()
    assert list(course.levels) == generator.levels()[:-1] and len(course.levels) == 12
    assert course.beliefs.shape == (12, len(tokens), tokens.symbols)
    np.testing.assert_allclose(course.beliefs.sum(-1), 1, atol=1e-5)
    assert not course.beliefs[:, ~tokens.mask.numpy()].any()
    assert course.beliefs[0].max(-1).mean() < 0.9 and course.beliefs[-1].max(-1).min() > 0.99  # open at first, certain at the end
    unguided = denoising(generator, rng(0, "one")).beliefs[0]
    assert np.allclose(course.beliefs[0], unguided, atol=0.01) == (strength == 0)


def test_marginals_count_choices_and_what_is_absent() -> None:
    tokens = Tokens(Toy(2, 3))  # gene 1 is absent where gene 0 has choice 0
    shares = marginals(tokens, np.array([[0, 0], [1, 0], [1, 2], [1, 2]]))
    np.testing.assert_allclose(shares, [[0.25, 0.75, 0, 0], [0.25, 0, 0.5, 0.25]])


# -- pictures ----------------------------------------------------------------------
def course_of(first: list[list[float]], last: list[list[float]], symbols: list[int]) -> Course:
    return Course((6.0, 0.2), np.array([first, last]), np.array(symbols))


TOY = Tokens(Toy(2, 3))
PLAIN = course_of([[0.5, 0.5, 0, 0], [0.25, 0.25, 0, 0.5]], [[1, 0, 0, 0], [0, 0, 0, 1]], [0, 3])
GUIDED = course_of([[0.25, 0.75, 0, 0], [0.25, 0.25, 0.5, 0]], [[0, 1, 0, 0], [0, 0, 1, 0]], [1, 2])


def test_a_cell_is_divided_as_the_belief_is() -> None:
    picture = draw_denoising(TOY, {"unguided": PLAIN}, "Title", "Subtitle", "In words")
    check_on_paper(picture)
    tall = 18.0
    # six cells: two genes, two steps and the result; the smallest choice has 1/2 and 1 of the first gene, 1/4 and 0 of the second
    assert sorted(box[3] for box in boxes(picture, SCALE[0])) == [tall / 4, tall / 2, tall, tall]
    assert sorted(box[3] for box in boxes(picture, ABSENT)) == [tall / 2, tall, tall]
    every = [box for colour in (*SCALE, ABSENT) for box in boxes(picture, colour)]
    assert sum(box[3] for box in every) == pytest.approx(6 * tall, abs=0.3)
    small, large = (next(box for box in boxes(picture, colour) if box[3] == tall / 2) for colour in (SCALE[0], SCALE[2]))
    assert small[0] == large[0] and small[1] == large[1] + tall / 2  # the first choice at the bottom
    assert {"Title", "Subtitle", "unguided", "step", "noise level σ", "1", "2", "6.0", "0.20", "result", "–"} <= set(texts(picture))
    assert "In words" in picture


def test_what_guidance_changed_is_bold() -> None:
    alone = draw_denoising(TOY, {"unguided": PLAIN}, "T", "S", "D")
    both = draw_denoising(TOY, {"unguided": PLAIN, "guided by digits": GUIDED}, "T", "S", "D")
    assert texts(both).count("1") == texts(alone).count("1") + 2  # step 1, and the result of gene 0
    assert texts(both, bold=True)[-2:] == ["1", "2"] and texts(alone, bold=True)[-1] == "unguided"


def test_bars_of_marginals_and_lines_where_the_first_end() -> None:
    space, drawn = np.array([[0.5, 0.5, 0, 0], [0.25, 0.25, 0, 0.5]]), np.array([[0.25, 0.75, 0, 0], [0.25, 0.25, 0, 0.5]])
    picture = draw_marginals(TOY, {"the space itself": space, "drawn": drawn}, "Title", "Subtitle", "In words")
    check_on_paper(picture)
    assert sorted(box[2] for box in boxes(picture, SCALE[0])) == [75, 75, 75, 150]  # of 300
    assert "distance 0.125, at most 0.250" in texts(picture) and texts(picture).count("share of architectures, %") == 2
    (lines,) = [element.get("d", "") for element in ET.fromstring(picture).iter(f"{SVG}path") if element.get("stroke") == "#000000"]
    starts = [float(x) for x in re.findall(r"M([\d.]+) ", lines)]
    left = min(box[0] for box in boxes(picture, SCALE[0]) if box[0] > 300)
    assert [round(x - left) for x in starts] == [150, 75, 150, 150]  # of both genes; gene 1 has no share of its last choice


@pytest.mark.parametrize("name", ["mobilenetv3", "darts", "nasvit"])
def test_every_gene_of_every_space_is_named(name: str) -> None:
    tokens = Tokens(tiny_space(name))
    generator = Generator(tokens, untrained(tokens))
    made = [draw_denoising(tokens, {"unguided": denoising(generator, rng(0, "one"))}, "T", "S", "D") for _ in range(2)]
    assert made[0] == made[1] and len(made[0].encode()) < 150_000
    check_on_paper(made[0])
    found = texts(made[0])
    wanted = {
        "mobilenetv3": {"stage 1": 1, "depth": 5, "kernel of block 1": 5, "expansion of block 4": 5},
        "darts": {"normal cell": 1, "reduction cell": 1, "input 0 → node 1": 2, "node 3 → node 4": 2},
        "nasvit": {"resolution": 1, "width of the stem": 1, "stage 7": 1, "width": 7, "depth": 7, "width of the features": 1},
    }[name]
    assert {text: found.count(text) for text in wanted} == wanted


def test_names_and_colours() -> None:
    assert shortened(["depth of stage 1", "kernel of block 1 of stage 1"]) == ("stage 1", ["depth", "kernel of block 1"])
    assert shortened(["one"]) == ("", ["one"]) and shortened(["gene 1", "gene 2"]) == ("", ["1", "2"])
    assert colours_of(Gene("size", (1, 2, 3))) == list(SCALE) and colours_of(Gene("size", (1, 2))) == [SCALE[0], SCALE[2]]
    operations = ("none", "sep_conv_3x3", "sep_conv_5x5", "max_pool_3x3")
    assert len(set(colours_of(Gene("operation", (0, 1, 2, 3), operations)))) == 4


# -- the script --------------------------------------------------------------------
def record(**changes: Any) -> dict[str, Any]:
    def paired(mean: float, low: float | None, high: float | None) -> dict[str, float | None]:
        return {"mean": mean, "low": low, "high": high, "p": 0.5}

    found = {
        "guided by its data - random": paired(0.004, 0.003, 0.005),
        "guided by its data - largest": paired(-0.002, -0.003, -0.001),
        "guided by its data - guided by macs": paired(0.006, -0.001, 0.013),
        "guided by its data + RBF - random + RBF": paired(0.001, None, None),
    }
    arms = {"random": {"mean": 0.753}, "largest": {"mean": 0.76}}
    return {"space": "darts", "each": 30, "tasks": 40, "strength": 8.0, "arms": arms, "differences": found} | changes


def test_differences_are_sorted_with_their_intervals() -> None:
    figure = figures.guidance_figure("DARTS", record())
    check_on_paper(figure.picture)
    found = texts(figure.picture)
    rivals = [text for text in found if text in ("guided by MACs", "random", "largest", "random + RBF")]
    assert rivals == ["guided by MACs", "random", "largest", "random + RBF"]
    assert {"+0.60 (−0.10 to 1.30)", "+0.40 (0.30 to 0.50)", "−0.20 (−0.30 to −0.10)", "+0.10", "75.3", "76.0", "0"} <= set(found)
    assert "difference in accuracy, percentage points" in found and "guided by its data + RBF, against" in found
    circles = [(float(c.get("cx", "")), c.get("fill")) for c in ET.fromstring(figure.picture).iter(f"{SVG}circle")]
    assert [colour for _, colour in circles] == [
        figures.OPEN,
        figures.GAINED,
        figures.LOST,
        figures.OPEN,
    ]
    zero = next(float(e.get("x", "")) for e in ET.fromstring(figure.picture).iter(f"{SVG}text") if e.text == "0")
    assert [x > zero for x, _ in circles] == [True, True, False, True]
    assert "against 1 of 3 rivals" in figure.caption and "than largest" in figure.caption
    assert figure.markdown("figures").startswith(f"![{figure.title}](figures/guidance-darts.svg)\n\n*")


def test_ticks_are_round_and_reach_over_all() -> None:
    assert figures.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert figures.ticks(-0.3, 0.78) == pytest.approx([-0.5, 0, 0.5, 1]) and figures.ticks(0, 0) == [0.0]


def test_the_command_draws_the_shipped_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "EXACT", 2_000)
    monkeypatch.setattr(figures, "GUIDES", {"digits": "digits"})
    (tmp_path / "guidance-nasvit.json").write_text(json.dumps(record(space="nasvit")))
    for folder in ("first", "second"):
        figures.main(["nasvit", "--out", str(tmp_path / folder), "--results", str(tmp_path), "--drawn", "50"])
    names = ["denoising-nasvit.svg", "guidance-nasvit.svg", "marginals-nasvit.svg"]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == names
    shown = capsys.readouterr().out
    for name in names:
        picture = (tmp_path / "first" / name).read_bytes()
        assert picture == (tmp_path / "second" / name).read_bytes() and len(picture) < 150_000
        assert f"](first/{name})" in shown
    assert "its farthest gene is" in shown and "12 steps of `dpm`" in shown
