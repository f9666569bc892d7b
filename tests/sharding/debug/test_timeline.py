"""Timelines of graphs: durations in closed form, lanes, traces that other tools read, pictures,
times of real calls.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.debug import Timeline
from shardmesh.topology import Link, Topology
from tests.device import DEVICE
from tests.sharding.jit.steps import mlp, pair, training_step

EXACT = Topology(Link(1e-3, 1e6), Link(2e-3, 1e5), memory=1e9, node_size=2)
MESH = sm.AbstractMesh((2, 4), ("fsdp", "tp"))
FREE: dict[str, Any] = {"overlap": True, "max_live_bytes": 1 << 40, "bucket_bytes": 0}


def layers(x: Any, *weights: Any) -> Any:
    """Each weight is gathered before its use."""
    for w in weights:
        x = x @ w.redistribute(P())
    return x


def lowered(count: int, **options: Any) -> Any:
    n = 64
    specs = [P("fsdp"), *[P("tp")] * count]
    return sm.jit(layers, **options).lower(*(sm.Layout.of(MESH, spec, (n, n)) for spec in specs))


def lane(found: Timeline, name: str, kind: str) -> list[Any]:
    return [event for event in found.events if event.lane == name and event.kind == kind]


def test_durations_in_closed_form() -> None:
    found = sm.debug.timeline(lowered(2), flops=1e6, topology=EXACT)
    product, received = 2 * 32 * 64 * 64 / 1e6, 3 * 16 * 64 * 4
    outside = received * 2 / 3 / 2  # two of four ranks are on each node, and so many rails
    gather = 2e-3 + max(received / 1e6, outside / 1e5)
    assert [event.duration for event in lane(found, "tp", "collective")] == pytest.approx(
        [gather] * 2
    )
    assert [event.duration for event in lane(found, "compute", "operator")] == pytest.approx(
        [product] * 2
    )
    assert found.seconds == pytest.approx(2 * gather + 2 * product)
    assert found.exposed_seconds == pytest.approx(2 * gather)
    assert found.seconds_of("operator") + found.seconds_of("wait") == pytest.approx(found.seconds)
    assert found.lanes == ("compute", "tp")
    within = sm.debug.timeline(
        lowered(1), flops={torch.float32: 1e6}, topology=Topology(EXACT.local, EXACT.network, 1e9)
    )
    assert within.seconds_of("collective", "tp") == pytest.approx(1e-3 + 3 * 16 * 64 * 4 / 1e6)


def test_operators_that_are_bound_by_memory_and_views() -> None:
    def f(x: Any) -> Any:
        y = x.t()[1:].relu()
        y.add_(1)
        y.copy_(x.expand(2, 8, 8)[0, 1:])
        return y

    mesh = sm.AbstractMesh((2,), ("tp",))
    found = sm.debug.timeline(sm.jit(f).lower(sm.Layout.of(mesh, P(), (8, 8))), topology=EXACT)
    moved = [event.details["bytes"] / 4 for event in found.events]
    assert [event.name for event in found.events] == ["relu", "add_", "copy_"]
    assert moved == [2 * 56, 2 * 56, 2 * 56]
    assert found.seconds == pytest.approx(sum(moved) * 4 / 2 / 1e9)


def test_starting_early_makes_the_critical_path_shorter() -> None:
    plain = sm.debug.timeline(lowered(4), flops=1e7, topology=EXACT)
    early = sm.debug.timeline(
        lowered(4, compiler_options=FREE).compile(), flops=1e7, topology=EXACT
    )
    for kind in ("operator", "collective"):
        assert early.seconds_of(kind) == pytest.approx(plain.seconds_of(kind))
    assert early.seconds < plain.seconds - 1e-3
    assert early.exposed_seconds < plain.exposed_seconds
    assert early.seconds >= early.seconds_of("collective")
    first, second = lane(early, "tp", "collective")[:2]
    assert second.start < lane(early, "compute", "operator")[0].end  # next to the first product
    assert second.start >= first.end


@pytest.mark.parametrize("options", [None, FREE], ids=["default", "overlap"])
def test_collectives_of_a_lane_run_in_order(options: Any) -> None:
    compiled = lowered(3, compiler_options=options).compile()
    found = sm.debug.timeline(compiled)
    events = lane(found, "tp", "collective")
    order = [node.name for node in compiled.graph.nodes if node in compiled.axes]
    assert [event.node for event in events] == order
    check_lanes(found)


def check_lanes(found: Timeline) -> None:
    """Events of one lane do not overlap."""
    for name in found.lanes:
        events = [event for event in found.events if event.lane == name]
        for before, after in itertools.pairwise(events):
            assert after.start >= before.end - 1e-12


def check_trace(path: Path, found: Timeline) -> None:
    """A file is in Chrome's trace format: complete events on named threads, which do not overlap,
    and arrows with two ends.
    """
    events = json.loads(path.read_text())["traceEvents"]
    names = {
        e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert tuple(names.values()) == found.lanes
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(found.events)
    ends: dict[int, float] = defaultdict(float)
    for e in complete:
        assert {type(e[key]) for key in ("pid", "tid")} == {int}
        assert type(e["name"]) is type(e["cat"]) is str
        assert e["ts"] >= ends[e["tid"]] - 1e-6
        ends[e["tid"]] = e["ts"] + e["dur"]
    assert max(ends.values()) == pytest.approx(found.seconds * 1e6)
    arrows: dict[int, list[str]] = defaultdict(list)
    for e in events:
        if e["ph"] in "sf":
            arrows[e["id"]].append(e["ph"])
    assert len(arrows) == sum(event.kind == "wait" for event in found.events)
    assert all(ends == ["s", "f"] for ends in arrows.values())
    assert {e["ph"] for e in events} <= {"M", "X", "s", "f"}


def test_files(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    found = sm.debug.timeline(lowered(3), path=tmp_path / "step.json")
    check_trace(tmp_path / "step.json", found)
    found.save(tmp_path / "step.png")
    pixels = image.imread(tmp_path / "step.png")
    assert pixels.shape[0] > 100
    assert pixels.shape[1] > 1000
    figure = found.picture()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["compute", "tp"]
    assert len({tuple(pixel) for pixel in pixels[:, :, :3].reshape(-1, 3).round(1)}) > 3
    with pytest.raises(ValueError, match="xyz"):
        found.save(tmp_path / "step.xyz")


def test_a_step_as_predicted_and_as_measured(tmp_path: Path) -> None:
    def main(measured: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        step = sm.jit(
            training_step(model, optimizer), backend="eager", compiler_options={"overlap": True}
        )
        losses = [step(*pair(mesh, i)).item() for i in range(3)]
        predicted = [
            sm.debug.timeline(x) for x in (step, step.recorded[0], step.lower(*pair(mesh, 0)))
        ]
        check_lanes(predicted[0])
        assert predicted[0].events == predicted[1].events
        assert (
            len(lane(predicted[0], "tp", "collective"))
            == step.recorded[0].cost_analysis().launches["tp"]
        )
        found: Any = None
        if measured:
            call = lambda: losses.append(step(*pair(mesh, 3)).item())  # noqa: E731
            found = sm.debug.timeline(step, measure=call, path=tmp_path / f"{mesh.world.rank}.json")
            assert found.measured
            assert "measured" in str(found)
            check_lanes(found)
            check_trace(tmp_path / f"{mesh.world.rank}.json", found)
            nodes = [event.node for event in lane(found, "tp", "collective")]
            assert nodes == [event.node for event in lane(predicted[0], "tp", "collective")]
            operators = {event.node for event in lane(found, "compute", "operator")}
            assert {event.node for event in lane(predicted[0], "compute", "operator")} <= operators
        else:
            losses.append(step(*pair(mesh, 3)).item())
        losses.append(step(*pair(mesh, 4)).item())
        return losses, len(step.recorded)

    assert sm.simulate(2)(main)(True) == sm.simulate(2)(main)(False)


def test_what_has_no_timeline() -> None:
    f = sm.jit(lambda x: x * 2, backend="eager")
    x = torch.ones(3)
    with pytest.raises(TypeError, match="give a function"):
        sm.debug.timeline(lambda x: x)
    with pytest.raises(ValueError, match="no graph yet; call it"):
        sm.debug.timeline(f)
    f(x)
    for rate in (0, -1.0, float("inf"), "fast", {torch.float32: 0}):
        with pytest.raises(ValueError, match="positive number"):
            sm.debug.timeline(f, flops=rate)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the call has not run this graph"):
        sm.debug.timeline(f, measure=lambda: f(torch.ones(4)))
    with pytest.raises(ValueError, match="only a graph that a call has made"):
        sm.debug.timeline(lowered(1).compile(), measure=lambda: None)
    with pytest.raises(ZeroDivisionError):
        sm.debug.timeline(f, measure=lambda: 1 / 0)
    assert torch.equal(f(x), x * 2)
    empty = sm.jit(lambda x: x).lower(sm.Layout.of(MESH, P(), (3,)))
    assert str(sm.debug.timeline(empty)) == (
        "rank 0, predicted: 0 us, of which 0 us (0%) without operators\ncompute: 0 us in 0 "
        "operators"
    )


def test_loading_other_functions_of_debug_loads_no_graphs() -> None:
    program = (
        "import sys, shardmesh as sm; sm.debug.comm_report; print(any('.jit' in m for m in "
        "sys.modules if 'shardmesh' in m))"
    )
    program += "; print(sm.debug.timeline.__name__, 'timeline' in dir(sm.debug))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "timeline", "True"]
