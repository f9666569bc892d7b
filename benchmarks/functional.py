"""Host time of the functional API: entering and leaving a mapped function, its collectives, and
type checking.

    python benchmarks/functional.py                        tables on the terminal, about six minutes
    python benchmarks/functional.py --only collectives     one of: boundary, collectives, operators
    python benchmarks/functional.py --json figures.json --markdown tables.md

One process is rank 0 of 8 on torch's `fake` backend: collectives return at once, so the time is
that of Python and the dispatcher. Ours is compared with raw calls of torch.distributed, torch's
functional collectives, DTensor's `local_map`, and spmd_types with and without its checker, if it is
installed (`pip install spmd-types --no-deps`).

Every implementation runs a case many times in a row inside its own context (a mapped function, an
enabled checker), which spreads the cost of entering it, and all are interleaved in every round (see
measure.py). Times are minima, differences are between minima, ratios between medians.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dispatch import DTENSOR, PLAIN, CaseTimes, merged
from functional_setup import AXIS, IN_A_ROW, Setup, in_a_row, our_spec, their_placements
from measure import Call, Times, interleaved
from raw_collectives import CASES, ByHand, CollectiveCase
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor
from torch.distributed.tensor.experimental import local_map

import shardmesh as sm
from shardmesh import P

ONCE = "check=True"
NEVER = "check=False"
ALWAYS = 'check="always"'
OUR_LOCAL_MAP = "sm.compat.local_map"
FUNCTIONAL, SPMD, SPMD_CHECKED = "functional", "spmd_types", "spmd_types checked"
CHECKS = {ONCE: True, NEVER: False, ALWAYS: "always"}


@dataclass(frozen=True)
class FunctionalConfig:
    """How many rounds to measure."""

    rounds: int
    passes: int
    batch_s: float


FULL = FunctionalConfig(rounds=20, passes=3, batch_s=2e-3)
QUICK = FunctionalConfig(rounds=1, passes=1, batch_s=0)


def timed(
    case: str, calls: dict[str, Call], config: FunctionalConfig, count: int = IN_A_ROW
) -> CaseTimes:
    """Return the time per call, where each implementation makes `count` calls in a row."""
    times = interleaved(calls, rounds=config.rounds, batch_s=config.batch_s)
    return CaseTimes(
        case, {name: Times(tuple(s / count for s in t.rounds)) for name, t in times.items()}
    )


# -- entering and leaving --------------------------------------------------------------------------

PARAMETERS = 20


@dataclass(frozen=True)
class Boundary:
    """A function that does almost nothing, to measure the cost of mapping it.

    Attributes:
        name: name of the case.
        f: the function.
        dims: the dim along which each input is sharded; None for a replicated input.
        outs: the same for the outputs.
        in_dict: whether the inputs are one dict of tensors.
        backward: whether to compute gradients.
    """

    name: str
    f: Callable[..., Any]
    dims: Sequence[int | None]
    outs: Sequence[int | None]
    in_dict: bool = False
    backward: bool = False

    def arguments(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of the function."""
        return ({f"p{i}": x for i, x in enumerate(tensors)},) if self.in_dict else tuple(tensors)


def _first_of(params: dict[str, Tensor]) -> Tensor:
    return params["p0"].view_as(params["p0"])


def _all_of(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.view_as(x) for name, x in params.items()}


_EVERY: tuple[int | None, ...] = (None,) * PARAMETERS
BOUNDARIES = (
    Boundary("2 arguments, 1 result", lambda x, w: x.view_as(x), (0, None), (0,)),
    Boundary(
        "2 arguments, 2 results", lambda x, w: (x.view_as(x), w.view_as(w)), (0, None), (0, None)
    ),
    Boundary("x * y, forward + backward", lambda x, y: x * y, (0, 0), (0,), backward=True),
    Boundary(f"{PARAMETERS} parameters, 1 result", _first_of, _EVERY, (None,), in_dict=True),
    Boundary(f"{PARAMETERS} parameters in and out", _all_of, _EVERY, _EVERY, in_dict=True),
)


