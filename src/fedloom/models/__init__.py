"""Files that go in and out: foreign weights, weights of supernets, exported networks, predictions."""

from fedloom.models.personal import load_model
from fedloom.models.supernet_weights import load_supernet

__all__ = ["load_model", "load_supernet"]
