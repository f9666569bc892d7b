"""A selection of the programs that other tests run on simulated ranks, on four gloo processes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import Shard
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched, on_mesh, run_programs
from tests.sharding.test_errors import BAD

PROGRAMS = {
    "tensor.test_sharded_tensor": [
        "test_module_to_another_dtype",
        "test_sizes_and_iteration",
    ],
    "tensor.test_state": [
        "test_load_plain_tensors",
        "test_load_sharded_tensors_of_other_placements",
        "test_deepcopy_of_a_module",
        "test_pickle_and_torch_save",
        "test_optimizer_state_in_a_file",
    ],
    "test_ragged": [
        "test_one_rank_may_hold_all",
        "test_state_dicts_copies_and_files",
        "test_gradients_arrive_in_the_layout_of_the_leaf",
        "test_a_gradient_given_in_another_layout_is_moved",
    ],
    "tensor.test_redistribute": [
        "test_one_launch_for_a_bucket",
        "test_gradients_are_moved_in_one_bucket",
        "test_async",
        "test_donated_tensor_cannot_be_used",
        "test_reductions_of_donated_memory_are_in_place",
        "test_a_part_that_is_a_view_of_the_output_is_gathered_in_place",
        "test_rounds",
    ],
    "tensor.autograd.test_gradient_hooks": [
        "test_nonlinear_hook_sees_the_reduced_gradient",
        "test_post_accumulate_grad_hooks_see_reduced_gradients",
    ],
    "ops.test_optimizers": ["test_clip_grad_norm"],
    "tensor.autograd.test_leaf_grads": [
        "test_explicit_gradients",
        "test_replicated_parameter_is_reduced_once",
        "test_one_bucket_per_set_of_axes_and_dtype",
        "test_backward_twice_accumulates",
        "test_accumulate_grads_reduces_once",
        "test_exception_inside_accumulate_grads",
        "test_autograd_grad",
        "test_autograd_backward",
        "test_autograd_functional",
    ],
    "tensor.autograd.test_backward": [
        "test_plain_loss_of_full_tensor",
        "test_a_plain_loss_of_the_local_parts",
        "test_a_plain_loss_of_a_replicated_part",
        "test_exception_during_backward",
        "test_without_grad",
        "test_in_place_accumulation_is_differentiable",
    ],
    "tensor.test_convert": [
        "test_from_local_shares_memory",
        "test_result_is_a_leaf_with_its_own_memory",
        "test_distribute_a_sharded_tensor_redistributes_it",
        "test_awkward_inputs",
        "test_mesh_and_placement_arguments",
        "test_communication_dtypes",
        "test_equal_gradients_of_every_kind_pass_the_check",
    ],
    "test_traps": ["test_one_element_of_a_sharded_tensor"],
    "ops.test_custom_function": ["test_on_local_tensors", "test_only_its_own_lines_communicate"],
    "ops.test_mixing": ["test_implicit_replication", "test_the_same_mesh_made_twice_is_one_mesh"],
    "tensor.test_random": ["test_torch_manual_seed_has_no_effect", "test_hooks_may_draw"],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("module", PROGRAMS)
def test_programs_run_alike_on_real_processes(world4, module):
    taken = world4(run_programs, f"tests.sharding.{module}", PROGRAMS[module])
    assert taken[0] == len(PROGRAMS[module])


def _error_texts() -> dict[str, str]:
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    texts = {}
    for name, (program, _) in BAD.items():
        with collectives() as records, pytest.raises(Exception) as caught:  # noqa: PT011 - the texts are compared below
            program(mesh)
        texts[name] = f"{caught.type.__name__}: {caught.value} {launched(records)}"
    return texts


def test_invalid_input_on_real_processes(world4):
    """The same error on every rank, as in the simulated world, and nothing communicated."""
    first, *others = world4(_error_texts)
    for name, (_, words) in BAD.items():
        assert first[name].endswith(" []")
        assert all(texts[name] == first[name] for texts in others)
        for word in words:
            assert word in first[name]


def _train(mesh: sm.DeviceMesh, spec: sm.P) -> list[float]:
    """Return losses and norms of a model with checkpointing, dropout, accumulation and clipping."""
    torch.manual_seed(0)
    sm.random.manual_seed(1)
    w = torch.nn.Parameter(sm.device_put(torch.randn(6, 6, dtype=torch.float64) / 3, mesh, spec))
    b = torch.nn.Parameter(sm.device_put(torch.zeros(6, dtype=torch.float64), mesh))
    x = torch.randn(9, 6, dtype=torch.float64)
    optimizer = torch.optim.AdamW([w, b], lr=0.01, fused=True)
    losses = []

    def block(x):
        return torch.nn.functional.dropout(torch.tanh(x @ w + b), 0.2)

    for _ in range(3):
        with sm.accumulate_grads():
            for rows in (x[:5], x[5:]):
                y = sm.distribute_tensor(rows, mesh, [Shard(0)])
                y = checkpoint(block, y, use_reentrant=False, context_fn=sm.random.replay_random)
                loss = (y**2).sum() / 9
                loss.backward()
                losses.append(loss.item())
        losses.append(torch.nn.utils.clip_grad_norm_([w, b], 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train_on_four(spec: sm.P) -> list[float]:
    return _train(sm.init_device_mesh(DEVICE, (4,), axis_names=("a",)), spec)


@pytest.mark.parametrize("spec", [sm.P(), sm.P("a"), sm.P(None, "a")], ids=str)
def test_training_with_all_features(world4, spec):
    (expected,) = on_mesh((1,), lambda mesh: _train(mesh, sm.P()))
    for losses in world4(_train_on_four, spec):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
