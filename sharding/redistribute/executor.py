"""`Executor`: plans compiled for this rank, for one tensor or for several at once.

A stage ends in at most one collective for each tensor. The collectives of a stage that have the
same group, kind and dtype become one, and all of a stage are launched before the first is waited
for:

    x: reduce_scatter over dp   \\
    y: reduce_scatter over dp    >  one reduce_scatter over dp of one buffer, one all_gather over tp
    z: all_gather over tp       /

One tensor is a list of one. Its steps need no bookkeeping, so a call that is waited for runs them
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ...mesh.comm.dispatch_modes import count_modes, outside_of_recomputation
from ...mesh.comm.pending import Pending
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.recording.trace_buffer import stable_hash
from ...mesh.comm.work import DONE
from ..layout.bounded_cache import HEAVY_LIMIT, LayoutCache
from ..layout.layout import Layout
from .packed_collectives import Collective
from .plan import Plan, Step, plan
from .step_collectives import (
    LocalRun,
    bucket_key,
    can_scale,
    compile_collective,
    compile_local,
    device_mesh,
)

_NOTHING = nullcontext()  # may be entered many times
_NAMED_TENSORS = 4  # of a bucket, in errors
Pair = tuple[Layout, Layout]
Launched = list[tuple["_Bucket", Pending[list[Tensor]]]]


class _Bucket:
    """Tensors that share a collective.

    Attributes:
        members: their indices.
        collective: the collective, over all of them.
        is_all_reduce: whether it may work in place on intermediate results.
        is_final: whether its results are those of the plans.
    """

    __slots__ = ("collective", "is_all_reduce", "is_final", "members")

    def __init__(
        self, members: list[int], collective: Collective, is_all_reduce: bool, is_final: bool
    ) -> None:
        self.members = members
        self.collective = collective
        self.is_all_reduce = is_all_reduce
        self.is_final = is_final


class _Stage:
    """Local steps, then one collective for each tensor.

    Attributes:
        before: for each tensor the local steps before.
        makes_new: for each tensor, whether these give a new tensor, which may be overwritten.
        buckets: each tensor is in one at most.
    """

    __slots__ = ("before", "buckets", "makes_new")

    def __init__(self, segments: Sequence[Sequence[Step]], is_final: Sequence[bool]) -> None:
        """Compile the stage.

        Args:
            segments: for each tensor its steps, of which the last may be a collective.
            is_final: for each tensor, whether the stage ends its plan.
        """
        local = [[step for step in segment if step.is_local] for segment in segments]
        together: dict[object, list[int]] = {}
        for i, segment in enumerate(segments):
            if segment and not segment[-1].is_local:
                group = device_mesh(segment[-1].src).group(segment[-1].axes)
                together.setdefault((group, bucket_key(segment[-1])), []).append(i)
        self.buckets: list[_Bucket] = []
        for members in together.values():
            steps = [segments[i][-1] for i in members]
            scale = None
            if can_scale(steps[0]):
                # the division of an average is done while packing, with the same bits
                scale = _common_scale([local[i] for i in members])
            if scale is not None:
                for i in members:
                    local[i].pop()
            self.buckets.append(
                _Bucket(
                    members,
                    compile_collective(steps, scale),
                    is_all_reduce=steps[0].op == "all_reduce",
                    is_final=all(is_final[i] for i in members),
                )
            )
        self.makes_new = [any(step.op == "scale" for step in steps) for steps in local]
        self.before: list[list[LocalRun]] = [
            [compile_local(step) for step in steps] for steps in local
        ]


def _common_scale(local: Sequence[Sequence[Step]]) -> float | None:
    """Return the factor of the last local steps of all tensors, if it is one power of two."""
    scales = {_exact_scale(steps) for steps in local}
    return scales.pop() if len(scales) == 1 else None


def _exact_scale(steps: Sequence[Step]) -> float | None:
    """Return the factor of the last of these steps, if it divides by a power of two."""
    if not steps or steps[-1].op != "scale" or not steps[-1].src.dtype.is_floating_point:
        return None
    count = steps[-1].group_size
    is_power_of_two = count & (count - 1) == 0
    return 1 / count if is_power_of_two else None


class Executor:
    """Plans compiled for this rank: boxes, groups and packing are looked up once, not per call.

    The parts may have another dtype than the plans: local steps keep it, and the first collective
    casts as it packs. On a rank outside the mesh, parts are returned unchanged.

    Attributes:
        stages: local steps and collectives, in order.
        after: for each tensor the local steps after its last collective.
    """

    __slots__ = ("_dtypes", "_meta_result", "_runs", "_tag", "after", "stages")

    def __init__(self, plans: Sequence[Plan]) -> None:
        meshes = [device_mesh(p.src) for p in plans]
        steps = [
            p.steps if mesh.coordinate is not None else ()
            for p, mesh in zip(plans, meshes, strict=True)
        ]
        segments, rests = zip(*map(_segments, steps), strict=True)
        self.stages = []
        for k in range(max(map(len, segments))):
            stage = [own[k] if k < len(own) else () for own in segments]
            is_final = [
                k == len(own) - 1 and not rest for own, rest in zip(segments, rests, strict=True)
            ]
            self.stages.append(_Stage(stage, is_final))
        self.after = [[compile_local(step) for step in rest] for rest in rests]
        self._dtypes = [p.dst.dtype for p in plans]
        self._tag = CommTag(_name(plans))
        self._runs = self._sequential() if len(plans) == 1 else []
        # the layout of a result on "meta"; None if that is where the mesh computes
        self._meta_result = plans[0].dst if meshes[0].device_type != "meta" else None

    @property
    def launches(self) -> int:
        """Number of collectives that this rank takes part in."""
        return sum(len(stage.buckets) for stage in self.stages)

    # -- one tensor, waited for --------------------------------------------------------------------

    def _sequential(self) -> list[tuple[Callable[..., Any], bool | None]]:
        """Return all that happens to a single tensor.

        Pairs of a function of it and None, or `start` of a collective and whether to donate it.
        """
        runs: list[tuple[Callable[..., Any], bool | None]] = []
        for number, stage in enumerate(self.stages):
            runs += [(run, None) for run in stage.before[0]]
            is_new = number > 0 or stage.makes_new[0]
            for bucket in stage.buckets:
                runs.append((bucket.collective.start, is_new and bucket.is_all_reduce))
        return [*runs, *((run, None) for run in self.after[0])]

    def __call__(self, local: Tensor) -> Tensor:
        """Return this rank's part after the plan, which must be the only one."""
        if local.is_meta and self._meta_result is not None:  # nothing to move
            return local.new_empty(self._meta_result.local_shape, dtype=self._dtypes[0])
        if profiler._is_profiler_enabled or count_modes():
            with outside_of_recomputation(), profiler_range(self._tag):
                return self._run(local)
        return self._run(local)

    def _run(self, local: Tensor) -> Tensor:
        for run, donate in self._runs:
            local = run(local) if donate is None else run([local], donate=donate, tag=self._tag)[0]
        dtype = self._dtypes[0]
        return local if local.dtype is dtype else local.to(dtype)

    # -- any number, perhaps async -----------------------------------------------------------------

    def start(
        self,
        tensors: list[Tensor],
        *,
        donate: bool = False,
        outs: Sequence[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]]:
        """Launch all steps up to the last collectives, and return the parts to come.

        Collectives are launched in the plans' order, so that ranks may wait in different orders.

        Args:
            tensors: a list of this rank's parts, which is emptied.
            donate: the parts may be overwritten, and results may share their memory.
            outs: contiguous tensors to put the results into.
            tag: what the collectives are for, if the caller knows more than the layouts.
        """
        parts: list[Any] = list(tensors)
        tensors.clear()
        is_new = [donate] * len(parts)  # whether a part may be overwritten
        launched: Launched = []
        tag = tag or self._tag
        with outside_of_recomputation(), profiler_range(tag):
            for stage in self.stages:
                _finish(launched, parts, is_new)
                launched = self._launch(stage, parts, is_new, donate, outs, tag)

        def finish() -> list[Tensor]:
            with outside_of_recomputation():
                _finish(launched, parts, is_new)
                return self._results(parts, outs)

        return Pending(finish, DONE, *[pending for _, pending in launched])

    def _launch(
        self,
        stage: _Stage,
        parts: list[Any],
        is_new: list[bool],
        donate: bool,
        outs: Sequence[Tensor] | None,
        tag: CommTag,
    ) -> Launched:
        """Run a stage's local steps, and launch its collectives; their parts are None meanwhile."""
        for i, runs in enumerate(stage.before):
            for run in runs:
                parts[i] = run(parts[i])
            is_new[i] = is_new[i] or stage.makes_new[i]
        launched: Launched = []
        for bucket in stage.buckets:
            inputs = [parts[i] for i in bucket.members]
            for i in bucket.members:
                parts[i] = None  # so that its memory can be freed as soon as it is packed
            donated = (donate or bucket.is_all_reduce) and all(is_new[i] for i in bucket.members)
            into = (
                [outs[i] for i in bucket.members] if outs is not None and bucket.is_final else None
            )
            launched.append(
                (bucket, bucket.collective.launch(inputs, donate=donated, outs=into, tag=tag))
            )
        return launched

    def _results(self, parts: list[Any], outs: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the parts after the last local steps, in the plans' dtypes, perhaps in `outs`."""
        results = []
        for i, (part, runs, dtype) in enumerate(zip(parts, self.after, self._dtypes, strict=True)):
            for run in runs:
                part = run(part)
            if outs is not None and part is not outs[i]:
                part = outs[i].copy_(part.view_as(outs[i]))
            results.append(part if part.dtype is dtype else part.to(dtype))
        return results


def _segments(steps: Sequence[Step]) -> tuple[list[list[Step]], list[Step]]:
    """Return the steps up to and including each collective, and those after the last one."""
    segments: list[list[Step]] = [[]]
    for step in steps:
        segments[-1].append(step)
        if not step.is_local:
            segments.append([])
    return segments[:-1], segments[-1]


def _finish(launched: Launched, parts: list[Any], is_new: list[bool]) -> None:
    """Wait for the collectives of a stage, and put their results in the places of the parts."""
    for bucket, pending in launched:
        for i, result in zip(bucket.members, pending.wait(), strict=True):
            parts[i], is_new[i] = result, True
    launched.clear()


def _name(plans: Sequence[Plan]) -> str:
    """Return the layouts of the first few plans, and a number that depends on all."""
    moves = [f"{p.src} -> {p.dst.spec}" for p in plans]
    if len(moves) == 1:
        return moves[0]
    return (
        f"{len(moves)} tensors "
        f"({'; '.join(moves[:_NAMED_TENSORS])}{', ...' if len(moves) > _NAMED_TENSORS else ''}, "
        f"{stable_hash(str(moves)):x})"
    )


# -- cached ----------------------------------------------------------------------------------------

# (destination and options) -> the compiled plan, on the source
_executors: LayoutCache[Any, Executor] = LayoutCache(HEAVY_LIMIT)


def executor(
    src: Layout,
    dst: Layout,
    max_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
) -> Executor:
    """Return the compiled plan, cached on the source layout. The options are those of `plan`."""
    plain = max_bytes is None and accumulate_dtype is None and transport is None
    key = dst if plain else (dst, max_bytes, accumulate_dtype, transport)
    compiled = _executors.get(src, key)
    if compiled is None:
        redistribution = plan(
            src, dst, max_bytes=max_bytes, accumulate_dtype=accumulate_dtype, transport=transport
        )
        compiled = _executors.keep(src, key, Executor([redistribution]))
    return compiled


def executor_of_many(pairs: Sequence[Pair], **options: Any) -> Executor:
    """Return the compiled plans of these pairs of layouts, cached on the first source."""
    if len(pairs) == 1:
        return executor(*pairs[0], **options)
    first = pairs[0][0]
    key = (tuple(pairs), *options.values())
    compiled = _executors.get(first, key)
    if compiled is None:
        compiled = Executor([plan(src, dst, **options) for src, dst in pairs])
        _executors.keep(first, key, compiled)
    return compiled


def profiler_range(tag: CommTag) -> AbstractContextManager[object]:
    """Show what happens inside as a range in torch.profiler.

    Its name is like `shardmesh::redistribute f32[8, 4] @ P('dp') -> P()`. Does nothing while no
    profiler runs.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"shardmesh::redistribute {tag.text}")
