"""What stands for `fedloom run` in tests of comparisons: it starts at once and does what it is told."""

from __future__ import annotations

# Stands for `fedloom run`: does for each METHOD-SEED what orders.json says, and leaves a result of the accuracies it names.
STANDING_IN = """
import json, os, sys, time
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
name = f"{given['method']}-{given['seed']}"
folder = Path(json.loads(given["run.folder"]))
order = json.loads(Path("orders.json").read_text()).get(name, {}) if Path("orders.json").exists() else {}
folder.mkdir(parents=True)
(folder / "pid").write_text(str(os.getpid()))
while not all(list(Path().rglob(f"{other}/pid")) for other in order.get("wait_for", ())):
    time.sleep(0.01)
alone = len([pid for pid in Path().rglob("pid") if not (pid.parent / "result.json").exists()]) == 1
(folder / "alone").write_text(str(alone))
event = {"kind": "round", "done": 1, "rounds": 2, "models": 0, "clients": 2, "participants": 2}
print("no event\\n" + json.dumps(event), flush=True)
time.sleep(order.get("sleep", 0))
if "signal" in order:
    os.kill(os.getpid(), order["signal"])
if "exit" in order:
    print("Warning: something\\nfedloom: it cannot be", file=sys.stderr)
    sys.exit(order["exit"])
other = {"validation_accuracy": 1, "architecture": "", "parameters": 1, "macs": 1, "train_examples": 1, "test_examples": 1}
clients = [{**other, "name": f"client-{k}", "test_accuracy": a} for k, a in enumerate(order.get("accuracies", [0.5, 0.75]))]
result = {"schema": "fedloom.result/1", "finished": True, "clients": clients, "accuracy": {"mean": 0.625, "std": 0.125},
          "method": given["method"], "space": "", "dataset": order.get("dataset", ""), "protocol": "clean", "seed": 0,
          "rounds": 2, "uploads": [],
          "cost": {"seconds": 1.5, "bytes_up": 2500000, "bytes_down": 0, "stages": {}}, "environment": order.get("environment", {})}
(folder / "state").mkdir()
if order.get("split", "") is not None:
    (folder / "state" / "split.safetensors").write_text(order.get("split", given["seed"]))
(folder / "result.json").write_text(order.get("result", json.dumps(result)))
"""
