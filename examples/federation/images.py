"""Images for three sites: scikit-learn's digits, of which every site has more of some than of others."""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

sites, digits = ("north", "east", "west"), load_digits()
for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
    folder = Path("images", sites[digit % 3 if number % 2 else number % 3], str(digit))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 15).astype("uint8")).save(folder / f"{number:04}.png")
