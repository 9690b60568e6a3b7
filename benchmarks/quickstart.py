"""Does the quickstart's search beat local training on the same split? Several methods, several seeds.

python benchmarks/quickstart.py [--seeds 0,1,2] [--methods perfedsde,local,fedavg] [--set local.epochs=60] [--name quickstart]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from fedloom import config
from fedloom.assemble import new_run
from fedloom.report.terminal.live import LiveView

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default="perfedsde,local,fedavg")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    parser.add_argument("--name", default="quickstart", help="of the record")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rows = []
    for seed in seeds:
        for method in arguments.methods.split(","):
            with tempfile.TemporaryDirectory() as folder, LiveView(Console(quiet=True)) as view:
                settings = config.load("quickstart", [f"method={method}", f"seed={seed}", *arguments.set])
                result = json.loads(new_run(settings, Path(folder) / "run", view).to_json())
            row = {"seed": seed, "method": method, **result["accuracy"], "seconds": result["cost"]["seconds"]}
            row["architectures"] = len({client["architecture"] for client in result["clients"]})
            rows.append(row)
            print(
                f"seed {seed}  {method:10} {row['mean']:.2%} ± {row['std']:.2%} over clients, "
                f"{row['architectures']} architectures, {row['seconds']:.1f} s",
                flush=True,
            )
    means = {method: sum(r["mean"] for r in rows if r["method"] == method) / len(seeds) for method in arguments.methods.split(",")}
    print("mean over seeds: " + ", ".join(f"{method} {mean:.2%}" for method, mean in means.items()))
    record = {"command": " ".join(["python", *sys.argv]), "environment": result["environment"], "means": means, "rows": rows}
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
