"""`tune`: choose the form of parallelism of a model on a cluster, without devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from ...mesh.text import shortened
from ...mesh.topology import Topology
from ..trees import map_tensors
from . import program_costs
from .description import IMBALANCE, Description, Loss
from .devices import Device, device_of
from .form import AXES, Form, check_count, check_field, check_form, why_not
from .memory import peak_memory, size
from .plans import own_plan
from .prices import Prices
from .program import PLACEHOLDER, hugging_face_build
from .propose import propose_plan
from .search import MOST_TP, Candidate, Search, reasons, search
from .step_time import StepTime, StepTimes
from .tuning import Tuning

# Of a device's memory: the context and the buffers of communicators, and what the allocator loses.
_CONTEXT, _FRAGMENTATION = 2e9, 0.05
_FINALISTS = 24  # whose pipelines are simulated
_MOST_TOO_LARGE = 48  # programs that are evaluated and do not fit
_DEFAULT_NODE = 8


def tune(
    model: nn.Module,
    batch: Any,
    topology: Topology | None = None,
    *,
    devices: int,
    device: Device | str = "h100",
    memory: float | None = None,
    node: int | None = None,
    fix: Mapping[str, Any] | None = None,
    near: Form | None = None,
    max_microbatch: int | None = None,
    loss: Loss | None = None,
    plan: Mapping[str, Any] | None = None,
    imbalance: float = IMBALANCE,
    build: str | None = None,
    top: int = 5,
    check: int = 3,
) -> Tuning:
    """tune(model, batch, devices=64) -> Tuning: choose how a model is trained on many devices.

    Counts what the model computes, saves and sends, by running two short copies of it without
    values, for each size of tensor parallelism with its plan applied. From that it computes time
    and memory of a training step with AdamW, in bfloat16 with parameters, gradients and moments in
    float32 unless `fix` says otherwise, for every form that divides, and returns the fastest that
    fit, with reasons.

    Args:
        model: on "meta", with blocks that repeat in one list, such as a model of Hugging Face.
        batch: its input for one step of all devices: a tensor, or a tuple or dict of tensors; dim 0
            has the rows, dim 1 of the first tensor the positions. Values are not read.
        topology: links, such as a calibrated `mesh.topology`; by default those of the device's data
            sheet.
        devices: the number of devices.
        device: a name ("a100", "h100", "h200", "b200") or a `Device`.
        memory: bytes of a device; by default the device's.
        node: devices of a node; by default the topology's `node_size`, else 8.
        fix: fields of `Form` that are given, such as {"tp": 8, "recompute": "full"}. Dtypes are not
            searched: without {"param_dtype": ...} and the like they are the defaults.
        near: a form whose neighbours are searched, with itself, in place of all forms.
        max_microbatch: the most rows of a microbatch on a data rank.
        loss: a function of output and batch that returns the loss; by default the loss that the
            model returns (`output.loss`, or a scalar of its outputs), else the cross entropy of
            logits, or the mean of another output.
        plan: a plan of tensor parallelism in place of the model's own, in styles or in strings of
            Hugging Face's. For a model that has none `propose_plan` chooses one.
        imbalance: of a mixture of experts, how many rows the experts of the busiest rank of ep
            compute, over the mean.
        build: lines of a function `build()` for the program.
        top: the number of forms in the table.
        check: for how many of the fastest forms the program itself is evaluated, as `eval_shape`
            evaluates functions. A form whose program does not fit is left out and the next one is
            evaluated, until 48 do not fit.

    Raises:
        ValueError: an unknown device or field; a count below 1; an imbalance below 1; a model
            without blocks that repeat, or that reads values; no form divides, or none fits.

    Communication: none.

    Example:
        >>> config = transformers.AutoConfig.from_pretrained("llama/")
        >>> with torch.device("meta"):
        ...     model = transformers.AutoModelForCausalLM.from_config(config)
        >>> ids = torch.empty(512, 8192, dtype=torch.int64, device="meta")
        >>> print(sm.tune(model, ids, devices=256))
    """
    chosen = device_of(device)
    _check_count("devices", devices, 1)
    _check_count("top", top, 1)
    _check_count("check", check, 0)
    if node is not None:
        _check_count("node", node, 1)
    if max_microbatch is not None:
        _check_count("max_microbatch", max_microbatch, 1)
    if not isinstance(model, nn.Module):
        raise ValueError(f"tune: the model is {shortened(repr(model))}; pass an nn.Module")
    if fix is not None and not isinstance(fix, Mapping):
        raise ValueError(f"tune(fix={fix!r}): a dict of fields of a form, such as {{'tp': 8}}")
    if near is not None:
        check_form("tune(near", near)
    if memory is not None and not (isinstance(memory, int | float) and memory > 0):
        raise ValueError(f"tune(memory={memory!r}): bytes of a device, such as 80e9")
    if memory is not None:
        chosen = replace(chosen, memory=memory)
    in_node = node or (topology.node_size if topology is not None else None) or _DEFAULT_NODE
    prices = Prices(chosen, topology or chosen.topology(in_node), in_node)
    usable = chosen.memory * (1 - _FRAGMENTATION) - _CONTEXT
    fixed = dict(fix or {})
    for name, value in fixed.items():
        check_field(name, value)
    proposed: Mapping[str, Any] = {}
    why_none = ""
    if plan is None and devices > 1 and fixed.get("tp") != 1 and not own_plan(model):
        proposed, why_none = _proposed(model, batch, loss)
    described = Description(
        model,
        batch,
        loss=loss,
        plan=plan,
        proposed=proposed,
        why_none_proposed=why_none,
        imbalance=imbalance,
    )
    searched = search(described, prices, devices, usable, fixed, max_microbatch, near)
    if not searched.fitting:
        raise _nothing(described, searched, devices, usable, fixed, chosen, near)
    times = StepTimes(described, prices)

    @cache
    def time_of(form: Form) -> StepTime:
        return times.of(form, simulate=True)

    def evaluated(form: Form) -> program_costs.Check:
        return program_costs.check(form, described, times)

    finalists, needs = _finalists(searched.fitting, time_of, evaluated, usable, check)
    too_large = _programs_too_large(needs, usable)
    if needs:
        searched = searched.without(needs)
    rest = len(searched.fitting) - len(finalists) if len(finalists) < check else 0
    if rest:
        too_large.append(f"{rest:,} more forms: not evaluated after {len(needs)} that do not fit")
    if not finalists:
        raise _no_program(needs, rest, usable)
    best = finalists[0]
    shown = finalists[:top]
    if near is not None and near.devices == devices and why_not(near, described) is None:
        rank, held = peak_memory(near, described)
        fits = held.total <= usable and near not in needs
        if fits and all(candidate.form != near for candidate in shown):
            shown.append(Candidate(near, time_of(near), rank, held))
    # what is compared with the best has a simulated pipeline, too
    best_of = {
        family: replace(candidate, time=time_of(candidate.form))
        for family, candidate in searched.best_of.items()
    }
    return Tuning(
        tuple(shown),
        (*too_large, *reasons(replace(searched, best_of=best_of), best, usable, in_node)),
        searched.tried,
        len(searched.fitting),
        usable,
        described,
        prices,
        build or hugging_face_build(PLACEHOLDER),
    )


def _proposed(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[Mapping[str, Any], str]:
    """Return a plan for the smallest number of ranks that divides the heads; else {} and why.

    Its styles split layers among any number that does. Of a prime number of heads, such as the 71
    of Falcon, there may be no number that is searched.
    """
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    count = heads if isinstance(heads, int) and heads > 1 else 2
    size = next(n for n in range(2, count + 1) if count % n == 0)
    if size > MOST_TP:
        return {}, ""
    try:
        row = map_tensors(lambda x: x[:1], (batch,))[0]
        return propose_plan(model, row, size, loss=loss), ""
    except (ValueError, RuntimeError, NotImplementedError) as error:  # such as reading values
        return {}, shortened(str(error), 300)


def _check_count(name: str, value: Any, least: int) -> None:
    check_count(f"tune({name}={value!r})", value, least)


def _finalists(
    fitting: Sequence[Candidate],
    time_of: Callable[[Form], StepTime],
    check: Callable[[Form], program_costs.Check],
    usable: float,
    count: int,
) -> tuple[list[Candidate], dict[Form, float]]:
    """Simulate pipelines, and evaluate the programs of the fastest forms until so many fit.

    Returns:
        The fastest forms, without those whose program needs more memory than is usable; and these,
        with the bytes that they need. Once there are `_MOST_TOO_LARGE`, no more are evaluated.
    """
    kept: list[Candidate] = []
    too_large: dict[Form, float] = {}
    for begin in range(0, len(fitting), _FINALISTS):
        if begin and (len(kept) >= count or len(too_large) >= _MOST_TOO_LARGE):
            break
        group = [replace(c, time=time_of(c.form)) for c in fitting[begin : begin + _FINALISTS]]
        for candidate in sorted(group, key=_seconds):
            if len(kept) >= count:
                kept.append(candidate)
            elif len(too_large) < _MOST_TOO_LARGE:
                result = check(candidate.form)
                if result.peak > usable:
                    too_large[candidate.form] = result.peak
                else:
                    kept.append(replace(candidate, checked=result))
    return sorted(kept, key=_seconds), too_large


def _seconds(candidate: Candidate) -> float:
    return candidate.time.total


def _programs_too_large(needs: Mapping[Form, float], usable: float) -> list[str]:
    """Return the reason of the forms whose programs do not fit, in one line."""
    if not needs:
        return []
    form = min(needs, key=lambda form: needs[form])
    if len(needs) == 1:
        return [f"{form}: its program needs {size(needs[form])} of {size(usable)}"]
    return [
        f"{len(needs)} programs need {size(needs[form])} to {size(max(needs.values()))} of "
        f"{size(usable)}, the smallest {form}"
    ]


def _no_program(needs: Mapping[Form, float], rest: int, usable: float) -> ValueError:
    """Return the error for a model of which no evaluated program fits."""
    form = min(needs, key=lambda form: needs[form])
    more = f", and {rest:,} more forms were not evaluated" if rest else ""
    return ValueError(
        f"tune: none of {len(needs)} evaluated programs fits{more}: the smallest ({form}) needs "
        f"{size(needs[form])} of {size(usable)}; check=0 takes the forms that fit by the formulas"
    )


def _nothing(
    model: Description,
    searched: Search,
    devices: int,
    usable: float,
    fixed: Mapping[str, Any],
    device: Device,
    near: Form | None,
) -> ValueError:
    """Return the error for a model that no form fits."""
    fixed_text = ", ".join(f"{name}={value}" for name, value in fixed.items())
    where = f"{devices:,} devices {device.name}{f' with {fixed_text}' if fixed_text else ''}"
    if near is not None:
        where += f" near {near}"
    if not searched.smallest_of:
        why = next(iter(searched.refused.values()), None)
        if why is None and near is not None and near.devices != devices:
            why = f"it has {near.devices:,} devices, and none of its neighbours has {devices:,}"
        if why is None:
            why = _why_not_divided(model, devices, fixed)
        if why is None and ("schedule" in fixed or "stages" in fixed):
            why = (
                "pipelines are searched with schedule=gpipe, 1f1b, zb_h1, and with stages=2 and 4 "
                "of interleaved"
            )
        if why is None:
            why = (
                f"no sizes of the axes have {devices:,} as their product and numbers of data ranks "
                f"that divide the {model.rows:,} rows of the batch"
            )
        return ValueError(f"tune: no form of {type(model.model).__name__} for {where}: {why}")
    smallest = min(searched.smallest_of.values(), key=lambda candidate: candidate.memory.total)
    part = max(vars(smallest.memory).items(), key=lambda item: item[1])
    return ValueError(
        f"tune: {type(model.model).__name__} does not fit on {where}: the smallest form "
        f"({smallest.form}) needs {size(smallest.memory.total)} and {size(usable)} are usable, "
        f"{size(smallest.memory.total - usable)} too few; most is {part[0]}, {size(part[1])}. Take "
        "more devices, fewer rows or positions, or devices with more memory"
    )


def _why_not_divided(model: Description, devices: int, fixed: Mapping[str, Any]) -> str | None:
    """Return which of the given numbers does not divide the devices or the rows; None if all do."""
    for name, value in fixed.items():
        if name in AXES and devices % value:
            return f"{name}={value} does not divide {devices:,} devices"
        if name in ("rows", "microbatches") and model.rows % value:
            return f"{name}={value} does not divide the {model.rows:,} rows of the batch"
    return None
