"""Long graphs are cut where they repeat themselves, and equal parts are compiled once; what is
compiled is kept on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.recording.trace_buffer import Header
from shardmesh.sharding.jit.backends import repeats, segments
from shardmesh.sharding.jit.backends.segments import Segment
from tests.device import DEVICE
from tests.sharding.jit.steps import composed, mlp, pair
from tests.sharding.jit.test_steps import assert_same
from tests.sharding.parallel.compositions import EVEN, UNEVEN, Composition, whole
from tests.tiers import slow


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs count as long from 20 operators on."""
    monkeypatch.setattr(repeats, "LONG", 20)
    monkeypatch.setattr(repeats, "_SMALLEST", 4)


def deep(mesh: sm.DeviceMesh, layers: int) -> nn.Sequential:
    return nn.Sequential(*(mlp(mesh) for _ in range(layers)))


def counted(layers: int) -> tuple[list[int], list[int], float]:
    """Train a model of so many equal layers; return sizes of the graphs that were compiled, of all
    segments, and the last loss.
    """
    mesh, sizes = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",)), []
    model = deep(mesh, layers)

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        sizes.append(len(module.graph.nodes))
        return module

    def step(x: Any, y: Any) -> Any:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
        return loss

    f = sm.jit(step, backend=backend)
    losses = [whole(f(*pair(mesh, i))).item() for i in range(3)]
    (entry,) = [
        entry for state in f._states.values() for each in state.entries.values() for entry in each
    ]
    names = entry.runner.__globals__.values()  # type: ignore[union-attr]
    return sizes, [len(x.compiled.graph.nodes) for x in names if isinstance(x, Segment)], losses[-1]


@pytest.mark.usefixtures("short")
def test_compiled_graphs_do_not_grow_with_the_number_of_layers() -> None:
    few, many = sm.simulate(2)(counted)(6)[0], sm.simulate(2)(counted)(18)[0]
    assert sum(many[0]) <= sum(few[0]) * 1.1
    assert sum(many[1]) > 2.5 * sum(few[1])  # while what runs does


def test_a_short_graph_is_compiled_as_a_whole() -> None:
    sizes, segments, _ = sm.simulate(2)(counted)(4)[0]
    assert len(sizes) == len(segments) == 1


def test_cut_graphs_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sm.simulate(2)(counted)(7)[0]
    monkeypatch.setattr(repeats, "LONG", 20)
    for smallest in (2, 4, 30):
        monkeypatch.setattr(repeats, "_SMALLEST", smallest)
        found = sm.simulate(2)(counted)(7)[0]
        assert found[2] == expected[2]
        assert len(found[1]) > 1


COMPOSITIONS = [
    slow(Composition("fsdp", "sp", "global", UNEVEN, (2, 2))),
    Composition("hsdp", "tp", "plain", EVEN, (1, 2, 2)),
]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("case", COMPOSITIONS, ids=str)
def test_compositions(case: Composition) -> None:
    simulated = sm.simulate(int(np.prod(case.shape)))
    for expected, found in zip(
        simulated(composed)(case, None), simulated(composed)(case, "aot_eager"), strict=True
    ):
        assert_same(found, expected, 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_most_repeated_part_of_random_letters(seed: int) -> None:
    """A part that is repeated most is found with its period, wherever it is."""
    random = np.random.default_rng(seed)
    period, count = int(random.integers(13, 40)), int(random.integers(3, 9))
    part = random.permutation(period)  # has no repetition in it
    before, after = (
        random.integers(100, 10_000, size=int(random.integers(0, 30))) for _ in range(2)
    )
    letters = np.concatenate([before, np.tile(part, count), after])
    start, end, found = repeats._most_repeated(letters)
    assert (start, end, found) == (len(before), len(before) + period * count, period)
    assert repeats._most_repeated(random.permutation(200)) == (0, 0, 0)


@pytest.mark.usefixtures("short")
def test_collectives_of_equal_parts_are_recorded_with_their_own_lines() -> None:
    """In the trace and in a mismatch they have the lines of the program, though two layers share
    one compiled graph.
    """

    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        blocks = [mlp(mesh) for _ in range(6)]

        def f(x: Any) -> Any:
            for block in blocks[:3]:
                x = block(x).redistribute(P()) * 2
            for block in blocks[3:]:
                x = block(x).redistribute(P()) * 2
            return x

        g = sm.jit(f, backend="aot_eager")
        x = sm.ones(4, 8, device_mesh=mesh, placements=P())
        places = []
        for _ in range(3):
            before = mesh.world.trace_buffer.words[Header.RECORDS]
            g(x)
            places.append(
                [
                    record.place
                    for record in mesh.world.trace_buffer.records()
                    if record.number >= before
                ]
            )
        return places[0], places[-1]

    for recorded, run in sm.simulate(2)(main)():
        assert run == recorded[1:7]  # between what ranks agree on
        assert len(set(run)) == 2


def test_progress_line_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(segments, "_PATIENCE_S", 0.01)

    def slow(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        time.sleep(0.3)
        return module

    @sm.jit(backend=slow)
    def train_step(x: Tensor) -> Tensor:
        return (x.sin() + 1).cos() * 2

    train_step(torch.ones(2)), train_step(torch.ones(2))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "sm.jit: compiling train_step, part 1 of 1 ..."
    assert said[1].startswith("sm.jit: compiled train_step in 0.")
    assert len(said) == 2


def test_no_progress_line_for_what_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    f = sm.jit(lambda x: (x.sin() + 1).cos() * 2, backend=lambda module, inputs: module)
    f(torch.ones(2)), f(torch.ones(2))
    assert capsys.readouterr().err == ""


_PROGRAM = """
import json, torch, shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.recording.trace_buffer import Header
from torch._dynamo.utils import counters

def main():
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("x",))
    f = sm.jit(lambda x: (x.sin() * 2).redistribute(P()).cos() + 1, backend="inductor")
    x = sm.ones(4, 6, device_mesh=mesh, placements=P("x"))
    return [f(x).to_local().sum().item() for _ in range(3)]

result = sm.simulate(2)(main)()[0]
counts = {name: n for name, n in counters["inductor"].items() if "fxgraph" in name}
print(json.dumps([result, counts]))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (values, first), (again, second) = found
    assert values == again
    assert len(set(values)) == 1
    assert first.get("fxgraph_cache_miss", 0) >= 1
    assert "fxgraph_cache_bypass" not in first
    assert second == {"fxgraph_cache_hit": second.get("fxgraph_cache_hit")}
