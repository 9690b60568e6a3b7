"""What does a server learn about single clients of `perfedsde`, without and with each protection?

    python benchmarks/attacks.py [key=value]... [--seeds 5] [--out benchmarks/results/attacks.json]
    python benchmarks/attacks.py --table benchmarks/results/attacks.json

Algorithm 1 as published, on digits, with the quickstart's clients. The server is honest but curious: it keeps to the rules and looks at all
that it gets, in every round. Attacks, none of them tuned on the clients:

population  The first population of a client, drawn again from the seed that the server sent. Success: share of its members that are right.
archive     Which choices of each gene the archive holds that a client trained. The server sorts the supernet's entries into groups that
            architectures train alike, looks which groups a client trained, and reads choices from that by a logistic regression on archives
            that it draws itself. Success: balanced accuracy over all choices of all genes.
labels      How a client's images are divided among the classes: the update of the classifier's bias, class by class. Success: rank
            correlation with the counts.
member      Whether an image was trained on: how much the update lowers its loss, on average over the smallest, the medium and the largest
            network. Success: area under the ROC curve, a client's training images against its validation images.

What the server gets: the report of each client (plain); the sum of a round's reports, and how many trained each entry (sums); the same
without entries that fewer than three trained (sums, least 3); reports with noise; sums with noise. "All rounds" solves for each client from
the sums of all rounds, in which different clients took part (ridge regression on who took part).

Chance is what the same guesses score against another client of the same round; for members it is one half. "Outside" is what they score
against clients that did not take part: a sum says something about all who are in it, as it must. Intervals are 95 % Student t intervals of
the differences over clients.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attack_archive import ArchiveReader
from scipy.stats import rankdata, spearmanr

from fedloom import config
from fedloom.assemble.builder import build
from fedloom.assemble.environment import environment
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientMemory, ClientSite, Examples
from fedloom.core.messages import Arrays, Instruction, Report
from fedloom.core.privacy import Departures
from fedloom.core.seeds import rng
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.engine.protection import Account, Protection, simulated
from fedloom.federation.site.secret import in_private
from fedloom.files import write_file
from fedloom.maths.paired import paired_difference
from fedloom.methods.perfedsde import PerFedSDE
from fedloom.training.local import Trainer
from fedloom.training.scoring import NetworkRequest

RESULT = Path(__file__).parent / "results" / "attacks.json"
BASE = (  # Algorithm 1; half of the clients in each of eight rounds
    *("perfedsde.anchor=", "perfedsde.warmup=0", "perfedsde.distance=1", "perfedsde.sampling=archive", "perfedsde.same_weights=false"),
    *("perfedsde.criterion=accuracy", "perfedsde.renewal=1", "perfedsde.restarts=true", "perfedsde.finalists=0", "perfedsde.drift=false"),
    "rounds=8",
)
NOISY = ("perfedsde.averaging=fedavg", "privacy.clip=1", "privacy.noise=1")
LEAST = 3
BIAS = "classifier.bias"
Arms = dict[str, dict[str, list[dict[str, float]]]]  # attack -> protection -> clients


@dataclass
class Visit:
    """One participation: what the client did, which it keeps to itself, and what it sent."""

    client: str
    round: int
    instruction: Instruction
    report: Report
    trained: Counter[Architecture] = field(default_factory=Counter)
    population: list[Architecture] = field(default_factory=list)


@dataclass
class Run:
    settings: Settings
    method: Any
    federation: Federation
    visits: list[Visit]
    weights: list[Arrays]  # that the server sent, by round
    accuracy: float  # of the last round's clients
    spent: dict[str, Any]

    def of_round(self, number: int) -> list[Visit]:
        return [visit for visit in self.visits if visit.round == number]

    def counts(self, client: str) -> np.ndarray:
        """(classes,) training images of each class."""
        labels = self.federation.data_of(client).train.labels.numpy()
        return np.bincount(labels, minlength=len(self.federation.dataset.classes))


def run(settings: Settings, secret: bool) -> Run:
    """All rounds, listening inside the clients. secret: they mix a secret of their own into the server's seed, as sites do."""
    dataset, device = read(settings.data), torch.device("cpu")
    split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
    federation, method = Federation(dataset, split, device), build(settings, dataset, device).method
    protection = Protection(settings.privacy, settings.participants, simulated(settings.seed))
    memories: dict[str, ClientMemory] = {}
    state, visits, sent, accuracies = method.start(settings.seed), [], [], []
    account, departures = Account(settings.privacy, settings.participants), Departures()
    while not method.finished(state):
        reports, sent, accuracies = [], [*sent, state.weights], []
        for instruction in method.plan(state, federation.names):
            name = instruction.client
            own = in_private(instruction, f"secret of {name}") if secret else instruction
            site = ClientSite(name, federation.data_of(name), memories.get(name, ClientMemory()))
            visit = Visit(name, instruction.round, instruction, Report(name, instruction.round))
            answer = listening(visit, method, own, site)
            memories[name], visit.report = answer.memory, protection.of(answer.report)
            departures.add(name, instruction.round, late=False)
            visits.append(visit)
            reports.append(visit.report)
            accuracies.append(answer.diary.test_accuracy or 0.0)
        state = method.absorb(state, reports)
    return Run(settings, method, federation, visits, sent, float(np.mean(accuracies)), account.spent(departures))