def time_boundary(setup: Setup, config: FunctionalConfig) -> Iterator[CaseTimes]:
    """Time calls of mapped functions that do almost nothing."""
    for boundary in BOUNDARIES:
        for grad in (True,) if boundary.backward else (False, True):
            calls = _boundary_calls(setup, boundary, grad)
            yield timed(
                f"{boundary.name}{', grad' if grad and not boundary.backward else ''}",
                calls,
                config,
            )


def _boundary_calls(setup: Setup, boundary: Boundary, grad: bool) -> dict[str, Call]:
    local = [torch.randn(4, 8, requires_grad=grad) for _ in boundary.dims]
    ours = [setup.our(x, dim) for x, dim in zip(local, boundary.dims, strict=True)]
    theirs = [setup.their(x, dim) for x, dim in zip(local, boundary.dims, strict=True)]
    calls = {
        PLAIN: _bound(boundary, boundary.f, local),
        DTENSOR: _bound(boundary, _their_map(boundary), theirs),
    }
    mapped = {name: _our_map(setup, boundary, check) for name, check in CHECKS.items()}
    mapped[OUR_LOCAL_MAP] = _our_local_map(boundary)
    calls |= {name: _bound(boundary, f, ours) for name, f in mapped.items()}
    rows = {name: in_a_row(call) for name, call in calls.items()}
    return rows if setup.spmd is None else rows | _spmd_boundary(setup, boundary, local)


def _bound(boundary: Boundary, f: Callable[..., Any], tensors: Sequence[Any]) -> Call:
    arguments = boundary.arguments(tensors)
    if not boundary.backward:
        return lambda: f(*arguments)
    seed = f(*arguments).detach()
    return lambda: torch.autograd.grad(f(*arguments), tensors, seed)


def _tree(boundary: Boundary, leaves: Sequence[Any]) -> Any:
    """Return specs in the tree structure of the results."""
    if len(leaves) == 1:
        return leaves[0]
    return boundary.arguments(leaves)[0] if boundary.in_dict else tuple(leaves)


def _our_map(setup: Setup, boundary: Boundary, check: Any) -> Callable[..., Any]:
    in_specs = boundary.arguments([our_spec(dim) for dim in boundary.dims])
    out_specs = _tree(boundary, [our_spec(dim) for dim in boundary.outs])
    return sm.shard_map(
        boundary.f, mesh=setup.ours, in_specs=in_specs, out_specs=out_specs, check=check
    )


def _our_local_map(boundary: Boundary) -> Callable[..., Any]:
    return sm.compat.local_map(
        boundary.f, tuple(map(our_spec, boundary.outs)), tuple(map(our_spec, boundary.dims))
    )


def _their_map(boundary: Boundary) -> Callable[..., Any]:
    ins = tuple(map(their_placements, boundary.dims))
    outs = tuple(map(their_placements, boundary.outs))
    return local_map(boundary.f, outs, ins)


def _spmd_boundary(setup: Setup, boundary: Boundary, local: Sequence[Tensor]) -> dict[str, Call]:
    """Return calls of spmd_types' `local_map`, which takes local tensors; its checker ignores
    backward.
    """
    spmd, group = setup.spmd, setup.group
    ins, outs = (
        [{group: spmd.R if dim is None else spmd.S(dim)} for dim in dims]
        for dims in (boundary.dims, boundary.outs)
    )
    mapped = spmd.local_map(in_types=boundary.arguments(ins), out_types=_tree(boundary, outs))(
        boundary.f
    )
    call = _bound(boundary, mapped, local)
    rows = {SPMD: in_a_row(call)}
    if not boundary.backward:
        with setup.checked():
            for x, types in zip(local, ins, strict=True):
                spmd.assert_type(x, types)
        rows[SPMD_CHECKED] = in_a_row(call, setup.checked)
    return rows


# -- collectives -----------------------------------------------------------------------------------


def time_collectives(setup: Setup, config: FunctionalConfig) -> Iterator[CaseTimes]:
    """Time each collective on contiguous buffers: forward without and with an autograd graph, and
    forward with backward.
    """
    for case in CASES:
        yield timed(case.name, _collective_calls(setup, case, False, False), config)
        if case.differentiable:
            yield timed(f"{case.name}, grad", _collective_calls(setup, case, True, False), config)
            yield timed(
                f"{case.name}, forward + backward",
                _collective_calls(setup, case, True, True),
                config,
            )


