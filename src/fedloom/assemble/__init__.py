"""From settings to objects: the one place that knows which part goes where."""

from fedloom.assemble.simulation import Reopened, free_folder, new_run, reopen_run, resume_run, saved_outline, saved_settings

__all__ = ["Reopened", "free_folder", "new_run", "reopen_run", "resume_run", "saved_outline", "saved_settings"]
