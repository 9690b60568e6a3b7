"""A member's site: its own images, its answers, and a log of what left."""
