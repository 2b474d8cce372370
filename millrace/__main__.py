"""The `millrace` command, also as `python -m millrace`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C also ends it in order while it is still imported."""
    try:
        from millrace.cli.main import main as command
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped by Ctrl-C\n")
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
