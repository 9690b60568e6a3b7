"""The tables of docs/results.md, and its figure, from the records in benchmarks/results; families.py says which stand where.

    python benchmarks/results_page.py [--check]

Text between `<!-- NAME: written by … -->` and `<!-- end -->` is written again, all other text stays. --check writes nothing and says
whether page and records agree. To add a run, add its record, name it in families.py and run this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import fleet
from families import COURSES, FAMILIES, LEFT_OUT, NAMES, PUBLISHED, SEARCHES, Family
from recipe import CONTROL, RESULTS, results_of
from rounds import course, drawn

from fedloom.maths.paired import DIGITS
from fedloom.report.comparison import comparison_card
from fedloom.report.comparison_files import filled, interval, markdown_table, points, spread
from fedloom.report.figure import Figure, pictures
from fedloom.report.published import TITLE, Published, protocols_of, published_beside

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURE = DOCS / "results.md", DOCS / "explain" / "figures" / "results.svg"
BLOCK = re.compile(r"(<!-- ([\w-]+): written by [^\n]* -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
WINDOW = 10  # rounds
Rows = dict[str, dict[int, dict[str, Any]]]  # arm -> seed -> what it reached
ACCURACY, GAIN, BEYOND, MACS, DOWN = (
    "test accuracy, %",
    "against the control",
    "against `scaffold`",
    "largest network, kMAC",
    "MB down a round",
)
TITLES = ("method", "rounds", "split", "seeds", ACCURACY, "± seeds", *fleet.TIERS, GAIN, "p, Holm", BEYOND)
TITLES += ("seconds", "GMAC", "MB up", MACS, DOWN, "commit", "record")


# -- records ----------------------------------------------------------------------------
def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def rows_of(name: str) -> Rows:
    """Of a record of recipe.py, baselines.py or fleet.py; every row knows its commit and record."""
    record = read(name)
    known = {"commit": record["environment"]["commit"], "records": [name]}
    if "rows" in record:  # a fleet
        rows: Rows = {}
        for one in record["rows"]:
            own = {"accuracy": one["clients"], "seconds": one.get("seconds"), "tiers": one}
            rows.setdefault(one["method"], {})[one["seed"]] = {**known, **own}
        return rows
    arms = record.get("arms") or record["methods"]
    return {arm: {int(seed): {**known, **one.get("environment", {}), **one} for seed, one in runs.items()} for arm, runs in arms.items()}


def run_row(name: str) -> tuple[int, dict[str, Any]]:
    """Seed and row of one run, by record.py. Older ones have no accuracies of clients."""
    record = read(name)
    cost, stopped = record["cost"], f"stopped after round {record['rounds']}: no personal models"
    return record["settings"]["seed"], {
        "accuracy": {client: one["test"] for client, one in record.get("clients", {}).items()},
        "statistics": record["accuracy"],
        "seconds": cost["seconds"],
        "gmacs": cost["trained_macs"] / 1e9,
        "bytes_up": cost["bytes_up"],
        "commit": record["environment"]["commit"],
        "records": [name],
        "unfinished": "" if record["finished"] else stopped,
    }


def family_rows(family: Family) -> Rows:
    """The control first. A run that was stopped stands only where its arm has nothing else."""
    rows: Rows = {}
    for name in family.records:
        for arm, by_seed in rows_of(name).items():
            rows[arm] = {**rows.get(arm, {}), **by_seed}
    for arm, name in family.runs.items():
        seed, run = run_row(name)
        own = rows.setdefault(arm, {})
        if seed in own:
            own[seed] |= {"bytes_up": run["bytes_up"], "records": [*own[seed]["records"], name]}
        elif not run["unfinished"] or not own:
            own[seed] = run
    return {arm: rows[arm] for arm in family.arms or sorted(rows, key=lambda arm: arm != CONTROL) if rows[arm]}


# -- tables -----------------------------------------------------------------------------
def line(family: Family, card: Mapping[str, Any], rows: Rows) -> dict[str, str]:
    """Title -> cell. card: of the arm's comparison."""
    arm, accuracy, ones = card["method"], card["accuracy"], [*rows[card["method"]].values()]
    mean, clients = (value and round(value, DIGITS) for value in (accuracy["mean"], accuracy["std_over_clients"]))
    records = dict.fromkeys(name for one in ones for name in one["records"])
    cells = {
        "method": family.names.get(arm, arm if "`" in arm else f"`{arm}`"),
        "rounds": str(family.rounds),
        "split": family.split,
        "seeds": seeds_in_words(rows[arm]) + (f" ({family.tuning})" if family.tuning else ""),
        ACCURACY: (points(mean) if clients is None else spread(mean, clients)) or ones[0]["unfinished"],
        "± seeds": points(accuracy["std_over_seeds"]),
        GAIN: "control" if arm == next(iter(rows)) else gain(card["difference"]),
        "p, Holm": f"{card['difference']['p_holm']:.2g}" if card["difference"] else "",
        BEYOND: against_scaffold(rows, arm),
        "seconds": amount(card["seconds"]),
        "GMAC": amount(fmean(one["gmacs"] for one in ones)) if "gmacs" in ones[0] else "",
        "MB up": amount(card["bytes_up"], 1e6),
        "commit": ", ".join(dict.fromkeys(short(one["commit"]) for one in ones)),
        "record": ", ".join(map(link, records)),
    }
    return cells | (tier_cells([one["tiers"] for one in ones]) if "tiers" in ones[0] else {})


