"""Operators of aten called by programs, `torch.ops.aten.add.Tensor(x, y)`: run as the public
functions of their names.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from tests.sharding.ops.rules.table import registered, samples_of
from tests.sharding.ops.rules.test_table import FILLED
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, place, same_error

assert FILLED  # what fills the table of samples

# What comes out of these is memory, in whole or in part.
_UNINITIALISED = {"empty_like", "new_empty", "_ctc_loss"}
# No public function takes their arguments and gives their results (of `elu` the scales).
_UNKNOWN = {
    "_cdist_forward",
    "_pdist_forward",
    "block_diag",
    "elu",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "log_sigmoid_forward",
    "max_unpool2d",
    "max_unpool3d",
    "multilabel_margin_loss_forward",
    "nll_loss2d_forward",
    "nll_loss_forward",
    "squeeze_",
    "transpose_",
    "unique_consecutive",
    "unique_dim",
    "unsqueeze_",
}
_CANNOT_KEEP = {"cumprod_", "cumsum_", "renorm_"}  # as `x.cumsum_(0)` of a split dim


class _Recorder(TorchDispatchMode):
    """The first calls of each operator of aten, with copies of arguments and results."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.calls: dict[Any, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        found = self.calls.setdefault(func, [])
        if (
            func.namespace == "aten"
            and len(found) < self.most
            and any(isinstance(x, Tensor) for x in pytree.tree_leaves(given))
        ):
            found.append((given, pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), out)))
        return out


def _recorded() -> dict[Any, list[Any]]:
    """Return the aten operators that the samples of the operator table call."""
    recorder = _Recorder(most=3)
    for label, func in registered():
        for sample in samples_of(label):
            args = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), sample.args)
            try:
                with recorder, torch.no_grad():
                    func(*args, **sample.kwargs)
            except Exception:
                # A sample for another function of the same name, or one that is refused.
                continue
    return {
        func: calls
        for func, calls in recorder.calls.items()
        if calls and func.overloadpacket.__name__ not in _UNINITIALISED
    }


def _run(mesh: sm.DeviceMesh, recorded: dict[Any, list[Any]]) -> dict[str, set[str]]:
    """Return the operators by outcome; "right" if all calls equal torch's."""
    outcomes: dict[str, set[str]] = {}
    for func, calls in recorded.items():
        for (args, kwargs), want in calls:
            try:
                args, kwargs = pytree.tree_map_only(
                    Tensor,
                    lambda t: place(mesh, t.clone(), *[Shard(0)] * bool(t.ndim)),
                    (args, kwargs),
                )
                got = pytree.tree_map_only(
                    sm.ShardedTensor, lambda x: x.full_tensor(), func(*args, **kwargs)
                )
                torch.testing.assert_close(
                    pytree.tree_leaves(got), pytree.tree_leaves(want), equal_nan=True
                )
                found = "right"
            except NotImplementedError as error:
                text = str(error)
                reasons = {
                    "unknown": "has no public function of torch that does the same",
                    "memory": "works on the memory of a tensor",
                }
                found = next(
                    (outcome for outcome, reason in reasons.items() if reason in text), text
                )
            except sm.sharding.ops.rules.propagation.CannotKeep:
                found = "cannot keep"
            except Exception as error:
                error.add_note(f"{func} of {args}, {kwargs}")
                raise
            outcomes.setdefault(found, set()).add(func.overloadpacket.__name__)
    return outcomes


def test_the_operators_that_the_table_comes_down_to():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operator has no rule
        recorded = _recorded()
        outcomes = on_mesh((2,), lambda mesh: _run(mesh, recorded))[0]
    assert set(outcomes) == {"right", "unknown", "memory", "cannot keep"}
    assert outcomes["unknown"] == _UNKNOWN
    assert outcomes["cannot keep"] == _CANNOT_KEEP
    assert len(recorded) > 550


@every_rank(2, 2)
def test_rules_and_gradients_are_those_of_the_public_functions(mesh):
    aten = torch.ops.aten
    whole, weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(8, 6)
    x = place(mesh, whole, Shard(0), Shard(1), grad=True)
    w = place(mesh, weight, Replicate(), Shard(1))
    with collectives() as records:
        assert aten.mm.default(x, aten.t(w)).spec == (x @ w.t()).spec
        assert aten.sum.dim_IntList(x, [1], True).spec == P("a", None, unreduced={"b"})
        assert aten.mul(x, 2.0).spec == x.spec
        assert aten.contiguous(x).spec == x.spec
        assert aten._foreach_add([x.detach(), x.detach()], 1.0)[1].spec == x.spec
    assert launched(records) == []
    aten.mul.Tensor(x, x).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)
    torch.testing.assert_close(aten._foreach_norm([x.detach()], 2)[0].full_tensor(), whole.norm())


@every_rank(2)
def test_arguments_by_name_in_place_and_out(mesh):
    aten, x = torch.ops.aten, place(mesh, torch.arange(6.0).view(3, 2), Shard(0))
    assert aten.sum(self=x, dim=[0], keepdim=True).full_tensor().tolist() == [[6.0, 9.0]]
    assert aten.softmax.int(x, dim=1).full_tensor().sum().item() == pytest.approx(3)
    assert aten.slice.Tensor(x, 0, 1, 2**63 - 1).full_tensor().tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert aten.mse_loss(x, x * 0, 2).item() == 55
    y = x.clone()
    assert aten.add_.Tensor(y, y, alpha=2) is y
    assert aten.add.out(x, x, out=y) is y
    assert y.full_tensor().tolist() == (2 * x).full_tensor().tolist()
    assert aten.silu_(y) is y
    torch.testing.assert_close(y.full_tensor(), torch.nn.functional.silu(2 * x.full_tensor()))
    pending = sm.from_local(torch.ones(2), mesh, [Partial()])
    assert aten.add.Tensor(pending, pending).placements == (Partial(),)


def test_operator_without_a_public_function_raises():
    def program(mesh):
        x = place(mesh, torch.ones(2, 3))
        torch.ops.aten._cdist_forward(x, x, 2.0, None)

    text = same_error((2,), program, NotImplementedError)
    assert text.startswith(
        "torch.ops.aten._cdist_forward has no public function of torch that does the same"
    )
    assert "x.to_local()" in text


def test_native_dropout_backward_scales_by_the_mask():
    def program(mesh):
        x = sm.device_put(torch.ones(6, 4), mesh, P("a"))
        _, mask = torch.ops.aten.native_dropout(x, 0.5, True)
        grad = torch.ops.aten.native_dropout_backward(torch.full_like(x, 3.0), mask, 2.0)
        assert grad.spec == x.spec
        assert torch.equal(grad.full_tensor(), 6.0 * mask.full_tensor())

    on_mesh((2,), program)


def test_as_strided_takes_only_the_tensors_own_strides():
    def program(mesh):
        x = sm.device_put(torch.arange(12.0).reshape(3, 4), mesh, P("a"))
        leaf = x.clone().requires_grad_()
        own = (3, 4), (4, 1)
        for same in (
            leaf.as_strided(*own),
            torch.as_strided(leaf, *own, 0),
            torch.ops.aten.as_strided(leaf, *own),
        ):
            assert same.spec == x.spec
            assert torch.equal(same.full_tensor(), x.full_tensor())
        leaf.as_strided((3, 4), (4, 1)).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), torch.ones(3, 4))
        x.as_strided((4, 3), (3, 1))

    assert "only the tensor's own ((3, 4), (4, 1), 0)" in same_error(
        (2,), program, NotImplementedError, silent=False
    )
