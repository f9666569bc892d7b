"""Enumerate forms, leave out those that the model or the memory cannot take, rank the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, get_args

from .description import Description
from .form import AXES, DTYPES, Form, Recompute, why_not
from .measure import Measured
from .memory import Memory, peak_memory, size
from .prices import Prices
from .program_costs import Check
from .step_time import StepTime, StepTimes

MOST_TP, _MOST_PP, _MOST_CP, _MOST_EP, _MOST_ROWS = 32, 64, 64, 64, 32
_FEWEST_POSITIONS = 1024  # on a rank of cp
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1))
FAMILIES = ("tp", "pp", "cp", "ep", "dp", "schedule", "recompute", "gather", "zero")
_OF_PIPELINES = ("schedule", "gather")
_FASTEST = 3  # values of a family with a reason


@dataclass(frozen=True)
class Candidate:
    """A form with its time and memory.

    Attributes:
        form: the form.
        time: seconds by part.
        rank: the rank of the pipeline that holds most.
        memory: what it holds.
        checked: its program by `eval_shape`; None if it has not been evaluated.
        measured: how it ran on devices; None if it has not been run.
    """

    form: Form
    time: StepTime
    rank: int
    memory: Memory
    checked: Check | None = None
    measured: Measured | None = None


@dataclass(frozen=True)
class TooLarge:
    """A form that does not fit, and what its busiest rank would hold."""

    form: Form
    memory: Memory


@dataclass
class Search:
    """What a search has tried.

    Attributes:
        tried: the number of forms whose time or memory was computed.
        fitting: those that fit, the fastest first.
        best_of: (family, value) -> the fastest that fits.
        smallest_of: (family, value) -> the one with the least memory of those that do not fit.
        refused: (family, value) -> why the model cannot take it, if no form of it can.
    """

    tried: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    best_of: dict[tuple[str, Any], Candidate] = field(default_factory=dict)
    smallest_of: dict[tuple[str, Any], TooLarge] = field(default_factory=dict)
    refused: dict[tuple[str, Any], str] = field(default_factory=dict)

    def without(self, forms: Collection[Form]) -> Search:
        """Return the search without some forms that fit by the formulas."""
        fitting = [candidate for candidate in self.fitting if candidate.form not in forms]
        return replace(self, fitting=fitting, best_of=_fastest_of_families(fitting))


def forms(
    model: Description, devices: int, node: int, fixed: Mapping[str, Any], max_rows: int | None
) -> Iterator[Form]:
    """Yield all forms for so many devices, also some that the model cannot take."""

    def allowed(name: str, values: Sequence[Any]) -> list[Any]:
        return [value for value in values if value == fixed.get(name, value)]

    # sequence parallelism moves the same bytes, and takes less memory
    splits = fixed.get("sequence_parallel", model.sequence_plan is not None)
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    dtypes = {name: fixed[name] for name in DTYPES if name in fixed}
    for tp, pp, cp in product(divisors, divisors, divisors):
        limits = (("tp", tp, MOST_TP), ("pp", pp, _MOST_PP), ("cp", cp, _MOST_CP))
        if devices % (tp * pp * cp) or any(
            size > most and name not in fixed for name, size, most in limits
        ):
            continue
        if tp == 1 and fixed.get("sequence_parallel"):
            continue
        if cp > 1 and model.sequence // cp < _FEWEST_POSITIONS and "cp" not in fixed:
            continue
        if not (allowed("tp", [tp]) and allowed("pp", [pp]) and allowed("cp", [cp])):
            continue
        data = devices // (tp * pp * cp)
        if model.rows % data:
            continue
        rows = model.rows // data
        most = min(rows, max_rows or max(_MOST_ROWS, fixed.get("rows", 0)))
        for ep in allowed("ep", _expert_counts(data, model, fixed, tp)):
            counts = {*_shard_counts(data // ep, node, tp * cp * ep), fixed.get("fsdp", data // ep)}
            for fsdp in allowed("fsdp", sorted(counts)):
                dp, rest = divmod(data // ep, fsdp)
                if rest or not allowed("dp", [dp]):
                    continue
                base = Form(pp=pp, dp=dp, fsdp=fsdp, cp=cp, tp=tp, ep=ep, **dtypes)
                yield from _inner_forms(base, rows, allowed, most, splits)


def _inner_forms(
    base: Form, rows: int, allowed: Any, most: int, sequence_parallel: bool
) -> Iterator[Form]:
    """Yield the forms with these axes: microbatches, schedules, recomputation."""
    counts = allowed("rows", [n for n in range(1, most + 1) if rows % n == 0])
    splits = [sequence_parallel] if base.tp > 1 else [False]
    schedules = _SCHEDULES if base.pp > 1 else (("1f1b", 1),)
    if base.pp > 1 and allowed("schedule", ["gpipe", "1f1b"]) == ["gpipe"]:
        schedules = (("gpipe", 1),)  # it holds more than 1f1b: only if it is asked for

    def offered(name: str, values: tuple[Any, ...], takes: bool) -> tuple[Any, ...]:
        """Return the first value, and the others if the form takes them or one is asked for."""
        return values if takes or not allowed(name, values[:1]) else values[:1]

    gathers = offered("gather", ("microbatch", "step"), base.pp > 1 and base.shards > 1)
    zeros = offered("zero", (3, 2, 1), base.shards > 1 and base.pp == base.dp == 1)
    for n, split, (schedule, stages), recompute, gather, zero in product(
        counts,
        splits,
        schedules,
        allowed("recompute", get_args(Recompute)),
        allowed("gather", gathers),
        allowed("zero", zeros),
    ):
        is_allowed = allowed("schedule", [schedule]) and allowed("stages", [stages])
        if is_allowed and allowed("microbatches", [rows // n]):
            yield replace(
                base,
                rows=n,
                microbatches=rows // n,
                sequence_parallel=split,
                schedule=schedule,
                stages=stages,
                recompute=recompute,
                gather=gather,
                zero=zero,
                compiled=allowed("compiled", [False, True])[0],
                regather=allowed("regather", [False, True])[0],
                balanced=base.cp > 1 and allowed("balanced", [False, True])[0],
            )


def _expert_counts(data: int, model: Description, fixed: Mapping[str, Any], tp: int) -> list[int]:
    """Return sizes of ep: of a mixture those that with tp divide its experts."""
    most = _MOST_EP if model.experts else 1
    most = max(most, fixed.get("ep", 1))
    return [
        n
        for n in range(1, min(most, data) + 1)
        if data % n == 0 and (n == 1 or model.experts % (n * tp) == 0 or "ep" in fixed)
    ]


def _shard_counts(data: int, node: int, inside: int) -> list[int]:
    """Return sizes of fsdp: none, all, and a node's and a few nodes' data ranks."""
    in_node = max(1, node // inside)
    sizes = {1, data, in_node, 2 * in_node, 4 * in_node, 8 * in_node}
    return sorted(size for size in sizes if size <= data and data % size == 0)


def search(
    model: Description,
    prices: Prices,
    devices: int,
    usable: float,
    fixed: Mapping[str, Any],
    max_rows: int | None,
    near: Form | None = None,
) -> Search:
    """Return what was tried, for all forms or for the neighbours of one."""
    result = Search()
    if near is not None:
        unsearched = ("compiled", "regather", "balanced", *DTYPES)
        fixed = {**{name: getattr(near, name) for name in unsearched}, **fixed}
    times = StepTimes(model, prices)
    takes: set[tuple[str, Any]] = set()
    candidates = forms(model, devices, prices.node, fixed, max_rows)
    for form in candidates:
        if near is not None and not is_neighbour(form, near):
            continue
        families = _families(form)
        reason = why_not(form, model)
        if reason is not None and form.sequence_parallel and "sequence_parallel" not in fixed:
            whole = replace(form, sequence_parallel=False)
            if why_not(whole, model) is None:
                form, reason = whole, None
        if reason is not None:
            for family in families:
                result.refused.setdefault(family, reason)
            continue
        takes.update(families)
        result.tried += 1
        rank, memory = peak_memory(form, model)
        if memory.total > usable:
            for family in families:
                smallest = result.smallest_of.get(family)
                if smallest is None or memory.total < smallest.memory.total:
                    result.smallest_of[family] = TooLarge(form, memory)
            continue
        result.fitting.append(Candidate(form, times.of(form), rank, memory))
    result.refused = {family: why for family, why in result.refused.items() if family not in takes}
    result.fitting.sort(key=lambda candidate: candidate.time.total)
    result.best_of = _fastest_of_families(result.fitting)
    return result


def _fastest_of_families(fitting: Sequence[Candidate]) -> dict[tuple[str, Any], Candidate]:
    """Return (family, value) -> its first candidate."""
    best_of: dict[tuple[str, Any], Candidate] = {}
    for candidate in fitting:
        for family in _families(candidate.form):
            best_of.setdefault(family, candidate)
    return best_of


def _families(form: Form) -> list[tuple[str, Any]]:
    """Return the families of a form: the value of each choice that it makes."""
    names = [name for name in FAMILIES if form.pp > 1 or name not in _OF_PIPELINES]
    return [(name, getattr(form, name)) for name in names]


def is_neighbour(form: Form, near: Form) -> bool:
    """Return whether a form differs in at most two fields of axes, and in one of the others."""
    changed = [f.name for f in fields(Form) if getattr(form, f.name) != getattr(near, f.name)]
    changed = [name for name in changed if name not in ("microbatches", "stages")]
    axes = [name for name in changed if name in AXES]
    factors = [getattr(form, name) / getattr(near, name) for name in axes]
    if len(axes) > 2 or any(factor not in (0.5, 2.0) for factor in factors):
        return False
    return len(changed) - len(axes) <= 1


# -- reasons ---------------------------------------------------------------------------------------


def reasons(searched: Search, best: Candidate, usable: float, node: int) -> list[str]:
    """Return why forms lost that differ from the best one, a line for each value of a family.

    Of a family the fastest values that fit, the one that comes nearest to fitting, and the first
    that the model cannot take.
    """
    lines = []
    for name, own in _families(best.form):
        fitting = [
            (candidate.time.total, family)
            for family, candidate in searched.best_of.items()
            if family[0] == name and family[1] != own
        ]
        fastest = sorted(fitting, key=lambda item: item[0])[:_FASTEST]
        lines += [_slower(searched.best_of[family], best, family, node) for _, family in fastest]
        too_large = [
            (smallest.memory.total, family)
            for family, smallest in searched.smallest_of.items()
            if family[0] == name and family not in searched.best_of
        ]
        if too_large:
            _, family = min(too_large, key=lambda item: item[0])
            lines.append(_too_large(searched.smallest_of[family], family, usable))
        refused = [family for family in searched.refused if family[0] == name]
        if refused:
            lines.append(_refused(_label(refused[0]), searched.refused[refused[0]]))
    return lines


def _label(family: tuple[str, Any]) -> str:
    return f"{family[0]}={family[1]}"


def _refused(label: str, why: str) -> str:
    """Return a reason with its label once: "tp=16 does not divide 8 key/value heads"."""
    starts_with_label = why.partition(" ")[0].rstrip(":") == label
    return why if starts_with_label else f"{label}: {why}"


def _slower(other: Candidate, best: Candidate, family: tuple[str, Any], node: int) -> str:
    name, _ = family
    slower = other.time.total - best.time.total
    parts = {part: value - best.time.parts[part] for part, value in other.time.parts.items()}
    part, more = max(parts.items(), key=lambda item: item[1])
    crosses = name in AXES and other.form.group(name, node).crosses
    if crosses and not best.form.group(name, node).crosses:
        crossing = f", {name} crosses nodes"
    else:
        crossing = ""
    return f"{_label(family)}: {_signed(slower)}, {part} {_signed(more)}{crossing} ({other.form})"


def _too_large(smallest: TooLarge, family: tuple[str, Any], usable: float) -> str:
    part, most = max(vars(smallest.memory).items(), key=lambda item: item[1])
    return (
        f"{_label(family)}: needs {size(smallest.memory.total)} of {size(usable)}, of which {part} "
        f"{size(most)} ({smallest.form})"
    )


def _signed(seconds: float) -> str:
    """Return a difference of times with its sign and a unit."""
    return f"{seconds:+.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:+.3g} ms"
