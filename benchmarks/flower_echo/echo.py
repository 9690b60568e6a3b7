"""What Flower costs by itself: the server sends an array to every node and waits for another one of its size from each."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


@client.query()
def answer(message: Message, context: Context) -> Message:
    (weights,) = message.content.array_records["weights"].to_numpy_ndarrays()
    # Not the same numbers: Flower carries nothing that the other side has already.
    return Message(RecordDict({"weights": ArrayRecord([weights + np.float32(context.node_id % 1000 + 1)])}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    nodes: list[int] = []
    while len(nodes) < int(settings["nodes"]):
        time.sleep(0.2)
        nodes = list(grid.get_node_ids())
    draw, seconds, wire = np.random.default_rng(0), [], []
    for _ in range(int(settings["rounds"])):
        weights = draw.standard_normal(int(settings["bytes"]) // 4, dtype=np.float32)
        before, start = loopback(), time.perf_counter()
        messages = [Message(RecordDict({"weights": ArrayRecord([weights])}), node, "query") for node in nodes]
        replies = list(grid.send_and_receive(messages))
        sums = [float(reply.content.array_records["weights"].to_numpy_ndarrays()[0].sum()) for reply in replies]
        seconds.append(time.perf_counter() - start)
        wire.append(loopback() - before)
        assert len(set(sums)) == len(nodes), sums
    partial = Path(str(settings["record"]) + ".part")
    partial.write_text(json.dumps({"seconds": seconds, "loopback_bytes": wire}))
    partial.rename(str(settings["record"]))


def loopback() -> int:
    """Bytes that this machine has sent to itself."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])
