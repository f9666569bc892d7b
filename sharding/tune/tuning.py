"""`Tuning`: the result of `tune`, as an object, a table, JSON and programs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from ...mesh.text import table_lines
from .description import Description
from .events import StepEvents, step_events
from .form import Form, check_count
from .measure import measure_program
from .memory import size
from .prices import Prices
from .program import PLACEHOLDER, accelerate_text, program_text, titan_text
from .search import Candidate
from .step_time import model_flops

_MFU = (
    "MFU: three times the flops of forward, attention as if not causal, over the peak in the dtype "
    "of products; recomputation does not count"
)


_PROPOSED = "tp: by the plan of sm.propose_plan, as the model has none of its own"
_PROGRAM = (
    "program: by how much memory and received bytes by these formulas differ from those of the "
    "printed program, on the rank of a pipeline that needs most"
)

# others gather
_OP_OF = {"cp": "permute", "pp": "permute", "dp": "all_reduce", "ep": "all_to_all"}


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`. `print` shows it as a table.

    Attributes:
        candidates: the fastest forms that fit, the best one first. Each has `form`, `time`,
            `memory` and `rank`, the rank of the pipeline that holds most.
        reasons: for each value that the best form does not have, what it costs.
        program: the text of a program that trains in the best form.
        accelerate: the best form as accelerate's ParallelismConfig.
        titan: the best form as flags of torchtitan.
        tried, fitting: the numbers of forms.
        usable: bytes of a device that tensors may take.
    """

    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    tried: int
    fitting: int
    usable: float
    model: Description = field(repr=False)
    prices: Prices = field(repr=False)
    build: str = field(repr=False)

    @property
    def best(self) -> Candidate:
        """The fastest form that fits."""
        return self.candidates[0]

    @property
    def program(self) -> str:
        return program_text(self.best.form, self.model, self.build, self.prices.node)

    def measure(
        self,
        count: int = 5,
        *,
        device: str | None = None,
        steps: int = 3,
        launcher: Any = None,
    ) -> Tuning:
        """tuning.measure(3) -> Tuning: run the best forms on this machine's devices.

        Each form's program runs in one process for each device, with one step that is not timed.
        Those that run out of memory are dropped, with a line in `reasons`, as are those that fail.
        What `reasons` said before stays only if the best form is still the best.

        Args:
            count: how many of `candidates` run.
            device: "cuda", or "cpu" for processes that communicate by gloo; by default "cuda" if
                this machine has GPUs.
            steps: how many steps are timed.
            launcher: in place of `sm.launch`, for tests.

        Returns:
            The forms that ran, the fastest first, each with `measured`; then those that did not
            run, as they were.

        Raises:
            ValueError: fewer devices than the forms have; a model without a `build=` that makes it;
                no form runs.

        Communication: that of the programs, in processes of their own.
        """
        if PLACEHOLDER in self.build:
            raise ValueError(
                "measure: the programs do not know how to make the model; pass build= to tune, the "
                "lines of a function build() that returns it"
            )
        for name, value in (("count", count), ("steps", steps)):
            check_count(f"measure({name}={value!r})", value)
        if device not in (None, "cuda", "cpu"):
            raise ValueError(f'measure(device={device!r}): write "cuda" or "cpu"')
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        ran: list[Candidate] = []
        dropped: list[str] = []
        for candidate in self.candidates[:count]:
            form = candidate.form
            text = program_text(form, self.model, self.build, self.prices.node)
            result = measure_program(
                text, form.devices, device=device, steps=steps, launcher=launcher
            )
            if result.seconds is None:
                dropped.append(f"{form}: {result.error}")
            else:
                ran.append(dataclasses.replace(candidate, measured=result))
        if not ran:
            raise ValueError(f"measure: no form runs here: {'; '.join(dropped)}")
        ran.sort(key=_measured_seconds)
        candidates = (*ran, *self.candidates[count:])
        explained = self.reasons if ran[0].form == self.best.form else ()
        return dataclasses.replace(self, candidates=candidates, reasons=(*dropped, *explained))

    @property
    def accelerate(self) -> str:
        return accelerate_text(self.best.form)

    @property
    def titan(self) -> str:
        return titan_text(self.best.form, self.model)

    def mfu(self, candidate: Candidate) -> float:
        """Return the model flops utilization of a candidate; see the table's last line."""
        rate = model_flops(self.model) / candidate.time.total / candidate.form.devices
        return rate / self.prices.device.peak(candidate.form.param_dtype)

    def priced_by(self, form: Form) -> dict[str, str]:
        """Return what prices each axis: "calibrated", "table" or "data sheet"."""
        node = self.prices.node
        return {
            axis: self.prices.source(form.group(axis, node), _OP_OF.get(axis, "all_gather"))
            for axis in form.sizes
        }

    def events(self, form: Form | None = None, *, rank: int = 0) -> StepEvents:
        """tuning.events() -> StepEvents: what a rank computes and communicates, in order.

        Of a step of the form's program after the first. Each event has `phase`, `stage`,
        `microbatch`, `op`, `axis` and `of`; `print` shows them. The sums of a few numbers, of the
        loss and of the norm of gradients, are not among them.

        Args:
            form: by default the best one.
            rank: of the pipeline.

        Raises:
            ValueError: no such rank; or the order of the form is not predicted: compiled blocks,
                `regather`, expert parallelism with recomputation, experts with tp > 1, or tied
                parameters in a pipeline.

        Communication: none.
        """
        return step_events(form or self.best.form, self.model, rank)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as values of JSON: seconds and bytes."""
        return {
            "candidates": [
                {
                    "form": dataclasses.asdict(candidate.form),
                    "seconds": candidate.time.total,
                    "seconds_by_part": candidate.time.parts,
                    "measured_seconds": _measured_seconds(candidate),
                    "mfu": self.mfu(candidate),
                    "memory": candidate.memory.total,
                    "memory_by_part": vars(candidate.memory),
                    "memory_rank": candidate.rank,
                    "checked": candidate.checked and dataclasses.asdict(candidate.checked),
                    "received_by_axis": candidate.time.moved,
                    "priced_by": self.priced_by(candidate.form),
                }
                for candidate in self.candidates
            ],
            "reasons": list(self.reasons),
            "tried": self.tried,
            "fitting": self.fitting,
            "usable_memory": self.usable,
            "program": self.program,
            "accelerate": self.accelerate,
            "torchtitan": self.titan,
        }

    def json(self) -> str:
        """Return `as_dict()` as text."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        model, device = self.model, self.prices.device
        best = self.best
        heading = (
            f"{type(model.model).__name__}: {_parameters(model.parameters)} parameters, "
            f"{model.layers} blocks; a step of {model.rows:,} rows{_row_text(model.one_row_shape)}"
        )
        cluster = (
            f"{best.form.devices:,} devices {device.name}, nodes of {self.prices.node}; "
            f"{self.tried:,} forms, {self.fitting:,} fit in {size(self.usable)}"
        )
        is_measured = any(candidate.measured is not None for candidate in self.candidates)
        measured = ["measured"] * is_measured
        is_checked = any(candidate.checked is not None for candidate in self.candidates)
        checked = ["program"] * is_checked
        rows = [("", "form", *measured, "step", "MFU", "memory", *checked, "longest parts")]
        for number, candidate in enumerate(self.candidates, start=1):
            time = _measured_seconds(candidate)
            measured = ["" if time is None else seconds(time)] * is_measured
            rows.append(
                (
                    str(number),
                    str(candidate.form),
                    *measured,
                    seconds(candidate.time.total),
                    f"{self.mfu(candidate):.1%}",
                    size(candidate.memory.total),
                    *[_program_of(candidate)] * is_checked,
                    _longest(candidate),
                )
            )
        parts = [(name, seconds(value)) for name, value in best.time.parts.items() if value]
        held = [(name, size(value)) for name, value in vars(best.memory).items() if value]
        priced = self.priced_by(best.form)
        shards = best.form.group("shards", self.prices.node)
        of_shards = self.prices.source(shards, "all_gather")
        moved = [
            (axis, size(count), priced.get(axis, of_shards))
            for axis, count in best.time.moved.items()
        ]
        of_rank = f" of rank {best.rank} of the pipeline" if best.form.pp > 1 else ""
        blocks = [
            [heading, cluster],
            list(table_lines(rows, right=(0, *range(2, 5 + is_measured)))),
            [_PROGRAM] * is_checked,
            [_PROPOSED] * any(x.form.tp > 1 for x in self.candidates if model.is_plan_proposed),
            *([line] for line in dict.fromkeys(map(_unchecked, self.candidates)) if line),
            ["time: " + ", ".join(f"{name} {text}" for name, text in parts)],
            [f"memory{of_rank}: " + ", ".join(f"{name} {text}" for name, text in held)],
            ["received: " + ", ".join(f"{axis} {n} ({by})" for axis, n, by in moved)] * bool(moved),
            ["why not:", *(f"  {reason}" for reason in self.reasons)] if self.reasons else [],
            [_MFU],
        ]
        return "\n".join(line for block in blocks for line in block)


