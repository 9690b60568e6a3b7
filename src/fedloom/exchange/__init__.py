"""Files that go in and out: foreign weights, weights of supernets, exported networks, predictions."""

from fedloom.exchange.models import load_model
from fedloom.exchange.weights import load_supernet

__all__ = ["load_model", "load_supernet"]
