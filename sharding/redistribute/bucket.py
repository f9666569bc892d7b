"""Several redistributions at once: the collectives of equal group, kind and dtype become one.

    x: reduce_scatter over dp   \\
    y: reduce_scatter over dp    >  one reduce_scatter over dp of one buffer, one all_gather over tp
    z: all_gather over tp       /

Plans are followed stage by stage, each stage ending in at most one collective for each tensor; the collectives of a
stage are all in flight before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.device_mesh import DeviceMesh
from ...mesh.monitor.ledger.profiler import named
from ...mesh.monitor.recording.recorder import CommTag
from ...mesh.monitor.recording.trace_buffer import stable_hash
from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from .executor import Run, bucket_key, compile_collective, compile_local
from .packed_collectives import Collective, Pending
from .plan import Plan, Step, plan

_NAMED = 4  # so many tensors of a bucket are named in errors
Pair = tuple[Layout, Layout]


class _Stage:
    """What happens up to and including one collective for each tensor.

    Attributes:
        before: for each tensor the local operations that come first.
        buckets: which tensors travel together, and how; each tensor is in one bucket at most.
    """

    def __init__(self, segments: Sequence[Sequence[Step]]) -> None:
        meshes = [segment[0].src.mesh if segment else None for segment in segments]
        self.before: list[list[Run]] = [
            [compile_local(step) for step in segment if step.is_local] for segment in segments
        ]
        together: dict[object, list[int]] = {}
        for i, (segment, mesh) in enumerate(zip(segments, meshes, strict=True)):
            if segment and not segment[-1].is_local and isinstance(mesh, DeviceMesh):
                key = mesh.group(segment[-1].axes), bucket_key(segment[-1])
                together.setdefault(key, []).append(i)
        self.buckets: list[tuple[list[int], Collective]] = [
            (members, compile_collective([segments[i][-1] for i in members])) for members in together.values()
        ]

    def start(self, tensors: list[Tensor], fresh: list[bool]) -> list[tuple[list[int], Pending]]:
        for i, runs in enumerate(self.before):
            for run in runs:
                tensors[i] = run(tensors[i])
        under_way = []
        for members, collective in self.buckets:
            own = all(fresh[i] for i in members)
            under_way.append((members, collective.begin([tensors[i] for i in members], own=own)))
        return under_way


class ManyRunner:
    """Plans made ready on this rank: from a list of this rank's parts to the list of its parts after."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        segments = [_segments(p) for p in plans]
        self._dtypes = [p.dst.dtype for p in plans]
        depth = max(map(len, segments), default=0)
        self._comm_context, self._note = _world_of(plans).comm_context, _note(plans)
        self.stages = [_Stage([s[k] if k < len(s) else () for s in segments]) for k in range(depth)]

    @property
    def launches(self) -> int:
        """Number of collectives that this rank takes part in."""
        return sum(len(stage.buckets) for stage in self.stages)

    def start(self, tensors: list[Tensor], *, own: bool = False, note: CommTag | None = None) -> Callable[[], list[Tensor]]:
        """Everything but waiting for the last stage; call what comes back for the results. `note`: what it is for, in place of layouts."""
        note = note or self._note
        tensors, fresh = list(tensors), [own] * len(tensors)
        under_way: list[tuple[list[int], Pending]] = []
        self._comm_context.tag = note
        try:
            with named(note):
                for stage in self.stages:
                    _finish(under_way, tensors, fresh)
                    under_way = stage.start(tensors, fresh)
        finally:
            self._comm_context.tag = None

        def wait() -> list[Tensor]:
            _finish(under_way, tensors, fresh)
            under_way.clear()
            return [x if x.dtype is dtype else x.to(dtype) for x, dtype in zip(tensors, self._dtypes, strict=True)]

        return wait


def _world_of(plans: Sequence[Plan]) -> Any:
    return current_world() if not plans else getattr(plans[0].src.mesh, "world", None)


def _note(plans: Sequence[Plan]) -> CommTag:
    """The first few, and a number that depends on all."""
    moves = [f"{p.src} -> {p.dst.spec}" for p in plans]
    digest = stable_hash(str(moves))
    return CommTag(f"{len(moves)} tensors ({'; '.join(moves[:_NAMED])}{', ...' if len(moves) > _NAMED else ''}, {digest:x})")


def _finish(under_way: Sequence[tuple[list[int], Pending]], tensors: list[Tensor], fresh: list[bool]) -> None:
    for members, pending in under_way:
        for i, result in zip(members, pending.wait(), strict=True):
            tensors[i], fresh[i] = result, True


def _segments(p: Plan) -> list[list[Step]]:
    """The steps cut behind each collective; none for a rank outside the mesh."""
    mesh = p.src.mesh
    if not isinstance(mesh, DeviceMesh) or mesh.coordinate is None:
        return []
    found: list[list[Step]] = [[]]
    for step in p.steps:
        found[-1].append(step)
        if not step.is_local:
            found.append([])
    return [segment for segment in found if segment]


def many_runner(pairs: tuple[Pair, ...]) -> ManyRunner:
    """The compiled plans of these (source, destination) layouts for this rank, cached on the first source."""
    cache = pairs[0][0].runners
    found = cache.get(pairs)
    if found is None:
        found = keep(cache, pairs, ManyRunner([plan(src, dst) for src, dst in pairs]))
    return found