def _program_of(candidate: Candidate) -> str:
    """Return by how much what was computed of memory and bytes differs from the program's."""
    checked = candidate.checked
    if checked is None:
        return ""
    if checked.why_not:
        return "not run"
    return f"{checked.memory_error:+.1%} memory, {checked.bytes_error:+.1%} bytes"


def _unchecked(candidate: Candidate) -> str:
    """Return why a program was not evaluated."""
    checked = candidate.checked
    if checked is None or not checked.why_not:
        return ""
    return f"not run: {candidate.form}: {checked.why_not}"


def _measured_seconds(candidate: Candidate) -> Any:
    return None if candidate.measured is None else candidate.measured.seconds


def seconds(value: float) -> str:
    """Return a time with a unit."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _row_text(shape: tuple[int, ...]) -> str:
    """Return the shape of a row, as in " of 8,192" and " of 3 x 224 x 224"."""
    sizes = " x ".join(f"{size:,}" for size in shape[1:])
    return f" of {sizes}" if sizes else ""


def _parameters(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count / 1e6:,.3g} million"


def _longest(candidate: Candidate) -> str:
    """Return the three longest parts of a step, with their shares."""
    parts = sorted(candidate.time.parts.items(), key=lambda item: -item[1])
    total = candidate.time.total
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts[:3] if value)