def tier_cells(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Means over seeds of each tier; the largest of all seeds of what is limited."""
    tiers = range(len(fleet.TIERS))
    most = {what: [max(row[what][tier] for row in rows) for tier in tiers] for what in ("most_macs", "bytes_down")}
    cells = {name: points(fmean(row["accuracy"][tier] for row in rows)) for tier, name in enumerate(fleet.TIERS)}
    sent = " / ".join(f"{down / 1e6:.2f}" for down in most["bytes_down"]) if any(most["bytes_down"]) else ""
    return {**cells, MACS: " / ".join(f"{macs / 1e3:.0f}" for macs in most["most_macs"]), DOWN: sent}


def table(dataset: str) -> str:
    lines = []
    for family in FAMILIES[dataset]:
        rows = family_rows(family)
        lines += [line(family, card, rows) for card in comparison_card(results_of(rows))["methods"]]
    titles, cells = filled(TITLES, [[one.get(title, "") for title in TITLES] for one in lines])
    return markdown_table(titles, cells, words=("method", "split", "seeds", "commit", "record"))


def against_scaffold(rows: Rows, arm: str) -> str:
    """The difference of a search to the corrected fixed network, with its interval; one question more, so without a p."""
    if arm not in SEARCHES or "control-drift" not in rows:
        return ""
    found = comparison_card(results_of({one: rows[one] for one in ("control-drift", arm)}))["methods"][1]["difference"]
    return gain(found)


def gain(difference: Mapping[str, Any] | None) -> str:
    return f"{points(difference['mean'], '+')} ({interval(difference)})" if difference else ""


def link(name: str) -> str:
    return f"[{name}](../benchmarks/results/{name}.json)"


def seeds_in_words(seeds: Iterable[int]) -> str:
    known = sorted(seeds)
    whole = len(known) > 1 and known == list(range(known[0], known[-1] + 1))
    return f"{known[0]}–{known[-1]}" if whole else ", ".join(map(str, known))


def short(commit: str) -> str:
    number, plus, rest = commit.partition("+")
    return number[:7] + plus + rest


def amount(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:,.0f}"


def commands(dataset: str) -> str:
    """What made each record of a table, and what else its reader must know."""
    names = dict.fromkeys(name for family in FAMILIES[dataset] for name in (*family.records, *family.runs.values()))
    lines = ["<details><summary>The command of every record</summary>", ""]
    for name in names:
        record = read(name)
        done = record["commands"] if "commands" in record else record["command"].split("; ")
        note = record.get("note", "").rstrip(".")
        lines.append(f"- {link(name)}: {'; '.join(f'`{one}`' for one in done)}." + (f" {note[0].upper()}{note[1:]}." if note else ""))
    return "\n".join([*lines, "", "</details>"])


def published(dataset: str) -> str:
    """For the methods of a table: the best row of each in each space and under each protocol."""
    best: dict[tuple[str, str, str], Published] = {}
    for one in published_beside({dataset}, (), PUBLISHED[dataset]):
        best.setdefault((one.method, one.space, one.protocol), one)
    letters = protocols_of([*best.values()])
    rows = [[f"`{one.method}`", f"`{one.space}`", one.what, one.shown, letters[one.protocol], one.source] for one in best.values()]
    titles = ["published for", "table of", "network or variant", ACCURACY, "protocol", "source"]
    told = [f"- Protocol {letter}: {protocol}." for protocol, letter in letters.items()]
    return f"{TITLE}.\n\n{markdown_table(titles, rows, words=titles)}\n\n" + "\n".join(told)


# -- figure and page --------------------------------------------------------------------
def curves() -> Figure:
    """Accuracy of participants in the runs of 200 rounds."""
    lines = {NAMES[arm].replace("`", ""): smoothed(course(read(name))) for arm, name in COURSES.items()}
    return drawn(
        "results",
        lines,
        "The same clients take part in the same rounds of all runs. The searches were stopped in rounds 166 and 127.",
        bottom=65,
    )


def smoothed(accuracies: Mapping[int, float]) -> dict[int, float]:
    """Means of ten rounds up to each."""
    return {number: fmean(accuracies[n] for n in range(number - WINDOW + 1, number + 1)) for number in accuracies if number >= WINDOW}


def blocks() -> dict[str, str]:
    """Name -> text of everything on the page that is from records."""
    tables = {dataset: f"{table(dataset)}\n\n{commands(dataset)}" for dataset in FAMILIES}
    left_out = "\n".join(f"- `{name}`: {why}." for name, why in LEFT_OUT.items())
    return {**tables, **{f"{dataset}-published": published(dataset) for dataset in PUBLISHED}, "left-out": left_out}


def written(page: str) -> str:
    """The page with its blocks as the records have them."""
    made = blocks()
    missing = made.keys() - {found[2] for found in BLOCK.finditer(page)}
    if missing:
        sys.exit(f"{PAGE.name} has no place for {', '.join(sorted(missing))}")
    return BLOCK.sub(lambda found: found[1] + made[found[2]] + found[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where page and records differ")
    arguments = parser.parse_args()
    made = {PAGE: written(PAGE.read_text()).encode(), FIGURE: pictures(curves())["svg"]}
    for path, content in made.items():
        if not path.exists() or path.read_bytes() != content:
            if arguments.check:
                sys.exit(f"{path.name} is not what the records say. Write it with python benchmarks/results_page.py")
            path.write_bytes(content)
            print(f"{path.name} is new")


if __name__ == "__main__":
    main()
