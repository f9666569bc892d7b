"""`python -m shardmesh plan`: explain a redistribution on the command line."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeVar

import torch

from ...kernels.quantize import FORMATS
from ...mesh.abstract_mesh import parse_mesh
from ...mesh.text import shortened, whole_number
from ...mesh.topology import Topology
from ..layout.layout import Layout, dtype_name
from ..layout.spec import P, Partial, Placement, Replicate, Shard, SpecLike
from .explain import explain

EXAMPLE = """\
  python -m shardmesh plan --mesh dp=2,tp=4 --shape 4096,4096 \
--dtype bf16 "P('dp','tp')" "P('tp','dp')"
"""
_SPELLINGS = """\
FROM and TO are specs or placements, in quotes because of the shell:
  "P('dp', ('tp', 'cp'), None, unreduced={'ep'})"     also unreduced={'ep': 'max'},
                                                      sizes={'dp': (3, 0, 5)}
  "[Shard(0), Replicate(), Partial('sum')]"           one for each axis of the mesh
"""
_MOST_ELEMENTS = 1 << 62
T = TypeVar("T")


def add_to(commands: Any) -> None:
    """Add the command to argparse subparsers; its `run` takes the parsed arguments."""
    parser = commands.add_parser(
        "plan",
        help="how a tensor gets from one layout to another: steps, bytes, bounds, memory, time",
        description=(
            "Explain the redistribution of a tensor from one layout to another. Needs no devices."
        ),
        epilog=f"{_SPELLINGS}\nexample:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", metavar="FROM", type=_argument(parse_spec), help="the layout before")
    add("dst", metavar="TO", type=_argument(parse_spec), help="the layout after")
    add(
        "--mesh",
        required=True,
        metavar="NAME=SIZE,...",
        type=_argument(parse_mesh),
        help="the mesh's axes, major to minor",
    )
    add(
        "--shape",
        required=True,
        metavar="SIZE,...",
        type=_argument(parse_shape),
        help="the tensor's global shape",
    )
    add(
        "--dtype",
        default=torch.float32,
        metavar="NAME",
        type=_argument(parse_dtype),
        help="its element type (f32)",
    )
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="whose latencies and bandwidths to assume (cuda)",
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument(
        "--node-size",
        metavar="RANKS",
        type=int,
        help="number of consecutive ranks that share a node (all)",
    )
    nodes.add_argument(
        "--crossing", default=(), metavar="AXIS,...", type=_names, help="axes between nodes (none)"
    )
    add(
        "--max-bytes",
        metavar="BYTES",
        type=int,
        help="the most bytes that a rank may hold at one time (no limit)",
    )
    add(
        "--transport",
        choices=FORMATS,
        help="8-bit format in which 16- and 32-bit floats are sent (their own dtype)",
    )
    add("--json", action="store_true", help="print the same as JSON")
    add(
        "--picture",
        metavar="FILE",
        help=(
            "draw which rank holds which part into a .png, .svg or .pdf file; needs shardmesh[viz]"
        ),
    )


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        src = Layout.of(arguments.mesh, arguments.src, arguments.shape, arguments.dtype)
        topology = Topology.default(arguments.device, arguments.node_size, arguments.crossing)
        limits = {"max_bytes": arguments.max_bytes, "transport": arguments.transport}
        explained = explain(src, arguments.dst, topology=topology, **limits)
        if arguments.picture == "":
            raise ValueError("--picture '': write the name of a file, such as plan.png")
        if arguments.picture:
            explained.picture(arguments.picture)
    except (ValueError, TypeError, ArithmeticError, ImportError, OSError) as error:
        parser.error(shortened(str(error), 1000))
    print(json.dumps(explained.as_dict(), indent=2) if arguments.json else explained)
    return 0


# -- parsing arguments -----------------------------------------------------------------------------


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the function with errors that argparse shows, unlike ValueError and TypeError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(shortened(str(error), 1000)) from None

    return parsed


def parse_shape(text: str) -> tuple[int, ...]:
    """parse_shape("4096,4096") -> (4096, 4096); "" is the shape of a scalar. Raises: ValueError."""
    sizes = [size.strip() for size in text.split(",")] if text.strip() else []
    if None in map(whole_number, sizes):
        raise ValueError(
            f"{shortened(text)!r} is not a shape; write the size of each dim, as in 4096,4096"
        )
    if prod(map(int, sizes)) > _MOST_ELEMENTS:
        raise ValueError(
            f"{shortened(text)!r} has more than 2**62 elements; write the size of each dim, as in "
            "4096,4096"
        )
    return tuple(map(int, sizes))


def parse_dtype(text: str) -> torch.dtype:
    """parse_dtype("bf16") -> torch.bfloat16, also for "bfloat16" and so on. Raises: ValueError."""
    by_name = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    short = {
        dtype_name(dtype): dtype for name, dtype in by_name.items() if dtype_name(dtype) != name
    }
    parsed = (by_name | short).get(text.removeprefix("torch."))
    if parsed is None:
        known = ", ".join(f"{name} ({dtype})" for name, dtype in sorted(short.items()))
        raise ValueError(
            f"unknown dtype {shortened(text)!r}; write one of {known}, bool, or the name of "
            "another torch dtype"
        )
    return parsed


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def parse_spec(text: str) -> SpecLike:
    """parse_spec("P('dp', None)") -> P('dp', None): a spec or placements, written as in Python.

    Only calls of `P`, `Shard`, `Replicate` and `Partial` with literal arguments are understood;
    nothing is evaluated.

    Raises:
        ValueError, TypeError: the text is something else, or the spec contradicts itself.

    >>> parse_spec("P('dp', ('tp', 'cp'), None, unreduced={'ep'})")
    P('dp', ('tp', 'cp'), None, unreduced={'ep'})
    >>> parse_spec("[Shard(0), Replicate(), Partial('max')]")
    [Shard(0), Replicate(), Partial('max')]
    """
    node = _expression(text)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_call_known(part, text, _PLACEMENTS) for part in node.elts]
    return _call_known(node, text, _SPECS)


_PLACEMENTS: Mapping[str, Callable[..., Placement]] = {
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
}
_SPECS: Mapping[str, Callable[..., P]] = {"P": P, "PartitionSpec": P}


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _not_a_spec(text) from None


def _call_known(node: ast.expr, text: str, known: Mapping[str, Callable[..., T]]) -> T:
    """Return the result of calling one of the known names with literals as arguments."""
    if not (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known
    ):
        raise _not_a_spec(text)
    if not all(keyword.arg for keyword in node.keywords):
        raise _not_a_spec(text)
    try:
        args = [ast.literal_eval(part) for part in node.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise _not_a_spec(text) from None
    return known[node.func.id](*args, **named)


def _not_a_spec(text: str) -> ValueError:
    return ValueError(
        "expected a spec or placements in quotes, such as P('dp', None, unreduced={'tp'}) or "
        f"[Shard(0), Replicate()], got {shortened(text)!r}"
    )
