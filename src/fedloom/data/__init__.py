"""Data sets, their division among clients, and batched augmentation."""
