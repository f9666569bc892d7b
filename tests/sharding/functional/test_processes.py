"""Mapped functions on four gloo processes: a selection of the programs that other tests run on
simulated ranks, and some more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.functional.helpers import leaf, put, same, same_gradients, values
from tests.sharding.ranks import run_programs

PROGRAMS = {
    "test_shard_map": [
        "test_called_and_as_a_decorator",
        "test_columns_and_rows_over_two_axes",
        "test_trees_and_specs_as_prefixes",
        "test_plain_tensors_are_the_same_on_every_rank",
        "test_parts_of_given_sizes",
        "test_other_dtypes",
        "test_pending_in_and_out",
        "test_keys_as_arguments",
    ],
    "test_nested": [
        "test_an_argument_as_the_result",
        "test_a_mapped_function_in_another",
        "test_recursion_and_methods",
    ],
    "test_partly_manual": [
        "test_the_function_sees_sharded_tensors_on_the_other_axes",
        "test_a_dim_that_both_kinds_of_axes_split",
        "test_uneven_parts",
        "test_pending_over_either_kind_of_axis",
        "test_a_nested_function_makes_the_other_axes_manual",
    ],
    "test_calls": [
        "test_a_cached_call_adds_no_communication",
        "test_arguments_with_other_layouts_are_redistributed",
        "test_results_whose_shape_depends_on_the_data",
        "test_an_exception_resets_state",
        "test_shapes_in_alternation",
        "test_double_backward",
    ],
    "test_check_modes": [
        "test_check_always_checks_the_second_call",
        "test_values_compares_arguments",
        "test_values_compares_the_replicas_of_each_part",
        "test_values_of_every_kind",
    ],
    "transforms.test_gradients": [
        "test_trees_over_a_global_function",
        "test_a_parameter_used_many_times_and_several_in_one_bucket",
        "test_over_a_mapped_function",
        "test_inside",
        "test_inside_over_two_axes",
        "test_inside_nested_and_outside_again",
    ],
    "transforms.test_vjp_jvp": ["test_vjp_inside", "test_jvp_inside", "test_jvp"],
    "transforms.test_torch_transforms": [
        "test_vmap_of_rows_and_of_columns",
        "test_gradients_of_each_row",
        "test_a_collective_under_grad",
        "test_second_derivatives_of_a_collective",
        "test_checkpoint_of_a_mapped_function",
        "test_functional_call_of_a_module",
    ],
    "transforms.test_vmap": [
        "test_the_batch_dim_of_results_is_split_as_in_the_arguments",
        "test_spmd_axis_name",
        "test_plain_and_sharded_together",
        "test_a_mapped_function_whose_mesh_has_the_axis_of_the_batch",
        "test_one_collective_for_all_examples",
        "test_an_exception_inside_resets_state",
        "test_transforms_of_torch_around_are_refused",
    ],
    "transforms.test_forward": [
        "test_tangents_have_the_layout_of_their_values",
        "test_pending_primals_and_results",
        "test_an_operator_without_a_forward_derivative",
        "test_linearize_inside",
        "test_jacobians_of_trees",
        "test_a_function_of_plain_tensors_over_a_mapped_one",
    ],
    "test_control": [
        "test_branches_under_vmap",
        "test_a_branch_inside_a_mapped_function",
        "test_scan_inside_and_under_transforms",
    ],
}
X, W = values(6, 4), values(4, 5, seed=1)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("module", PROGRAMS)
def test_programs_match_on_gloo_processes(world4, module):
    taken = world4(run_programs, f"tests.sharding.functional.{module}", PROGRAMS[module])
    assert taken[0] == len(PROGRAMS[module])


def _mesh() -> sm.DeviceMesh:
    return sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))


# -- errors ----------------------------------------------------------------------------------------


def _errors() -> list[str]:
    """Run programs that are wrong on every rank or on one; check that the mesh works after each
    error.
    """
    mesh, texts = _mesh(), []
    mine = mesh.world.rank == 3
    programs = [
        lambda x, w: (x @ w).exp(),
        lambda x, w: w * sm.axis_index("b"),
        lambda x, w: sm.pcast(w, "a", to="unreduced"),
        lambda x, w: w * x.sum() if mine else w,
        lambda x, w: w[:2] if mine else w,
        lambda x, w: None if mine else w,
    ]
    for f in programs:
        mapped = sm.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
        with pytest.raises((sm.errors.ShardingTypeError, TypeError, ValueError)) as caught:
            mapped(put(mesh, X, P("a")), put(mesh, W))
        texts.append(str(caught.value))
        ok = sm.shard_map(
            lambda x, w: sm.psum(x.sum(), "a"), mesh=mesh, in_specs=(P("a"), P()), out_specs=P()
        )
        same(ok(put(mesh, X, P("a")), W), X.sum())
    return texts


def test_all_ranks_raise(world4):
    by_rank = world4(_errors)
    for i in (0, 1, 2, 4):
        assert len({texts[i] for texts in by_rank}) == 1
    for i, words in enumerate(
        ("varies over 'a'", "axis_index at", "is pending over 'a'", "varies over 'a'", "add up to")
    ):
        assert all(words in texts[i] for texts in by_rank)
    assert by_rank[0][3] == f"on rank 3: ShardingTypeError: {by_rank[3][3]}"
    assert "on rank 3: TypeError" in by_rank[1][5] or "numbers or kinds" in by_rank[1][5]


# -- under way -------------------------------------------------------------------------------------


def _ring(x: Any, w: Any) -> Any:
    """Return the sum over all blocks of x, which are sent around the ring while one of them is
    processed.
    """
    n, total, block = sm.axis_size("a"), 0, x
    for i in range(n):
        coming = (
            sm.async_start(sm.ppermute, block, "a", [(j, (j + 1) % n) for j in range(n)])
            if i + 1 < n
            else None
        )
        total = total + (block @ w).tanh()
        block = coming.wait() if coming is not None else block
    return total


def _overlap() -> None:
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    whole = values(8, 4, seed=2)
    mapped = sm.shard_map(_ring, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    for _ in range(2):
        x = put(mesh, whole, P("a"), grad=True)
        w = put(mesh, W, grad=True)
        px = leaf(whole)
        pw = leaf(W)
        y = mapped(x, w)
        plain = (px @ pw).tanh().view(4, 2, 5).sum(0).repeat(4, 1)
        same(y, plain.detach())
        same_gradients([x, w], [px, pw], y.sin().sum(), plain.sin().sum())


def _many_under_way() -> None:
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))

    def f(x):
        futures = [
            sm.async_start(sm.psum, {"x": x, "y": x * 2}, "a"),
            sm.async_start(sm.all_gather, x, "a", tiled=True),
            sm.async_start(sm.psum_scatter, x, "a", scatter_dimension=1, tiled=True),
        ]
        total, whole, part = (future.wait() for future in futures)
        return total["y"] - total["x"], whole, part

    mapped = sm.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=(P(), P(), P(None, "a")))
    whole = values(8, 4, seed=3)
    for _ in range(2):
        total, gathered, part = mapped(put(mesh, whole, P("a")))
        same(total, whole.view(4, 2, 4).sum(0))
        same(gathered, whole)
        same(part, whole.view(4, 2, 4).sum(0))


@pytest.mark.parametrize("program", [_overlap, _many_under_way])
def test_async_collectives(world4, program):
    world4(program)


# -- forward mode, compiled bodies: torch keeps their state by process, so that ranks must be proces


def _forward_mode() -> None:
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    tangent = values(4, 5, seed=8)

    def f(w, x, tangent):
        return torch.func.jvp(lambda w: sm.psum((x @ w).sin().sum(0), "a"), (w,), (tangent,))

    mapped = sm.shard_map(f, mesh=mesh, in_specs=(P(), P("a"), P()), out_specs=P())
    wanted = torch.func.jvp(lambda w: (X @ w).sin().sum(0), (W,), (tangent,))
    for _ in range(2):
        for x, y in zip(
            mapped(put(mesh, W), put(mesh, X, P("a")), put(mesh, tangent)), wanted, strict=True
        ):
            same(x, y)


def test_forward_mode(world4):
    world4(_forward_mode)


# -- training --------------------------------------------------------------------------------------


def _losses(mesh: sm.DeviceMesh) -> list[float]:
    """Run five steps of a two-layer network with columns then rows over b, examples over a; the
    whole step is one mapped function.
    """

    specs = {"up": P(None, "b"), "down": P("b")}

    @sm.shard_map(mesh=mesh, in_specs=(specs, P("a"), P("a")), out_specs=(P(), specs))
    def step(params, x, y):
        def loss(params):
            out = sm.psum((x @ params["up"]).tanh() @ params["down"], "b")
            return sm.pmean((out - y).square().mean(), "a")

        value, grads = sm.value_and_grad(loss)(params)
        return value, {name: p - 0.1 * grads[name] for name, p in params.items()}

    params = {
        "up": put(mesh, values(4, 8, seed=4), P(None, "b")),
        "down": put(mesh, values(8, 3, seed=5), P("b")),
    }
    x = put(mesh, values(8, 4, seed=6), P("a"))
    y = put(mesh, values(8, 3, seed=7), P("a"))
    found = []
    for _ in range(5):
        value, params = step(params, x, y)
        found.append(value.item())
    return found


def _train() -> list[float]:
    return _losses(_mesh())


def test_training(world4):
    up, down, wanted = leaf(values(4, 8, seed=4)), leaf(values(8, 3, seed=5)), []
    for _ in range(5):
        loss = ((values(8, 4, seed=6) @ up).tanh() @ down - values(8, 3, seed=7)).square().mean()
        wanted.append(loss.item())
        up, down = (
            leaf(p - 0.1 * g)
            for p, g in zip((up, down), torch.autograd.grad(loss, [up, down]), strict=True)
        )
    for losses in world4(_train):
        torch.testing.assert_close(losses, wanted)
