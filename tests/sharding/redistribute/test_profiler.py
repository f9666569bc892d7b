"""Redistributions in torch.profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

import shardmesh as sm
from shardmesh.mesh import init_device_mesh, null_world
from shardmesh.mesh.comm.recording.recorder import CommTag
from shardmesh.sharding.redistribute.executor import profiler_range


def test_each_redistribution_has_a_name() -> None:
    with null_world(4):
        mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
        x, y = (
            sm.device_put(torch.ones(8, 4), mesh, sm.P(axis)).requires_grad_()
            for axis in ("dp", "tp")
        )
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            x.redistribute(sm.P()).to_local()
            sm.redistribute_many([x, y], [sm.P(), sm.P(None, "dp")])
            y.redistribute(sm.P("dp")).to_local().sum().backward()
    names = {e.name for e in prof.events() or () if e.name.startswith("shardmesh::redistribute ")}
    found = sorted(
        name.removeprefix("shardmesh::redistribute ").replace(" on (dp=2, tp=2)", "")
        for name in names
    )
    assert "f32[8, 4] @ P('dp', None) -> P(None, None)" in found
    assert "f32[8, 4] @ P('tp', None) -> P('dp', None)" in found
    assert any(
        name.startswith("2 tensors (f32[8, 4] @ P('dp', None) -> P(None, None);") for name in found
    )
    assert len(found) >= 4  # and the way back of the gradient


def test_without_a_profiler_no_events_are_created() -> None:
    with profiler_range(CommTag("a")) as first, profiler_range(CommTag("b")) as second:
        assert first is second is None
