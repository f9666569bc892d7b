"""Compiled and recomputed blocks, derived from the operators of an eager run."""

from __future__ import annotations

import pytest
import torch

from shardmesh.sharding.tune.counts import Kernel, OperatorCounts, Tape
from shardmesh.sharding.tune.variants import compile_tape, fused, select
from tests.sharding.tune import tiny

ROWS, WIDTH = 4, 8
SIZE = ROWS * WIDTH * 4


@pytest.fixture(scope="module")
def run():
    """The operators of y = w2 relu(2 (w1 x)), forward and backward, and what is saved."""
    with torch.device("meta"):
        x = torch.empty(ROWS, WIDTH, requires_grad=True)
        first = torch.empty(WIDTH, WIDTH, requires_grad=True)
        second = torch.empty(WIDTH, WIDTH, requires_grad=True)
    counts = OperatorCounts([first, second])
    hooks = torch.autograd.graph.saved_tensors_hooks(counts.save, lambda x: x)
    counts.block = 0
    with counts, hooks:
        out = ((x @ first) * 2).relu() @ second
    counts.block = None
    forward, counts.tape.operations = counts.tape.operations, []
    with counts:
        out.sum().backward()
    return counts, forward


def test_operators_between_products_are_one_kernel(run):
    counts, forward = run
    kernels = fused(counts.tape, forward)
    assert [operation.name for operation in forward] == ["mm", "mul", "relu", "mm"]
    products = {kernel for kernel in kernels if kernel.kind == "matmul"}
    assert products == {Kernel("matmul", 2 * ROWS * WIDTH * WIDTH, 2 * SIZE, WIDTH * WIDTH * 4)}
    others = {kernel: n for kernel, n in kernels.items() if kernel.kind == "other"}
    assert others == {Kernel("other", 0, 2 * SIZE, 0): 1}  # eager operators move 4 SIZE


def test_a_compiled_program_saves_the_fewest_bytes(run):
    """x, and the result of relu or the product before it; not both."""
    counts, forward = run
    saved = compile_tape(counts.tape, forward, counts.tape.operations, counts.saved).saved
    assert sum(counts.tape.sizes[key] for key in saved) == 2 * SIZE


def test_sums_of_weights_do_not_depend_on_rows(run):
    counts, _ = run
    products = [x.kernel for x in counts.tape.operations if x.kernel.kind == "matmul"]
    assert sorted(kernel.fixed for kernel in products) == [WIDTH * WIDTH * 4] * 4
    assert all(kernel.moved == 2 * SIZE for kernel in products)


def test_every_second_product_is_saved(run):
    _, forward = run
    selective = select(forward)
    assert selective.saved == set(forward[0].results)
    assert [operation.name for operation in selective.again] == ["mul", "relu", "mm"]


def test_grouped_products_are_computed_again(run):
    """As programs do, which save every second product of those whose flops torch counts."""
    _, forward = run
    grouped = [x._replace(name="_grouped_mm") if x.name == "mm" else x for x in forward]
    assert select(grouped).saved == set()
    assert select(grouped).again == grouped


def test_the_same_memory_has_one_number():
    tape = Tape([])
    x = torch.empty(2, 3, device="meta")
    assert tape.key(x) == tape.key(x.t()) == tape.key(x[1:])
    assert tape.key(torch.empty(2, 3, device="meta")) != tape.key(x)


def test_blocks_of_llama_move_and_save_less_when_compiled():
    llama = tiny.description()
    eager, compiled = llama.costs(1).block, llama.costs(1, compiled=True).block
    assert compiled.forward.matmul == eager.forward.matmul
    assert compiled.backward.matmul == eager.backward.matmul
    assert compiled.forward.traffic < eager.forward.traffic / 2
    assert compiled.backward.traffic < eager.backward.traffic / 1.5
    stream = tiny.POSITIONS * tiny.WIDTH * 2
    heads = tiny.KEY_HEADS / tiny.HEADS
    # the input, queries, keys, values, the result of attention, the input of the MLP, gate and up
    products = stream * (4 + 2 * heads + 2 * tiny.HIDDEN / tiny.WIDTH)
    few = tiny.POSITIONS * 4 * (tiny.HEADS + 4)  # normalizers in float32
    assert products <= compiled.saved <= products + few
    assert eager.selected < compiled.saved < eager.saved