def _collective_calls(
    setup: Setup, case: CollectiveCase, grad: bool, backward: bool
) -> dict[str, Call]:
    x = torch.randn(case.shape, requires_grad=grad)
    raw = ByHand(case.raw, case.back) if grad else case.raw
    known = case.back is not None  # only our pmax has a gradient
    theirs = {
        PLAIN: raw if known or not grad else None,
        FUNCTIONAL: case.functional if known or not backward else None,
    }
    calls = {
        name: in_a_row(_step(partial(f, setup.group), x, backward))
        for name, f in theirs.items()
        if f is not None
    }
    for name, check in ((NEVER, False), (ALWAYS, "always")):
        if not (backward and check):
            calls[name] = _inside(setup, case.ours, x, backward, check)
    if setup.spmd is not None and case.spmd is not None:
        step = _step(partial(case.spmd, setup.spmd, setup.group), x, backward)
        calls[SPMD] = in_a_row(step)
        if not backward:
            with setup.checked():
                setup.spmd.assert_type(x, {setup.group: case.spmd_type(setup.spmd)})
            calls[SPMD_CHECKED] = in_a_row(step, setup.checked)
    return calls


def _step(run: Callable[[Tensor], Any], x: Tensor, backward: bool) -> Call:
    if not backward:
        return lambda: run(x)
    seed = torch.ones_like(run(x))
    return lambda: torch.autograd.grad(run(x), x, seed)


def _inside(
    setup: Setup, run: Callable[[Tensor], Any], x: Tensor, backward: bool, check: Any
) -> Call:
    """Return a call of a mapped function that makes many calls."""

    def body(x: Tensor) -> Tensor:
        in_a_row(_step(run, x, backward))()
        return x

    mapped = sm.shard_map(body, mesh=setup.ours, in_specs=P(AXIS), out_specs=P(AXIS), check=check)
    return partial(mapped, setup.our(x, 0))


# -- operators inside ------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y * w": lambda y, w: y * w,
    "y.relu()": lambda y, w: y.relu(),
    "linear(y, w)": F.linear,
    "y.transpose(0, 1)": lambda y, w: y.transpose(0, 1),
}
MANY = 1001  # operators in a body; the time of a body with one operator is subtracted


def time_operators(setup: Setup, config: FunctionalConfig) -> Iterator[CaseTimes]:
    """Time an operator inside a mapped function: (body of 1001 operators - body of 1) / 1000."""
    for grad in (False, True):
        for name, operator in OPERATORS.items():
            bodies = {
                count: _operator_calls(setup, _repeated(operator, count), grad)
                for count in (1, MANY)
            }
            calls = {
                f"{count} {who}": call
                for count, each in bodies.items()
                for who, call in each.items()
            }
            times = interleaved(calls, rounds=config.rounds, batch_s=config.batch_s)
            slopes = {who: _slope(times[f"1 {who}"], times[f"{MANY} {who}"]) for who in bodies[1]}
            yield CaseTimes(f"{name}{', grad' if grad else ''}", slopes)


def _slope(one: Times, many: Times) -> Times:
    """Return the time of one additional operator."""
    return Times(tuple((s - one.median) / (MANY - 1) for s in many.rounds))


