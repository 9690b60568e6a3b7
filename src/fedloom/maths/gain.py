"""What an architecture of one's own is worth (SPIDER, Mushtaq et al., TMLR 2023, Eq. 6)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def personal_gains(accuracies: Numbers) -> Numbers:
    """(clients,) g_i, the mean over j != i of p_ii - p_ij.

    accuracies: (clients, clients) p_ij, of client j's architecture on client i's data; two clients or more.
    """
    lead = np.diagonal(accuracies)[:, None] - accuracies  # zero on the diagonal
    gains: Numbers = lead.sum(1) / (len(accuracies) - 1)
    return gains
