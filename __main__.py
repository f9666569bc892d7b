"""`python -m shardmesh <command>`: what needs no program of your own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .sharding.plan import command as plan_command


class _Parser(argparse.ArgumentParser):
    """Errors as one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments (by default those of the process) name; without one, prints help.

    Returns: the exit status.
    Raises: SystemExit with status 2, after a line on stderr, for arguments that make no sense.
    """
    parser = _Parser(
        prog="python -m shardmesh",
        description="Sharded tensors on N-D device meshes.",
        epilog=f"example:\n{plan_command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_command.add_to(parser.add_subparsers(title="commands"))
    parsed = parser.parse_args(arguments)
    if "run" not in parsed:
        parser.print_help()
        return 0
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