def _repeated(
    operator: Callable[[Tensor, Tensor], Tensor], count: int
) -> Callable[[Tensor, Tensor], Tensor]:
    def body(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(count):
            x = operator(x, w)
        return x

    return body


def _operator_calls(
    setup: Setup, body: Callable[[Tensor, Tensor], Tensor], grad: bool
) -> dict[str, Call]:
    # values do not grow
    x = torch.randn(8, 8, requires_grad=grad)
    w = torch.eye(8, requires_grad=grad)
    our_x, our_w = setup.our(x, 0), setup.our(w, None)
    calls: dict[str, Call] = {PLAIN: lambda: body(x, w)}
    for name, check in CHECKS.items():
        mapped = sm.shard_map(
            body, mesh=setup.ours, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check=check
        )
        calls[name] = partial(mapped, our_x, our_w)
    if setup.spmd is not None:
        calls[SPMD_CHECKED] = partial(_spmd_body, setup, body, x, w)
    return calls


def _spmd_body(
    setup: Setup, body: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor
) -> None:
    with setup.checked():
        setup.spmd.assert_type(x, {setup.group: setup.spmd.V})
        setup.spmd.assert_type(w, {setup.group: setup.spmd.R})
        body(x, w)


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A table.

    Attributes:
        title: title of the table.
        run: yields the rows.
        shown: implementations whose times are shown.
        over: implementations whose difference to plain is shown.
        ratios: pairs (implementation, base) whose ratio is shown.
    """

    title: str
    run: Callable[[Setup, FunctionalConfig], Iterator[CaseTimes]]
    shown: tuple[str, ...]
    over: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]

    @property
    def columns(self) -> list[str]:
        over = (f"{name} over plain" for name in self.over)
        ratios = (" / ".join(pair) for pair in self.ratios)
        return ["case", *(f"{name} us" for name in self.shown), *over, *ratios]

    def row(self, case_times: CaseTimes) -> list[str]:
        times = [
            case_times.times[name].best * 1e6 if name in case_times.times else None
            for name in self.shown
        ]
        differences = [case_times.above(name) for name in self.over]
        return [
            case_times.case,
            *map(number, [*times, *differences]),
            *(number(case_times.ratio(*pair), "x") for pair in self.ratios),
        ]


def number(value: float | None, unit: str = "") -> str:
    """Format a cell of a table."""
    return (
        "-" if value is None else f"{value:.2f}{unit}" if abs(value) < 100 else f"{value:.0f}{unit}"
    )


SECTIONS = {
    "boundary": Section(
        "Entering and leaving a mapped function",
        time_boundary,
        (PLAIN, ONCE, NEVER, ALWAYS, OUR_LOCAL_MAP, DTENSOR, SPMD, SPMD_CHECKED),
        (ONCE, NEVER, DTENSOR, SPMD_CHECKED),
        ((DTENSOR, ONCE),),
    ),
    "collectives": Section(
        "Collectives inside a mapped function; plain is the raw call, inside a hand-written "
        "autograd function with a graph",
        time_collectives,
        (PLAIN, NEVER, ALWAYS, FUNCTIONAL, SPMD, SPMD_CHECKED),
        (NEVER, ALWAYS, FUNCTIONAL, SPMD, SPMD_CHECKED),
        ((FUNCTIONAL, NEVER), (SPMD, NEVER)),
    ),
    "operators": Section(
        "One operator inside a mapped function",
        time_operators,
        (PLAIN, ONCE, NEVER, ALWAYS, SPMD_CHECKED),
        (ONCE, NEVER, ALWAYS, SPMD_CHECKED),
        ((SPMD_CHECKED, ALWAYS),),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen sections, print their tables and write the files asked for."""
    options = _options(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\.|spmd_types\.")
    setup, config = Setup(), QUICK if options.quick else FULL
    chosen = {name: SECTIONS[name] for name in options.only or SECTIONS}
    passes = [
        {name: list(part.run(setup, config)) for name, part in chosen.items()}
        for _ in range(config.passes)
    ]
    figures, document = {}, []
    for name, part in chosen.items():
        times = merged([each[name] for each in passes])
        rows = [part.row(f) for f in times]
        show(part.title, part.columns, rows)
        document.append(f"### {part.title}\n\n{markdown(part.columns, rows)}\n")
        figures[name] = [f.as_dict() for f in times]
    env = environment() | {"spmd_types": setup.spmd_version}
    line = f"{environment_line(env)}, spmd_types {env['spmd_types']}"
    print(line)
    write_json(options.json, {"environment": env, "sections": figures})
    write_markdown(options.markdown, "\n".join([*document, line]))
    dist.destroy_process_group()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=SECTIONS,
        action="append",
        help="a section to run; may be given several times",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of everything, as a smoke test"
    )
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
