"""Your own images: a folder with a folder for each class, a federation on it, and a model file to hand on.

    python examples/own_images.py                       # about a minute of one core
    python examples/own_images.py clients=4 rounds=5    # any setting by key=value
    python examples/own_images.py --onnx                # the model as ONNX; needs the extra: pip install 'fedloom[export]'

The pictures are made here, from the digits that come with scikit-learn, so that there is something to run on. With pictures of
your own, leave out `write_pictures` and name your folder in `data.folder`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits

from fedloom import config
from fedloom.assemble import free_folder, new_run
from fedloom.models import load_model
from fedloom.models.export import to_onnx, to_safetensors
from fedloom.models.predict import predict, read_model
from fedloom.report.terminal.live import LiveView

CLASSES = ("zero", "one", "two", "three", "four")


def write_pictures(folder: Path) -> None:
    """pictures/zero/0.png, …: images may be png, jpg or webp, of any size, in colour or not."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):  # (8, 8), from 0 to 16
        if label < len(CLASSES):
            place = folder / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 255 / 16).astype("uint8")).resize((20, 20)).save(place / f"{number}.png")


def main() -> None:
    pictures = Path("pictures")
    if not pictures.exists():
        write_pictures(pictures)

    # The folder instead of the preset's digits. Images are converted to RGB and resized to data.image_size; a fifth of each class is
    # set aside for testing. `split.rule` and `split.alpha` say how unlike the clients are.
    own = ["data.name=folder", f"data.folder={pictures}", "data.image_size=10", "clients=6", "participants=3"]
    said = [argument for argument in sys.argv[1:] if argument != "--onnx"]
    settings = config.load("quickstart", [*own, *said])
    folder = Path(settings.run.folder) if settings.run.folder else free_folder("example-own-images")
    with LiveView(Console(), f"{settings.method} on {pictures}, into {folder}") as view:
        result = new_run(settings, folder, view)
    client = max(result.clients, key=lambda one: one.train_examples)
    print(f"{client.name} has the most images and a network of its own: {client.test_accuracy:.1%} of its test images")

    # A file that needs no run folder. Safetensors are read by Fedloom; ONNX runs without it, and without torch.
    network, facts = load_model(folder / "clients" / client.name / "model.safetensors")
    ending, write = ("onnx", to_onnx) if "--onnx" in sys.argv else ("safetensors", to_safetensors)
    model = folder / f"{client.name}.{ending}"
    write(model, network, facts)
    print(f"{model}: {client.architecture}, {client.parameters:,} parameters, {len(facts['classes'])} classes")

    # What `fedloom predict MODEL IMAGE…` does: size, channels and normalisation come from the file's own description. A personal network
    # is good at what its own client has; of classes that the client hardly has, it need not know much.
    images = [next(iter(sorted((pictures / name).iterdir()))) for name in facts["classes"]]
    seen, unreadable = predict(read_model(model), images, top=2)
    for one in seen:
        print(f"{one.image}: {', '.join(f'{name} {probability:.0%}' for name, probability in one.classes)}")
    for name, reason in unreadable.items():
        print(f"{name} cannot be read: {reason}")


if __name__ == "__main__":
    main()
