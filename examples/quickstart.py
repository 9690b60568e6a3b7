"""A federation from Python: choose settings, run it, read the results, and look at images with one client's own network.

    python examples/quickstart.py                           # the preset as it is: about a minute
    python examples/quickstart.py method=fedavg rounds=3    # any setting by key=value, as on the command line

Nothing is downloaded: the images are the digits that come with scikit-learn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console

from fedloom import config
from fedloom.assemble import free_folder, new_run, reopen_run
from fedloom.models import load_model
from fedloom.report.terminal.live import LiveView


def main() -> None:
    # 1. Settings: a preset (or a file.toml), and what you want otherwise. A wrong key is refused here, with a suggestion.
    settings = config.load("quickstart", sys.argv[1:])

    # 2. Run. Everything is kept in the folder: stopped at any moment, `fedloom resume FOLDER` goes on.
    #    LiveView shows the rounds; any object with the functions of fedloom.engine.run.Watcher will do.
    folder = Path(settings.run.folder) if settings.run.folder else free_folder("example-quickstart")
    with LiveView(Console(), f"{settings.method} on {settings.data.name}, into {folder}") as view:
        result = new_run(settings, folder, view)

    # 3. Results: one line for each client, of the model that it chose on its own validation images. result.json holds the same.
    print(f"\n{'client':12} {'test':>6} {'parameters':>11}  architecture")
    for client in sorted(result.clients, key=lambda one: -one.test_accuracy):
        print(f"{client.name:12} {client.test_accuracy:6.1%} {client.parameters:11,}  {client.architecture[:40]}…")
    left = ", ".join(sorted(result.ledger.uploads)) or "nothing"
    print(f"What left the clients: {left}; {result.ledger.bytes_up / 1e6:.1f} MB in {result.rounds} rounds")

    # 4. One client's network: a plain torch module in evaluation mode, and a description that says what to feed it with.
    best = max(result.clients, key=lambda one: one.test_accuracy)
    network, facts = load_model(folder / "clients" / best.name / "model.safetensors")

    # 5. This client's test images. In a simulation they can be asked for; in a real federation only the client itself has them.
    test = reopen_run(folder).federation.data_of(best.name).test
    mean, std = (torch.tensor(facts[name]).view(1, -1, 1, 1) for name in ("mean", "std"))  # one number for each channel
    with torch.no_grad():
        logits = network((test.images.cpu() / 255 - mean) / std)  # (images, classes)
    seen, true = logits.argmax(1), test.labels.cpu()
    for image in range(min(5, len(true))):
        print(f"image {image}: {best.name} sees {facts['classes'][seen[image]]!r}, it is {facts['classes'][true[image]]!r}")
    accuracy = (seen == true).float().mean().item()
    print(f"{best.name}: {accuracy:.1%} of its {len(true)} test images, and the result says {best.test_accuracy:.1%}")


if __name__ == "__main__":
    main()
