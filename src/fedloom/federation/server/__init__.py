"""The server of a federation: rounds over Flower, and every report checked before it counts."""
