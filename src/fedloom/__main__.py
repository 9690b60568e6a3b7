"""The `fedloom` command. Loading torch takes seconds; Ctrl-C ends it without a traceback also then."""

from __future__ import annotations

import sys

from fedloom.core.machine import NO_WINDOWS


def main() -> None:
    if sys.platform == "win32":
        print(f"fedloom: {NO_WINDOWS}", file=sys.stderr)
        sys.exit(1)
    try:
        from fedloom.commands.app import main as run_command

        run_command()
    except KeyboardInterrupt:
        print("fedloom: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
