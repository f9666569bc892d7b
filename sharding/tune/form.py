"""`Form`: sizes of the axes, schedule, microbatches and recomputation of a training step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from ...mesh.text import shortened
from .description import Description

Recompute = Literal["none", "selective", "full"]
Gather = Literal["microbatch", "step"]
Zero = Literal[1, 2, 3]
Dtype = Literal["bfloat16", "float32"]
_SIZES = {"bfloat16": 2, "float32": 4}
DTYPES = ("param_dtype", "reduce_dtype", "dtype")  # they are not searched
AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")  # major to minor


class Group(NamedTuple):
    """The ranks of a collective.

    Attributes:
        size: how many there are.
        in_node: how many of them share a node.
    """

    size: int
    in_node: int

    @property
    def crosses(self) -> bool:
        """Whether the ranks are on several nodes."""
        return self.in_node < self.size


@dataclass(frozen=True)
class Form:
    """Form(fsdp=16, tp=8): how a training step is spread over devices.

    Attributes:
        pp: ranks along the pipeline.
        dp: replicas of the sharded parameters (HSDP), or of whole ones if fsdp and cp are 1 (DDP).
        fsdp: ranks that share parameters, gradients and optimizer state, with those of cp and ep.
        cp: ranks that share each sequence, with ring attention.
        tp: ranks that share each matrix product.
        ep: ranks that have experts of their own, and rows of the batch of their own. Rows travel to
            the ranks of their experts and back. Parameters of experts are shared by the ranks of
            fsdp and cp alone.
            With tp > 1 experts are split over the ranks of both, which send a part of the rows
            each.
        sequence_parallel: activations between layers are split along the sequence over tp.
        schedule: of the pipeline.
        stages: stages on each rank of the pipeline.
        rows: of the batch, on each data rank, in a microbatch.
        microbatches: in a step.
        recompute: what backward computes again of each block: nothing, all of it ("full"), or all
            but attention and every second product ("selective").
        gather: how often parameters are gathered: for each "microbatch", or once a "step".
        compiled: whether blocks and loss are compiled.
        regather: whether backward gathers again what sequence parallelism has gathered in forward,
            in place of saving it, as Megatron does.
        zero: what the ranks of fsdp share between steps: parameters, gradients and optimizer state
            (3, FSDP), the latter two (2), or optimizer state (1). With 1 and 2 parameters are
            gathered once a step, and with 1 gradients are summed once.
        param_dtype: of parameters in use, and so of products and activations, as that of
            `MixedPrecisionPolicy`.
        reduce_dtype: in which gradients of parameters that ranks share are summed, likewise.
        dtype: of parameters as ranks keep them, of their gradients, and of AdamW's moments.
        balanced: whether sequences are reordered so that causal attention takes each rank of cp the
            same time, as `balance_sequence` does.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stages: int = 1
    rows: int = 1
    microbatches: int = 1
    recompute: Recompute = "none"
    gather: Gather = "microbatch"
    compiled: bool = False
    regather: bool = False
    balanced: bool = False
    zero: Zero = 3
    param_dtype: Dtype = "bfloat16"
    reduce_dtype: Dtype = "float32"
    dtype: Dtype = "float32"

    @property
    def sizes(self) -> dict[str, int]:
        """The axes with more than one rank, major to minor."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}

    @property
    def gathers(self) -> int:
        """How often parameters are gathered in a step; twice each, for forward and backward."""
        return self.microbatches if self.gather == "microbatch" and self.zero == 3 else 1

    @property
    def reductions(self) -> int:
        """How often gradients are summed in a step."""
        is_once = self.gather == "step" or self.zero == 1
        return 1 if is_once else self.microbatches

    @property
    def devices(self) -> int:
        """The number of ranks."""
        return self.pp * self.data * self.cp * self.tp

    @property
    def data(self) -> int:
        """The number of ranks that have rows of the batch of their own."""
        return self.dp * self.fsdp * self.ep

    @property
    def shards(self) -> int:
        """The number of ranks that share a parameter of a stage and a tp rank, but of experts."""
        return self.fsdp * self.cp * self.ep

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which experts are split; () if ep is 1."""
        axes = ("ep", "tp") if self.tp > 1 else ("ep",)
        return axes if self.ep > 1 else ()

    @property
    def expert_shards(self) -> int:
        """The number of ranks that share a parameter of experts, if ep > 1."""
        return self.fsdp * self.cp

    @property
    def expert_ranks(self) -> int:
        """The number of ranks over which experts are split, and their rows travel; 1 if ep is."""
        return self.ep * self.tp if self.ep > 1 else 1

    @property
    def used_bytes(self) -> int:
        """Bytes of an element of a parameter in use."""
        return _SIZES[self.param_dtype]

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of a gradient that is summed over shards."""
        return _SIZES[self.reduce_dtype]

    @property
    def kept_bytes(self) -> int:
        """Bytes of an element of a parameter as ranks keep it."""
        return _SIZES[self.dtype]

    @property
    def precision(self) -> str:
        """The dtypes in words; "" for products in bfloat16 and the rest in float32."""
        dtypes = self.param_dtype, self.reduce_dtype, self.dtype
        if dtypes == ("float32",) * 3:
            return "float32"
        if dtypes == ("bfloat16",) * 3:
            return "bfloat16"
        defaults = ("bfloat16", "float32", "float32")
        pairs = zip(DTYPES, dtypes, defaults, strict=True)
        return " ".join(f"{name}={value}" for name, value, default in pairs if value != default)

    def group(self, axis: str, node: int) -> Group:
        """Return the group of an axis on nodes of so many devices.

        "shards" is fsdp, cp and ep, "expert_shards" fsdp and cp, "expert_ranks" ep and tp.
        """
        size: int = getattr(self, axis)
        innermost = {"shards": "ep", "expert_shards": "cp", "expert_ranks": "tp"}.get(axis, axis)
        names = AXES[AXES.index(innermost) + 1 :]
        stride = 1
        for name in names:
            stride *= getattr(self, name)
        return Group(size, min(size, max(1, node // stride)))

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.sizes.items()) or "one device"
        if self.sequence_parallel:
            axes += " sp"
        if self.pp > 1:
            stages = f" x{self.stages}" if self.stages > 1 else ""
            axes += f" {self.schedule}{stages}"
        if self.zero < 3:
            axes += f" zero={self.zero}"
        axes += f" {self.microbatches} x {self.rows}"
        if self.gather == "step":
            axes += " gather once"
        axes += " compiled" if self.compiled else ""
        axes += " regather" if self.regather else ""
        axes += " balanced" if self.balanced else ""
        axes += f" {self.precision}" if self.precision else ""
        if self.recompute == "selective":
            return f"{axes} recompute selectively"
        return f"{axes} recompute" if self.recompute == "full" else axes


_CHOICES = {
    "schedule": ("1f1b", "gpipe", "interleaved", "zb_h1"),
    "recompute": get_args(Recompute),
    "gather": get_args(Gather),
    "sequence_parallel": (True, False),
    "compiled": (True, False),
    "regather": (True, False),
    "balanced": (True, False),
    "zero": get_args(Zero),
    "param_dtype": get_args(Dtype),
    "reduce_dtype": get_args(Dtype),
    "dtype": get_args(Dtype),
}


def check_field(name: str, value: Any) -> None:
    """Raise ValueError for a field that forms do not have, or a value that it does not take."""
    names = [f.name for f in fields(Form)]
    if name not in names:
        raise ValueError(f"{name}={value!r}: a form has the fields {', '.join(names)}")
    choices = _CHOICES.get(name)
    if choices is None:
        check_count(f"{name}={value!r}", value)
    elif name in DTYPES and value not in choices:
        names_of_dtypes = " or ".join(f'"{choice}"' for choice in choices)
        is_float8 = "float8" in str(value)
        why = "fully_shard does not scale gradients and parameters in float8; " * is_float8
        raise ValueError(f"{name}={shortened(repr(value))}: {why}write {names_of_dtypes}")
    elif value not in choices:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(str, choices))}")


def check_count(said: str, value: Any, least: int = 1) -> None:
    """Raise ValueError, whose text begins with `said`, for what is no whole number from `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{said}: a whole number from {least}")


def check_form(what: str, form: Any) -> None:
    """Raise ValueError for what is no form, or has a value that a field does not take.

    `what` is the function and the argument, such as "tune(near".
    """
    if not isinstance(form, Form):
        raise ValueError(f"{what}={shortened(repr(form))}): pass a Form, such as Form(fsdp=8)")
    for name, value in vars(form).items():
        check_field(name, value)


def why_not(form: Form, model: Description) -> str | None:
    """Return why a model cannot take a form, in words; None if it can."""
    if form.tp > 1:
        for name, count in (
            ("attention heads", model.heads),
            ("key/value heads", model.key_value_heads),
        ):
            if isinstance(count, int) and count % form.tp:
                return f"tp={form.tp} does not divide {count:,} {name}"
        if not model.plan:
            why = f" ({model.why_none_proposed})" if model.why_none_proposed else ""
            return (
                f"tp={form.tp}: the model has no plan of tensor parallelism, nor is one proposed"
                f"{why}"
            )
    if form.ep > 1:
        reason = _why_no_experts(form, model)
        if reason is not None:
            return reason
    if form.sequence_parallel and (form.tp == 1 or model.sequence_plan is None):
        return "sequence parallelism needs tp > 1 and a plan with rowwise layers"
    if form.regather and (not form.sequence_parallel or form.recompute != "none"):
        return "regather needs sequence parallelism, and recompute=none"
    if form.regather and form.ep > 1:
        return f"ep={form.ep}: regather does not take the gather of experts' results"
    if form.gather == "step" and (form.pp == 1 or form.shards == 1):
        return "gather=step needs a pipeline, and fsdp, cp or ep"
    if form.stages > 1 and (form.pp == 1 or form.schedule not in ("interleaved", "zb_h1")):
        return f"stages={form.stages} needs a pipeline, and schedule=interleaved or zb_h1"
    if form.zero < 3 and (form.shards == 1 or form.pp > 1 or form.dp > 1):
        return f"zero={form.zero} needs fsdp or cp, and neither a pipeline nor dp"
    if form.zero < 3 and form.ep == 1 and model.experts % form.shards:
        return (
            f"zero={form.zero}: stacks of experts are split between experts, and {form.shards} "
            f"ranks do not divide {model.experts:,}"
        )
    if form.param_dtype == "float32" and form.dtype == "bfloat16":
        return "param_dtype=float32 dtype=bfloat16: parameters are used as they are kept, or lower"
    if form.balanced and form.cp == 1:
        return "balanced sequences need cp > 1"
    positions = form.cp * (form.tp if form.sequence_parallel else 1)
    if model.sequence % positions:
        return (
            f"cp={form.cp} tp={form.tp}: {positions} does not divide {model.sequence:,} positions"
        )
    if form.cp > 1:
        reason = model.why_not_cp()
        if reason is not None:
            return f"cp={form.cp}: {reason}"
    has_checkpoints = hasattr(model.model, "gradient_checkpointing_enable")
    if form.recompute != "none" and not has_checkpoints:
        return f"recompute={form.recompute}: the model has no gradient_checkpointing_enable()"
    if form.pp * form.stages > model.layers:
        return f"pp={form.pp}: {form.pp * form.stages} stages, and {model.layers} blocks"
    if model.rows != form.data * form.rows * form.microbatches:
        ep = f" ep={form.ep}" if form.ep > 1 else ""
        return (
            f"dp={form.dp} fsdp={form.fsdp}{ep}: {form.data} data ranks with "
            f"{form.microbatches} x {form.rows} rows, and the batch has {model.rows:,}"
        )
    if form.pp > 1 and form.schedule in ("interleaved", "zb_h1") and form.stages > 1:
        rounds = max(1, form.microbatches // form.pp)
        if form.microbatches % rounds:
            return f"{form.schedule}: {form.microbatches} microbatches in {rounds} equal rounds"
    if form.tp > 1:
        reason = model.why_not_tp(form.tp, form.sequence_parallel, form.ep > 1)
        if reason is not None:
            return f"tp={form.tp}: {reason}"
    return None


def _why_no_experts(form: Form, model: Description) -> str | None:
    """Return why the experts of a model cannot be split over ep; None if they can."""
    if not model.experts:
        return f"ep={form.ep}: the model has no experts"
    own, rest = divmod(model.experts, form.expert_ranks)
    if rest and form.tp > 1:
        return (
            f"ep={form.ep} tp={form.tp}: {form.expert_ranks} ranks do not divide "
            f"{model.experts:,} experts"
        )
    if rest:
        return f"ep={form.ep} does not divide {model.experts:,} experts"
    if model.odd_experts is not None:
        return f"ep={form.ep}: {model.odd_experts}"
    if form.zero < 3 and own % form.expert_shards:
        axes = [axis for axis in ("ep", "tp", "fsdp", "cp") if axis in form.sizes]
        sizes = " ".join(f"{axis}={form.sizes[axis]}" for axis in axes)
        return (
            f"{sizes} zero={form.zero}: {form.expert_shards} does not divide the {own} experts of "
            "a rank"
        )
    if form.recompute == "selective":
        return f"ep={form.ep}: selective recomputation does not take the exchange of rows"
    if any(kind.experts and not kind.dispatched for kind in model.costs(1).kinds):
        return f"ep={form.ep}: experts are called by keyword, and rows are counted by position"
    return None