def listening(visit: Visit, method: Any, instruction: Instruction, site: ClientSite) -> Any:
    """A client's answer; what it trained and began with is noted in ``visit``."""
    train, first = Trainer.train_supernet, PerFedSDE._first_population

    def trained(self: Trainer, *given: Any) -> Any:
        done = train(self, *given)
        visit.trained.update(done.steps)
        return done

    def drawn(self: PerFedSDE, own: Instruction) -> list[Architecture]:
        visit.population = first(self, own)
        return visit.population

    Trainer.train_supernet, PerFedSDE._first_population = trained, drawn  # type: ignore[method-assign]
    try:
        return method.answer(instruction, site)
    finally:
        Trainer.train_supernet, PerFedSDE._first_population = train, first  # type: ignore[method-assign]


# -- what the server gets ------------------------------------------------------------------------
def summed(visits: Sequence[Visit], least: int = 1) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
    """The sum of their updates, and of how many trained each entry, if they say so. What fewer than ``least`` trained is not seen."""
    updates = {name: sum(v.report.arrays["update"][name].astype(np.float64) for v in visits) for name in visits[0].report.arrays["update"]}
    if "coverage" not in visits[0].report.arrays:
        return updates, None
    counts = {
        name: sum(np.broadcast_to(v.report.arrays["coverage"][name] > 0, array.shape).astype(np.int64) for v in visits)
        for name, array in updates.items()
    }
    seen = {name: np.where(count >= least, count, 0) for name, count in counts.items()}
    return {name: np.where(seen[name] > 0, array, 0.0) for name, array in updates.items()}, seen


def solved(visits: Sequence[Visit], values: Callable[[list[Visit]], np.ndarray]) -> dict[str, np.ndarray]:
    """client -> its part of the values that the server sees of each round, by ridge regression on who took part."""
    names, rounds = sorted({visit.client for visit in visits}), sorted({visit.round for visit in visits})
    present = np.array([[any(v.client == name and v.round == number for v in visits) for name in names] for number in rounds], float)
    seen = np.stack([values([visit for visit in visits if visit.round == number]) for number in rounds])
    found = np.linalg.solve(present.T @ present + 0.1 * np.eye(len(names)), present.T @ seen)
    return dict(zip(names, found, strict=True))


# -- attacks -----------------------------------------------------------------------------------------
Guess = dict[tuple[int, str], np.ndarray]  # (round, client) -> what the server thinks


