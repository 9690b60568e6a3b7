"""The generator as the papers describe it, kept as the reference."""
