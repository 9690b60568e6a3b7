"""The two tables of docs/explain/generator-numbers.md, from the records: how well the shipped generators draw, and what guidance is worth.

    python benchmarks/generator_tables.py [--results benchmarks/results]

Reads what `generator_quality.py` and `guidance.py` wrote for the three spaces. A record that is not there leaves
cells that say so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SPACES = {"mobilenetv3": "MobileNetV3", "darts": "DARTS", "nasvit": "NASViT"}
MISSING = "not measured yet"
GUIDED = "guided by its data"
DATA = {"digits": "digits", "cifar10": "CIFAR-10"}
RIVALS = {  # in the words of a record, and in ours
    f"{GUIDED} - random": "random architectures",
    f"{GUIDED} - unguided": "unguided draws of the generator",
    f"{GUIDED} - guided by parameters": "guidance by parameters alone",
    f"{GUIDED} - guided by macs": "guidance by MACs alone",
    f"{GUIDED} - largest": "the largest architecture",
    f"{GUIDED} - guided by another task's data": "guidance by another task's data, mean of four",
    f"{GUIDED} - crossover and mutation": "crossover and mutation of random architectures",
    f"{GUIDED} - crossover and mutation + RBF": "the same, picked by RBF: 10 of 100",
    f"{GUIDED} - random + RBF": "random, picked by RBF: 10 of 100",
    f"{GUIDED} + RBF - crossover and mutation + RBF": "both picked by RBF: against crossover and mutation",
    f"{GUIDED} + RBF - random + RBF": "both picked by RBF: against random",
}
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def record(results: Path, name: str) -> dict[str, Any]:
    """Empty where there is none."""
    file = results / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"


# -- what is drawn -----------------------------------------------------------------------
def quality_table(results: Path) -> str:
    head = ["space", "drawn by", "number", "valid", "unique in 500", "novel", "genes: largest", "mean", "pairs: largest", "mean"]
    rows = [row for name in SPACES for row in quality_rows(results, name)]
    return table([*head, "seconds per 100: one CPU thread", "H200"], rows)


def quality_rows(results: Path, name: str) -> Iterator[list[str]]:
    """Distances and shares are of the GPU's record, which has more samples."""
    cpu, gpu = (record(results, f"generator-quality-{name}-{device}") for device in ("cpu", "cuda"))
    title = SPACES[name]
    if not gpu:
        yield [title, MISSING, *[""] * 10]
        return
    exact = {one["drawn"]: one for one in gpu["exact"]}
    few = gpu["samplers"]["sde"]["drawn"]

    def drawn(words: str, one: Mapping[str, Any], slow: Mapping[str, Any] | None, timed: bool = True) -> list[str]:
        shares = [percent(one[key]) for key in ("validity", "uniqueness_in_500", "novelty")]
        far = [f"{one['total_variation'][what][which]:.4f}" for what in ("genes", "pairs") for which in ("largest", "mean")]
        seconds = [seconds_of(slow), seconds_of(one)] if timed else ["", ""]
        return [title, words, f"{one['drawn']:,}", *shares, *far, *seconds]

    def by_chance(count: int) -> list[str]:
        one = exact[count]
        pairs = [one[what][which] for what in ("genes", "pairs") for which in ("largest", "mean")]
        return [title, "*exact draws*", f"{count:,}", "", "", "", *(f"{each['mean']:.4f} ({each['worst']:.4f})" for each in pairs), "", ""]

    for sampler, one in gpu["samplers"].items():
        yield drawn(f"`{sampler}`, {one['steps']} steps", one, cpu.get("samplers", {}).get(sampler))
        if sampler == "dpm_sde":
            yield drawn("`dpm`, without what the network learned", gpu["without_the_learned_correction"], None, timed=False)
            yield by_chance(one["drawn"])
    yield by_chance(few)
    guided = cpu.get("guided", {}) | gpu.get("guided", {})
    for data, words in DATA.items():
        start = [title, f"`dpm`, guided by {words}"]
        if data in guided:
            shares = [percent(guided[data][key]) for key in ("validity", "uniqueness_in_500", "novelty")]
            yield [*start, "500", *shares, *[""] * 6]
        else:
            yield [*start, MISSING, *[""] * 9]


def percent(share: float) -> str:
    """Nothing is rounded up to 100 %."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.999):.5g} %"


def seconds_of(one: Mapping[str, Any] | None) -> str:
    return f"{one['seconds_per_100']:#.2g}".rstrip(".") if one else MISSING


# -- what guidance is worth --------------------------------------------------------------
def guidance_table(results: Path) -> str:
    head = [f"{GUIDED}, against", *(column for title in SPACES.values() for column in (title, "rival, %"))]
    records = {name: record(results, f"guidance-{name}") for name in SPACES}
    rows = []
    for pair, words in RIVALS.items():
        rival = pair.partition(" - ")[2]
        cells = []
        for name in SPACES:
            found = records[name]
            cells += [difference(found["differences"][pair]), f"{100 * found['arms'][rival]['mean']:.2f}"] if found else [MISSING, ""]
        rows.append([words, *cells])
    return table(head, rows)


def difference(paired: Mapping[str, float]) -> str:
    """In points, bold where the interval leaves zero out."""
    mean, low, high = (f"{100 * paired[key]:{sign}.2f}".replace("-", "−") for key, sign in (("mean", "+"), ("low", ""), ("high", "")))
    sure = paired["low"] > 0 or paired["high"] < 0
    return f"{'**' * sure}{mean}{'**' * sure} ({low} to {high}), p {chance(paired['p'])}"


def chance(p: float) -> str:
    if p >= 0.001:
        return f"{p:.3f}"
    digit, _, power = f"{p:.0e}".partition("e")
    return f"{digit}·10{str(int(power)).translate(SUPERSCRIPT)}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = parser.parse_args(given).results
    print(quality_table(results))
    print(guidance_table(results))


if __name__ == "__main__":
    main()
