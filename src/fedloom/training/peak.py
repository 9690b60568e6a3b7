"""Memory as the device shows it: what a stretch of work took at its highest."""

from __future__ import annotations

import torch


class MeasuredPeak:
    """Counts from where it is made; what lay on the GPU before does not count."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._before = device, torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def megabytes(self) -> float:
        torch.cuda.synchronize(self.device)
        return max(0, torch.cuda.max_memory_allocated(self.device) - self._before) / 1e6


def allowed_bytes(device: torch.device) -> float:
    """What this process may take of a GPU's memory: workers that share a GPU share it."""
    return torch.cuda.get_per_process_memory_fraction(device) * torch.cuda.get_device_properties(device).total_memory
