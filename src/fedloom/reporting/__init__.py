"""From run folders to reports: reading them, finding runs to measure them by, and the command."""
