"""Results of the alias analysis for nodes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardmesh.sharding.jit.collectives import WAIT
from shardmesh.sharding.jit.passes.alias import MemoryUse, is_view, live_bytes

aten = torch.ops.aten


def made(target: Any, graph: fx.Graph, *args: Any, shape: tuple[int, ...] = (4,)) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = shape, (1,) * len(shape), torch.float32, torch.device("cpu")
    return node


def placed(graph: fx.Graph, name: str, memory: tuple[int, int] | None) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = (4,), (1,), torch.float32, torch.device("cpu")
    if memory is not None:
        node.meta["memory"] = memory
    return node


def test_inputs_that_overlap_are_one_class() -> None:
    graph = fx.Graph()
    a, b, c = (
        placed(graph, name, memory)
        for name, memory in [("a", (0, 16)), ("b", (8, 16)), ("c", (32, 16))]
    )
    graph.output(a)
    use = MemoryUse(graph)
    assert use.of[a] == use.of[b] != use.of[c]


def test_an_input_in_unknown_memory_may_be_any() -> None:
    graph = fx.Graph()
    a, b = placed(graph, "a", (0, 16)), placed(graph, "b", None)
    graph.output(a)
    use = MemoryUse(graph)
    assert use.of[a] == use.of[b]


def test_views_writes_and_lists() -> None:
    graph = fx.Graph()
    a = placed(graph, "a", (0, 16))
    view = made(aten.view.default, graph, a, [2, 2])
    parts = graph.call_function(aten.split.Tensor, (view, 1))
    part = made(operator.getitem, graph, parts, 0)
    fresh = made(aten.mul.Tensor, graph, part, 2)
    write = made(aten.add_.Tensor, graph, part, fresh)
    norm = graph.call_function(
        aten.native_batch_norm.default, (fresh, None, None, a, a, True, 0.1, 1e-5)
    )
    graph.output(write)
    use = MemoryUse(graph)
    assert use.of[a] == use.of[view] == use.of[part] == use.of[write] == use.writes[write]
    assert use.of[fresh].isdisjoint(use.of[a])
    assert use.of[a] <= use.writes[norm]  # its schema does not say so
    assert is_view(view)
    assert is_view(part)
    assert not is_view(write)


def test_a_collective_reads_its_operand_until_it_is_waited_for() -> None:
    graph = fx.Graph()
    a = placed(graph, "a", (0, 16))
    start = made(torch.ops.shardmesh.all_gather.default, graph, a, "0,1", 0, shape=(8,))
    wait = made(WAIT, graph, start, shape=(8,))
    total = made(aten.sum.default, graph, wait, shape=())
    graph.output(total)
    use = MemoryUse(graph)
    assert use.of[a] <= use.reads[start] & use.reads[wait]
    assert use.of[wait] == use.of[start]
    assert live_bytes(graph, use) == [0, 32, 32, 36, 4]


def test_what_is_unknown_is_a_fence() -> None:
    graph = fx.Graph()
    node = graph.call_function(print, ())
    graph.output(())
    assert node in MemoryUse(graph).fences
