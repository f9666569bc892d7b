"""A selection of other tests in the world that behaves like NCCL
(`tests/mesh/simulated/nccl_world.py`); `pytest --world nccl` runs all.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from shardmesh.sharding.parallel.context.attention import METHODS
from tests.device import DEVICE
from tests.mesh.simulated.nccl_world import nccl_world
from tests.sharding.parallel.compositions import UNEVEN, Composition
from tests.sharding.parallel.data.test_checkpointing import _around_inside

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="stands for a device")

CASES: list[tuple[str, str, tuple[Any, ...]]] = [
    ("tensor.test_redistribute", "test_async", ()),
    ("tensor.test_redistribute", "test_async_of_every_kind_of_pending", ()),
    ("tensor.test_redistribute", "test_gradients_are_moved_in_one_bucket", ()),
    ("tensor.test_redistribute", "test_reductions_of_donated_memory_are_in_place", ()),
    (
        "tensor.test_redistribute",
        "test_a_part_that_is_a_view_of_the_output_is_gathered_in_place",
        (),
    ),
    ("tensor.test_redistribute", "test_rounds", ()),
    *[
        ("parallel.data.test_fully_shard", "test_several_forwards", (form,))
        for form in ("zero1", "hybrid")
    ],
    ("parallel.data.test_fully_shard", "test_hooks_that_step_in_backward", ("fsdp",)),
    ("parallel.data.test_fully_shard", "test_autograd_grad_and_retained_graphs", ("zero2",)),
    ("parallel.data.test_accumulation", "test_gradients_of_micro_batches", ("hybrid",)),
    ("parallel.data.test_checkpointing", "test_gradients", ("fsdp", False, _around_inside)),
    ("parallel.data.test_precision", "test_quantized_transport", ()),
    (
        "parallel.test_compositions",
        "test_twenty_steps",
        (Composition("zero2", "tp", "global", UNEVEN, (2, 2)),),
    ),
    *[
        ("parallel.context.test_attention", "test_equals_full_attention", ("batch", method))
        for method in METHODS
    ],
    (
        "parallel.context.test_attention",
        "test_equals_full_attention",
        ("ragged, one empty", "ring"),
    ),
    ("parallel.experts.test_experts", "test_equals_the_dense_mixture", ("batch and sequence", 1.0)),
    ("parallel.test_uneven_inputs", "test_loops_without_end", ()),
    ("parallel.pipeline.stages.test_dependencies", "test_decoding_with_caches", (2,)),
    ("parallel.pipeline.test_tied", "test_copies_with_other_layouts", ()),
    (
        "parallel.pipeline.test_training",
        "test_an_infinity_in_one_stage_skips_the_step_in_all",
        ("fsdp",),
    ),
    (
        "parallel.pipeline.test_context_parallel",
        "test_sequences_over_an_axis",
        ("1f1b", ["blocks.1"], "ring", "fully_shard"),
    ),
    ("checkpoint.test_round_trip", "test_random_pairs_of_meshes", (range(5),)),
    ("checkpoint.test_round_trip", "test_pending_values_are_reduced", ()),
    ("checkpoint.test_async", "test_completes_without_wait", ()),
]


@pytest.mark.parametrize(
    ("module", "name", "given"), CASES, ids=lambda x: x if isinstance(x, str) else None
)
def test_like_nccl(module: str, name: str, given: tuple[Any, ...], tmp_path: Path) -> None:
    test = getattr(importlib.import_module(f"tests.sharding.{module}"), name)
    with nccl_world():
        test(
            *given,
            **{"tmp_path": tmp_path} if "tmp_path" in inspect.signature(test).parameters else {},
        )


def test_graphs_like_nccl() -> None:
    programs = importlib.import_module("tests.sharding.jit.test_programs")
    with nccl_world(ahead=False):
        assert programs.equal_programs(range(46, 48), "eager") >= 1
