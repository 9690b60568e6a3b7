"""What an architecture of one's own is worth (SPIDER, Mushtaq et al., TMLR 2023, Eq. 6)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def personal_gains(accuracies: Numbers) -> Numbers:
    """(clients,) g_i, the mean over j != i of p_ii - p_ij.

    accuracies: (clients, clients) p_ij, of client j's architecture on client i's data; two clients or more.
    """
    own = np.diagonal(accuracies)
    others = (accuracies.sum(1) - own) / (len(accuracies) - 1)
    gains: Numbers = own - others
    return gains
