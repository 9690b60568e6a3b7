"""Several methods side by side: their numbers, and the paired difference of each to the first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedloom.maths.paired import CONFIDENCE, holm, paired_difference

SCHEMA = "fedloom.comparison/1"
STATISTICS = ("last_participation", "best_ever")  # besides the accuracy of the personal models; some papers report them
Result = Mapping[str, Any]  # a result.json
Results = Mapping[str, Mapping[int, Result]]  # method -> seed -> result


def comparison_card(results: Results) -> dict[str, Any]:
    """The comparison as JSON has it. Accuracies are shares; the first method is the one compared to."""
    return {"schema": SCHEMA, **_corrected([_block(results)])[0]}


def sweep_card(key: str, by_value: Mapping[str, Results]) -> dict[str, Any]:
    """The same for every value of a setting, in ``blocks``."""
    blocks = _corrected([_block(results) for results in by_value.values()])
    return {"schema": SCHEMA, "over": key, "blocks": [{"value": value, **block} for value, block in zip(by_value, blocks, strict=True)]}


def blocks_of(card: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(value, block) of a sweep; of any other comparison itself, with no value."""
    return [(str(block["value"]), block) for block in card["blocks"]] if "over" in card else [("", card)]


def comparisons_in(card: Mapping[str, Any]) -> int:
    """How many differences are tested, for which p is corrected."""
    return sum(method["difference"] is not None for _, block in blocks_of(card) for method in block["methods"])


def tests_in_words(card: Mapping[str, Any]) -> str:
    pairs = sorted({method["difference"]["pairs"] for _, block in blocks_of(card) for method in block["methods"] if method["difference"]})
    if not pairs:
        return ""
    counts = "–".join(dict.fromkeys(map(str, (pairs[0], pairs[-1]))))
    tests = f"{CONFIDENCE:.0%} Student t interval, p of Wilcoxon's signed-rank test"
    number = comparisons_in(card)
    corrected = f"corrected for {number} comparisons (Holm)" if number > 1 else "one comparison, so nothing to correct"
    return f"Differences in points, paired by client and seed ({counts} pairs): {tests}, {corrected}."


def missing_in_words(card: Mapping[str, Any]) -> str:
    """Which rows are means over fewer seeds than the others of their block, because runs failed."""
    found = []
    for value, block in blocks_of(card):
        for method in block["methods"]:
            lacking = [str(seed) for seed in block["seeds"] if seed not in [run["seed"] for run in method["runs"]]]
            if lacking and method["runs"]:
                at = f" at {card['over']} = {value}" if "over" in card else ""
                found.append(f"{method['method']}{at} without seed {', '.join(lacking)}")
    return f"Runs failed, so not every mean is over all seeds: {'; '.join(found)}." if found else ""


def _block(results: Results) -> dict[str, Any]:
    first, *_ = results
    seeds = sorted({seed for runs in results.values() for seed in runs})
    methods = [_card(method, runs, results[first] if method != first else {}) for method, runs in results.items()]
    return {"compared_to": first, "seeds": seeds, "methods": methods}


def _corrected(blocks: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """All differences of all blocks are one family: whoever looks at the table looks at all of them."""
    differences = [method["difference"] for block in blocks for method in block["methods"] if method["difference"]]
    for difference, corrected in zip(differences, holm([one["p"] for one in differences]), strict=True):
        difference["p_holm"] = corrected
    return blocks


def _card(method: str, runs: Mapping[int, Result], reference: Mapping[int, Result]) -> dict[str, Any]:
    rows = [
        {
            "seed": seed,
            "mean": result["accuracy"]["mean"],
            "std": result["accuracy"]["std"],
            **{f"{what}_mean": result["accuracy"].get(f"{what}_mean") for what in STATISTICS},
            **{f"{what}_std": result["accuracy"].get(f"{what}_std") for what in STATISTICS},
            "clients": len(result["clients"]),
            "seconds": result["cost"]["seconds"],
            "bytes_up": result["cost"]["bytes_up"],
        }
        for seed, result in sorted(runs.items())
    ]
    means = [row["mean"] for row in rows]
    return {
        "method": method,
        "accuracy": {
            "mean": _mean(means),
            "std_over_clients": _mean([row["std"] for row in rows]),
            "std_over_seeds": statistics.stdev(means) if len(means) > 1 else None,
            **{f"{what}_{number}": _mean([row[f"{what}_{number}"] for row in rows]) for what in STATISTICS for number in ("mean", "std")},
        },
        "seconds": _mean([row["seconds"] for row in rows]),
        "bytes_up": _mean([row["bytes_up"] for row in rows]),
        "difference": _difference(reference, runs),
        "runs": rows,
    }


def _difference(first: Mapping[int, Result], second: Mapping[int, Result]) -> dict[str, Any] | None:
    """Of the same clients at the same seeds; nothing where there are none."""
    before: list[float] = []
    after: list[float] = []
    by_seed = {}
    for seed in sorted(first.keys() & second.keys()):
        mine, theirs = ({client["name"]: client["test_accuracy"] for client in run[seed]["clients"]} for run in (first, second))
        same = [name for name in mine if name in theirs]
        before += [mine[name] for name in same]
        after += [theirs[name] for name in same]
        by_seed[seed] = _mean([theirs[name] - mine[name] for name in same])
    return {**asdict(paired_difference(before, after)), "by_seed": by_seed} if before else None


def _mean(values: Sequence[Any]) -> float | None:
    """Of all seeds; nothing where one of them has none."""
    return statistics.fmean(values) if values and None not in values else None
