"""`explain`: what a redistribution would do, before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..kernels.box import box_size, intersect
from .layout import Layout
from .plan import Plan, Step, plan
from .spec import Placement, SpecLike


@dataclass(frozen=True, eq=False)
class Explanation:
    """A plan with its costs; prints as a table.

    Attributes:
        plan: the steps.
    """

    plan: Plan

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return self.plan.steps

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return self.plan.launches

    @property
    def bytes_received(self) -> int:
        """Bytes received by the busiest rank."""
        return self.plan.max_bytes_received

    @cached_property
    def lower_bound(self) -> int | None:
        """The fewest bytes that the busiest rank must receive: its box after, less its box before.

        None where a reduction is pending before: then values of other ranks enter every element.
        """
        src, dst = self.plan.src, self.plan.dst
        if set(src.spec.unreduced) - set(dst.spec.unreduced):
            return None
        return max((_missing(src, dst, coordinate) for coordinate, _ in src.boxes()), default=0)

    @cached_property
    def peak_bytes(self) -> int:
        """The most that one rank holds at a time: a step's input, its output, and the buffers between."""
        sizes = (_step_bytes(step) for step in self.steps)
        return max(sizes, default=self.plan.src.largest_local_numel * self.plan.src.dtype.itemsize)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "src": repr(self.plan.src),
            "dst": repr(self.plan.dst),
            "steps": [_step_row(step) for step in self.steps],
            "launches": self.launches,
            "bytes_received": self.bytes_received,
            "lower_bound": self.lower_bound,
            "peak_bytes": self.peak_bytes,
        }

    def __str__(self) -> str:
        src, dst = self.plan.src, self.plan.dst
        title = f"{repr(src).split(', local')[0]}\n  -> {dst.spec}"
        if not self.steps:
            return f"{title}\nnothing to do"
        header = ["step", "axes", "ranks", "result", "bytes received"]
        rows = [[str(value) for value in _step_row(step).values()] for step in self.steps]
        bound = "" if self.lower_bound is None else f", lower bound {self.lower_bound:,}"
        total = f"{self.launches} collectives, {self.bytes_received:,} bytes received by the busiest rank{bound}; "
        return "\n".join([title, *aligned([header, *rows]), f"{total}peak {self.peak_bytes:,} bytes"])

    __repr__ = __str__


def explain(src: Layout | Any, dst: Layout | SpecLike | Sequence[Placement]) -> Explanation:
    """explain(x.layout, dst) -> the steps, bytes and bounds of `redistribute`, without running it.

    Args:
        src: a `Layout`, or a `ShardedTensor`.
        dst: a `Layout`, a `P`, or placements.

    Raises:
        ValueError: the two do not fit together.

    Communication: none. Works on an `AbstractMesh` too.

    Example:
        >>> layout = Layout.of(AbstractMesh((4,), ("x",)), P("x"), (8, 8))
        >>> print(explain(layout, P(None, "x")))
        f32[8, 8] @ P('x', None) on (x=4)
          -> P(None, 'x')
        step      axes  ranks  result        bytes received
        exchange  x         4  P(None, 'x')              48
        1 collectives, 48 bytes received by the busiest rank, lower bound 48; peak 256 bytes
    """
    before = src if isinstance(src, Layout) else src.layout
    after = dst if isinstance(dst, Layout) else before.replace(dst)
    return Explanation(plan(before, after))


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as lines with columns below each other; columns of numbers to the right."""
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell.replace(",", "").isdigit() for cell in column[1:]) for column in columns]
    return [
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip()
        for row in table
    ]


def _step_row(step: Step) -> dict[str, Any]:
    received = max(step.bytes_received(coordinate) for coordinate, _ in step.src.boxes())
    return {
        "op": step.op,
        "axes": ", ".join(step.axes) or "-",
        "ranks": step.group_size,
        "result": repr(step.dst.spec),
        "bytes_received": f"{received:,}",
    }


def _missing(src: Layout, dst: Layout, coordinate: tuple[int, ...]) -> int:
    """Bytes of the rank's box after that it does not hold before."""
    after = dst.box_at(coordinate)
    own = intersect(src.box_at(coordinate), after)
    return (box_size(after) - (box_size(own) if own is not None else 0)) * dst.dtype.itemsize


def _step_bytes(step: Step) -> int:
    """Bytes held during a step by the rank with the largest boxes."""
    before = step.src.largest_local_numel * step.src.dtype.itemsize
    after = step.dst.largest_local_numel * step.dst.dtype.itemsize
    buffers = {"exchange": before + after, "all_gather": after, "reduce_scatter": before}
    return before + after + buffers.get(step.op, 0)