def compared(made: Run, guesses: Guess, score: Callable[[np.ndarray, Visit], float]) -> list[dict[str, float]]:
    """Of every client the mean success of the guesses about it, and of the same guesses about others."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    latest = {visit.client: visit for visit in made.visits}
    for visit in made.visits:
        if (guess := guesses.get((visit.round, visit.client))) is None:
            continue
        inside = [other for other in made.of_round(visit.round) if other.client != visit.client]
        outside = [other for name, other in latest.items() if name not in {visit.client, *(one.client for one in inside)}]
        own = found[visit.client]
        own["success"].append(score(guess, visit))
        own["chance"].append(float(np.mean([score(guess, other) for other in inside])))
        own["outside"].append(float(np.mean([score(guess, other) for other in outside])))
    return [{name: float(np.mean(values)) for name, values in own.items()} for own in found.values()]


def label_guesses(made: Run) -> dict[str, Guess]:
    def bias(visits: list[Visit]) -> np.ndarray:
        return summed(visits)[0][BIAS]

    single = {(v.round, v.client): v.report.arrays["update"][BIAS] for v in made.visits}
    sums = {(v.round, v.client): bias(made.of_round(v.round)) for v in made.visits}
    apart, last = solved(made.visits, bias), {v.client: v.round for v in made.visits}
    return {"single": single, "sums": sums, "all rounds": {(last[name], name): found for name, found in apart.items()}}


def archive_guesses(made: Run, reader: ArchiveReader) -> dict[str, Guess]:
    clip, noise = made.settings.privacy.clip, made.settings.privacy.noise
    k = made.settings.participants
    share, last = noise * clip / k**0.5, {v.client: v.round for v in made.visits}
    found: dict[str, Guess] = {"single": {(v.round, v.client): reader.guess(reader.trained(v.report, share)) for v in made.visits}}
    if noise:

        def energy(visits: list[Visit]) -> np.ndarray:
            return reader.energy(summed(visits)[0], noise * clip).astype(float)

        found["sums"] = {(v.round, v.client): reader.guess_one_of(k * energy(made.of_round(v.round)), k) for v in made.visits}
        return found

    def counts(visits: list[Visit], least: int = 1) -> np.ndarray:
        return reader.mean_of_groups(summed(visits, least)[1] or {})

    for name, least in (("sums", 1), ("least", LEAST)):
        found[name] = {(v.round, v.client): reader.guess_one_of(counts(made.of_round(v.round), least), k) for v in made.visits}
        apart = solved(made.visits, lambda visits, least=least: counts(visits, least))  # type: ignore[misc]
        found[f"{name}, all rounds"] = {(last[client], client): reader.guess(value > 0.5) for client, value in apart.items()}
    return found


def member_scores(made: Run, sums: bool) -> list[dict[str, float]]:
    """Area under the ROC curve by client: by how much less loss an image has after the update."""
    found: dict[str, list[float]] = defaultdict(list)
    for visit in made.visits:
        data, before = made.federation.data_of(visit.client), made.weights[visit.round]
        update = summed(made.of_round(visit.round))[0] if sums else visit.report.arrays["update"]
        scale = 1 / made.settings.participants if sums else 1.0
        after = {name: (array + scale * update[name]).astype(np.float32) for name, array in before.items()}
        lower = losses(made, before, data.train, data.validation) - losses(made, after, data.train, data.validation)
        ranks, members = rankdata(lower), len(data.train)
        others = len(lower) - members
        found[visit.client].append(float((ranks[:members].sum() - members * (members + 1) / 2) / (members * others)))
    return [{"success": float(np.mean(values)), "chance": 0.5} for values in found.values()]


def losses(made: Run, weights: Arrays, *parts: Examples) -> np.ndarray:
    """(images,) on average over networks; statistics are those of the same images, which the server has if it asks for them."""
    tools, pool = made.method.tools, Examples(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))
    own, found = {name: torch.tensor(array) for name, array in weights.items()}, []
    for network in tools.space.named.values():
        (measured,) = tools.scorer.score_networks([NetworkRequest(tools.supernet.plain(own, network), network, pool, [pool], each=True)])
        found.append(measured.losses[0].numpy().astype(float))
    return np.mean(found, 0)


def population_scores(made: Run) -> list[dict[str, float]]:
    """Share of a first population that the server draws again, and that another client's has in common with it."""
    firsts = [visit for visit in made.visits if visit.population]
    drawn = [made.method._first_population(visit.instruction) for visit in firsts]
    rows = []
    for number, visit in enumerate(firsts):
        own, other = set(visit.population), set(firsts[number - 1].population)
        rows.append({"success": len(own & set(drawn[number])) / len(own), "chance": len(other & set(drawn[number])) / len(other)})
    return rows


