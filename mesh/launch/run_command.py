"""`shardmesh run`: start a program on a mesh of local processes, or by torchrun.

    shardmesh run train.py --mesh dp=2,tp=2 --lr 0.1       4 local processes of train.py --lr 0.1
    shardmesh run --nnodes 2 ... train.py --mesh dp=8      torchrun --nnodes 2 ... train.py

`--mesh` is read and taken out, up to an argument `--`; everything else is passed on unread.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..abstract_mesh import AbstractMesh, parse_mesh
from ..text import shortened
from .environment import MESH
from .local_processes import LaunchError, check_process_count, launch, usable_cores

EXAMPLE = """\
  python -m shardmesh run train.py --mesh dp=2,tp=2 --lr 0.1
"""
USAGE = """\
usage: shardmesh run PROGRAM.py --mesh NAME=SIZE,... [arguments of the program]
       shardmesh run -m MODULE --mesh NAME=SIZE,... [arguments of the program]
       shardmesh run TORCHRUN-OPTIONS PROGRAM.py [--mesh NAME=SIZE,...] [arguments of the program]

Starts a process for each rank of the mesh, on this machine. The program takes the mesh from
sm.mesh_from_env(), which reads the environment variable SHARDMESH_MESH.

If the first argument is an option, such as --nnodes or --nproc-per-node, all arguments but --mesh
go to torchrun as they are. Arguments after -- are the program's, also one that is --mesh.

Ctrl-C and SIGTERM ask the ranks to end: a program that calls sm.training.reached_preemption saves
its work. A second one ends them at once.
"""
_LONGEST = 1000  # characters of an error


def add_to(commands: Any) -> None:
    """List the command in the help of an argparse parser's subparsers."""
    commands.add_parser(
        "run", help="start a program on a mesh of processes, here or by torchrun", add_help=False
    )


def run(arguments: Sequence[str], prog: str) -> int:
    """Run the command with the arguments after its name; return the exit status.

    The arguments are those of another program, which argparse would take for its own.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    try:
        mesh, rest = _split(arguments)
        if rest in ([], ["-m"]):
            raise ValueError("write the program to run, as in run train.py --mesh dp=4")
        if rest[0].startswith("-") and rest[0] != "-m":
            return _run_torchrun(mesh, rest)
        if mesh is None:
            raise ValueError(
                "write --mesh with the axes and their sizes, as in --mesh dp=2,tp=2; or options of "
                "torchrun before the program"
            )
        is_module = rest[0] == "-m"
        program = rest[1] if is_module else rest[0]
        if not is_module and not os.path.isfile(program):
            raise ValueError(f"there is no file {shortened(program)!r}")
        _check_size(mesh)
    except ValueError as error:
        print(f"{prog} run: error: {shortened(error, _LONGEST)}", file=sys.stderr)
        return 2
    return _run_here(mesh, program, rest[2 if is_module else 1 :], is_module, prog)


def _split(arguments: Sequence[str]) -> tuple[AbstractMesh | None, list[str]]:
    """Return the mesh, and the arguments without it and without the first `--`.

    Raises: ValueError for what is no mesh.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, rest = list(arguments[:end]), list(arguments[end + 1 :])
    text = None
    for at, argument in enumerate(own):
        name, has_value, value = argument.partition("=")
        if name == "--mesh":
            if not has_value and at + 1 == len(own):
                raise ValueError("--mesh has no value; write the axes, as in --mesh dp=2,tp=2")
            text = value if has_value else own[at + 1]
            del own[at : at + (1 if has_value else 2)]
            break
    return None if text is None else parse_mesh(text), own + rest


def _check_size(mesh: AbstractMesh) -> None:
    try:
        check_process_count(mesh.size(), usable_cores())
    except ValueError as error:
        raise ValueError(
            f"{error}; for several hosts, write options of torchrun, such as --nnodes, before the "
            "program"
        ) from None


def _text_of(mesh: AbstractMesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


def _run_torchrun(mesh: AbstractMesh | None, arguments: Sequence[str]) -> int:
    """Replace this process by torchrun."""
    if mesh is not None:
        os.environ[MESH] = _text_of(mesh)
    sys.stdout.flush()
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    os.execv(sys.executable, command)


def _run_here(
    mesh: AbstractMesh, program: str, arguments: Sequence[str], is_module: bool, prog: str
) -> int:
    environment = {MESH: _text_of(mesh)}
    try:
        with _ctrl_c_as_sigterm() as interrupted:
            launch(
                _run_program, mesh.size(), (program, list(arguments), is_module), env=environment
            )
    except LaunchError as error:
        cause = error.__cause__
        if isinstance(cause, SystemExit):
            if isinstance(cause.code, int):
                return cause.code  # the program has said why
            print(cause.code, file=sys.stderr)
        else:
            print(f"{prog} run: {error}", file=sys.stderr)
        return 1
    except SystemExit as end:
        return 128 + signal.SIGINT if interrupted else int(end.code or 0)
    return 128 + signal.SIGINT if interrupted else 0


def _run_program(program: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run a program in a rank as `python program` or `python -m program` does."""
    sys.argv = [program, *arguments]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        runpy.run_path(program, run_name="__main__")


@contextmanager
def _ctrl_c_as_sigterm() -> Iterator[list[int]]:
    """Handle Ctrl-C as SIGTERM, which `launch` forwards to the ranks; yield what was pressed."""
    interrupted: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        interrupted.append(number)
        if len(interrupted) == 1:
            line = "\ninterrupted: the ranks are asked to end; Ctrl-C again ends them at once\n"
            os.write(2, line.encode())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGINT, forward)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
