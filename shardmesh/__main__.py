"""The command `shardmesh`, also `python -m shardmesh`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardmesh.mesh.doctor import command as doctor_command
from shardmesh.mesh.launch import run_command
from shardmesh.mesh.monitor.ledger import command as ledger_command
from shardmesh.mesh.text import shortened
from shardmesh.sharding.checkpoint import convert_command
from shardmesh.sharding.debug import plan_command
from shardmesh.sharding.tune import command as tune_command

_MODULE = "python -m shardmesh"
_COMMANDS = (
    run_command,
    plan_command,
    tune_command,
    doctor_command,
    ledger_command,
    convert_command,
)
_LONGEST = 1000  # characters of an error


class _Parser(argparse.ArgumentParser):
    """Errors as one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shortened(message, _LONGEST)}\n")


def _prog() -> str:
    """Return how the command was called: as `shardmesh`, or as a module."""
    name = Path(sys.argv[0]).name
    return name if name == "shardmesh" else _MODULE


def _examples(prog: str) -> str:
    return "".join(command.EXAMPLE for command in _COMMANDS).replace(_MODULE, prog)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments (by default the process's) name; with none, prints help.

    Returns: the exit status; 130 after Ctrl-C.
    Raises: SystemExit with status 2, after a line on stderr, for arguments that make no sense.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prog = _prog()
    if arguments[:1] == ["run"]:
        return run_command.run(arguments[1:], prog)
    parser = _Parser(
        prog=prog,
        description="Sharded tensors on N-D device meshes.",
        epilog="examples:\n" + _examples(prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands")
    for command in _COMMANDS:
        command.add_to(commands)
    parsed = parser.parse_args(arguments)
    if "run" not in parsed:
        parser.print_help()
        return 0
    try:
        return parsed.run(parsed)
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