# -- all of it ---------------------------------------------------------------------------------------
def attack(settings: Settings, overrides: Sequence[str], arms: Arms, said: dict[str, Any]) -> None:
    """One seed: a plain run, the same with clients' secrets, and one with noise."""
    plain = run(settings, secret=False)
    noisy = run(config.load("quickstart", [*BASE, *overrides, *NOISY, f"seed={settings.seed}"]), secret=False)
    hidden = run(replace(settings, rounds=1), secret=True)
    reader = ArchiveReader.of(plain.method, rng(settings.seed, "the server's own archives"), settings.participants)

    def archive_score(guess: np.ndarray, visit: Visit) -> float:
        return reader.score(guess, visit.trained)

    def labels_score(made: Run) -> Callable[[np.ndarray, Visit], float]:
        return lambda guess, visit: float(np.nan_to_num(spearmanr(guess, made.counts(visit.client)).statistic))

    def add(what: str, protection: str, rows: list[dict[str, float]]) -> None:
        arms.setdefault(what, {}).setdefault(protection, []).extend(rows)

    add("population", "plain", population_scores(plain))
    add("population", "a secret of the client's", population_scores(hidden))
    names = {"single": "plain", "sums": "sums", "least": f"sums, least {LEAST}", "sums, all rounds": "sums, all rounds"}
    names |= {"least, all rounds": f"sums, least {LEAST}, all rounds", "all rounds": "sums, all rounds"}
    for made, noise in ((plain, ""), (noisy, "noise")):
        for what, guesses, score in (
            ("archive", archive_guesses(made, reader), archive_score),
            ("labels", label_guesses(made), labels_score(made)),
        ):
            for view, guess in guesses.items():
                protection = names[view] if not noise else noise if view == "single" else f"noise, {names[view]}"
                add(what, protection, compared(made, guess, score))
        for sums in (False, True):
            view = "sums" if sums else "plain"
            add("member", view if not noise else f"noise, {view}" if sums else noise, member_scores(made, sums))
        said.setdefault("noise" if noise else "plain", []).append(made.accuracy)
    said["privacy"] = noisy.spent


def summary(arms: Arms) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for what, protections in arms.items():
        for protection, rows in protections.items():
            difference = paired_difference([row["chance"] for row in rows], [row["success"] for row in rows])
            outside = [row["outside"] for row in rows if "outside" in row]
            found.setdefault(what, {})[protection] = {
                "success": float(np.mean([row["success"] for row in rows])),
                "chance": float(np.mean([row["chance"] for row in rows])),
                "outside": float(np.mean(outside)) if outside else None,
                "difference": difference.mean,
                "low": difference.low,
                "high": difference.high,
                "clients": len(rows),
            }
    return found


def table(record: dict[str, Any]) -> str:
    """For docs/explain/privacy.md."""
    lines = ["| attack | what the server gets | success | chance | difference (95 %) | outside |", "|---|---|---|---|---|---|"]
    for what, protections in record["attacks"].items():
        for protection, row in protections.items():
            between = f"{_signed(row['difference'])} ({_signed(row['low'])} to {_signed(row['high'])})"
            shown = ["" if row[name] is None else f"{round(row[name], 2) + 0.0:.2f}" for name in ("success", "chance", "outside")]
            lines.append(f"| {what} | {protection} | {shown[0]} | {shown[1]} | {between} | {shown[2]} |")
    return "\n".join(lines)


def _signed(number: float) -> str:
    """What rounds to nothing has no sign."""
    text = f"{number:+.3f}"
    return text[1:] if float(text) == 0 else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", type=Path, help="print the table of a record, and do nothing else")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    torch.set_num_threads(1)
    arms: Arms = {}
    said: dict[str, Any] = {}
    for seed in range(arguments.seeds):
        attack(config.load("quickstart", [*BASE, *arguments.overrides, f"seed={seed}"]), arguments.overrides, arms, said)
        print(f"seed {seed} is done", flush=True)
    settings = config.load("quickstart", [*BASE, *arguments.overrides])
    record = {
        "command": " ".join(["python benchmarks/attacks.py", *arguments.overrides, f"--seeds {arguments.seeds}"]),
        "settings": [*BASE, *arguments.overrides],
        "noise": list(NOISY),
        "clients": settings.clients,
        "participants": settings.participants,
        "rounds": settings.rounds,
        "attacks": summary(arms),
        "accuracy": {name: said[name] for name in ("plain", "noise")},
        "privacy": said["privacy"],
        "environment": environment(torch.device("cpu")),
    }
    write_file(arguments.out, (json.dumps(record, indent=1) + "\n").encode())
    print(table(record))


if __name__ == "__main__":
    main()
