"""`torch.func.functional_call` on modules of units: other values than the parameters' for one call,
in every form.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointError, checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import MixedPrecisionPolicy, data_parallel, fully_shard, parallelize
from tests.device import DEVICE, on_device
from tests.sharding.parallel.data.training import (
    FORMS,
    batch,
    gradients,
    loss_of,
    model,
    on_ranks,
    same,
    whole,
)
from tests.sharding.ranks import collectives, launched

EACH = pytest.mark.parametrize("form", ["ddp", "zero1", "zero2", "fsdp", "fsdp, let go", "hybrid"])
INPUTS = pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
RANKS = 2


def _loss(made, values, mesh=None, sharded=False):
    """Return the loss with other values."""
    return loss_of(
        lambda tokens: functional_call(made, values, (tokens,)),
        *(batch(mesh, sharded) if mesh else ()),
    )


def _mean(losses):
    return torch.stack(losses).mean()


def _check_equal(results, reference):
    """Assert that the mean over ranks of each loss, and each rank's gradients, are those of one
    process.
    """
    expected_losses, expected_grads = reference
    for i, loss in enumerate(expected_losses):
        torch.testing.assert_close(
            _mean([losses[i] for losses, _ in results]), loss, rtol=1e-12, atol=0
        )
    for _, grads in results:
        same(grads, expected_grads)


def _write(made):
    with torch.no_grad():
        for x in made.parameters():
            x.mul_(1.1)


def _half(named):
    return {name: x * 0.5 for name, x in named.items()}


def _another(named):
    return {name: (x.detach() * 0.5).requires_grad_() for name, x in named.items()}


def _some(named):
    return {
        name: x.square() for name, x in named.items() if "weight" in name and "blocks.0" in name
    }


@pytest.mark.one_in(3, each=["form"])
@EACH
@INPUTS
@pytest.mark.parametrize("values_of", [_half, _another, _some])
def test_gradients_are_those_of_one_process(form, sharded, values_of):
    """The optimizer has written before; afterwards the module computes with its own parameters
    again.
    """

    def run(made, mesh=None):
        _write(made)
        losses = [loss_of(made, *(batch(mesh, sharded) if mesh else ()))]
        losses[0].backward()
        values = values_of(dict(made.named_parameters()))
        losses.append(_loss(made, values, mesh, sharded))
        losses[1].backward()
        losses.append(loss_of(made, *(batch(mesh, sharded) if mesh else ())))
        losses[2].backward()
        leaves = {f"value of {name}": whole(x.grad) for name, x in values.items() if x.is_leaf}
        return [whole(x) for x in losses], gradients(made) | leaves

    _check_equal(
        on_ranks((RANKS,), lambda mesh: run(FORMS[form](model(), mesh), mesh)), run(model())
    )


@pytest.mark.one_in(3, each=["form"])
@EACH
@INPUTS
def test_a_teacher_next_to_its_student(form, sharded):
    """Versions of copies are those of the parameters; identity decides which values are gathered
    already.
    """

    def run(made, mesh=None):
        inputs = batch(mesh, sharded) if mesh else ()
        ema = {name: x.detach().clone() for name, x in made.named_parameters()}
        losses = []
        for _ in range(2):
            with torch.no_grad():
                for name, x in made.named_parameters():
                    x.mul_(1.2)
                    ema[name].mul_(0.5)
                losses += [_loss(made, ema, mesh, sharded), loss_of(made, *inputs)]
            student = loss_of(made, *inputs)
            student.backward()
            losses += [student]
        same(
            {name: whole(x) for name, x in ema.items()},
            {name: 0.25 * whole(x) / 1.2**2 for name, x in made.named_parameters()},
            1e-10,
        )
        return [whole(x) for x in losses], gradients(made)

    _check_equal(
        on_ranks((RANKS,), lambda mesh: run(FORMS[form](model(), mesh), mesh)), run(model())
    )


@pytest.mark.one_in(3, each=["form"])
@EACH
@INPUTS
def test_an_inner_loop_with_second_derivatives(form, sharded):
    """Two inner steps of MAML: the inner gradients of sharded values are averaged, as the outer
    ones.
    """

    def run(made, mesh=None):
        values = dict(made.named_parameters())
        for _ in range(2):
            grads = torch.autograd.grad(
                _loss(made, values, mesh, sharded), list(values.values()), create_graph=True
            )
            values = {
                name: x - 0.3 * grad for (name, x), grad in zip(values.items(), grads, strict=True)
            }
        loss = _loss(made, values, mesh, sharded)
        loss.backward()
        return [whole(loss)], gradients(made)

    _check_equal(
        on_ranks((RANKS,), lambda mesh: run(FORMS[form](model(), mesh), mesh)), run(model())
    )


@EACH
def test_plain_values_are_this_ranks(form):
    """With plain values and inputs each rank has its own task, loss and gradients, as under DDP;
    nothing is sent.
    """

    def run(made, values, inputs):
        fast = {name: x.detach().clone().requires_grad_() for name, x in values.items()}
        loss = loss_of(lambda tokens: functional_call(made, fast, (tokens,)), *inputs)
        return loss.detach(), dict(
            zip(fast, torch.autograd.grad(loss, list(fast.values())), strict=True)
        )

    def program(mesh):
        made, scale = FORMS[form](model(), mesh), 1 + mesh.get_rank()
        values = {name: x * scale for name, x in model().named_parameters()}
        with collectives() as records:
            loss, grads = run(made, values, batch(mesh, False))
        assert not records, launched(records)
        expected_loss, expected = run(model(), values, batch(mesh, False))
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        same(grads, expected)
        assert all(x.grad is None for x in made.parameters())

    on_ranks((RANKS,), program)


@EACH
def test_plain_values_with_sharded_inputs_are_one_value(form):
    def run(made, inputs=()):
        fast = {name: (x.detach() * 0.5).requires_grad_() for name, x in model().named_parameters()}
        loss = loss_of(lambda tokens: functional_call(made, fast, (tokens,)), *inputs)
        loss.backward()
        return whole(loss), {name: whole(x.grad) for name, x in fast.items()}

    expected_loss, expected = run(model())
    for loss, grads in on_ranks(
        (RANKS,), lambda mesh: run(FORMS[form](model(), mesh), batch(mesh, True))
    ):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        same(grads, expected)


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


def _tied():
    torch.manual_seed(3)
    return _Tied().double()


@pytest.mark.parametrize("kind", [data_parallel, fully_shard])
@pytest.mark.parametrize("tie_weights", [True, False])
def test_tied_parameters(kind, tie_weights):
    """Without `tie_weights` only one of the places has the value."""
    x = torch.randn(4, 3, dtype=torch.float64)

    def run(made, x):
        values = {"a.weight": made.a.weight * 0.5}
        loss = functional_call(made, values, (x,), tie_weights=tie_weights).square().mean()
        loss.backward()
        assert made.a.weight is made.b.weight
        return gradients(made)

    expected = run(_tied(), x)
    for grads in on_ranks(
        (RANKS,),
        lambda mesh: run(kind(_tied(), mesh, units=nn.Linear), x.chunk(2)[mesh.get_rank()]),
    ):
        same(grads, expected)


@pytest.mark.one_in(3, each=["form"])
@EACH
@INPUTS
def test_recomputation_around_the_call(form, sharded):
    def run(made, mesh=None):
        values = _half(dict(made.named_parameters()))
        tokens, targets = batch(mesh, sharded) if mesh else (None, None)

        def logits(x):
            return functional_call(made, values, (x,))

        def loss(x, y):
            return loss_of(lambda tokens: checkpoint(logits, tokens, use_reentrant=False), x, y)

        (
            loss(tokens, targets)
            if mesh
            else loss_of(lambda t: checkpoint(logits, t, use_reentrant=False))
        ).backward()
        return gradients(made)

    expected = run(model())
    for grads in on_ranks((RANKS,), lambda mesh: run(FORMS[form](model(), mesh), mesh)):
        same(grads, expected)


@pytest.mark.parametrize("form", ["ddp", "fsdp, let go"])
def test_recomputation_inside_of_the_call_is_refused(form):
    """The call has ended when backward recomputes: torch alone would use the parameters, and be
    wrong.
    """

    def program(mesh):
        made = FORMS[form](model(), mesh)
        block = made.blocks[0]
        block.register_forward_pre_hook(lambda *_: None)

        def forward(tokens):
            x = made.embedding(tokens) + made.shift
            return F.linear(
                checkpoint(block, x, use_reentrant=False), torch.ones(11, 5, dtype=torch.float64)
            )

        values = {f"blocks.0.{name}": x * 0.5 for name, x in block.named_parameters()}
        plain = made.forward
        made.forward = forward
        loss = _loss(made, values, mesh)
        made.forward = plain
        with pytest.raises(CheckpointError, match="number of tensors"):
            loss.backward()

    on_ranks((RANKS,), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_parameters_of_another_model(form):
    """The other model keeps its values and its memory."""

    def run(made, other, mesh=None):
        inputs = batch(mesh, False) if mesh else ()
        values = dict(other.named_parameters())
        losses = []
        for _ in range(2):
            losses.append(_loss(made, values, mesh))
            losses[-1].backward()
            losses += [loss_of(other, *inputs), loss_of(made, *inputs)]
        return [whole(x) for x in losses], gradients(other)

    def other():
        made = model()
        _write(made)
        return made

    results = on_ranks(
        (RANKS,), lambda mesh: run(FORMS[form](model(), mesh), FORMS[form](other(), mesh), mesh)
    )
    _check_equal(results, run(model(), other()))


def test_values_are_used_in_the_dtype_of_the_policy():
    def program(mesh):
        plain = nn.Linear(3, 2)
        made = fully_shard(
            copy.deepcopy(plain), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        )
        dtypes = set()
        made.register_forward_hook(lambda m, *_: dtypes.add(m.weight.dtype))
        for values in (dict(made.named_parameters()), dict(plain.named_parameters())):
            functional_call(
                made, {name: x.detach() * 0.5 for name, x in values.items()}, (torch.ones(4, 3),)
            )
        assert dtypes == {torch.bfloat16}

    on_ranks((RANKS,), program)


@INPUTS
def test_with_tensor_parallelism(sharded):
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def program(mesh):
        made = copy.deepcopy(plain)
        parallelize(
            made, mesh, {"0": sm.parallel.colwise(axis="tp"), "2": sm.parallel.rowwise(axis="tp")}
        )
        fully_shard(made, mesh, axes="dp", units=nn.Linear)
        rows = (
            sm.distribute_tensor(x, mesh, P("dp"))
            if sharded
            else x.chunk(2)[mesh.get_local_rank("dp")]
        )
        functional_call(
            made, {name: p * 0.5 for name, p in made.named_parameters()}, (rows,)
        ).square().mean().backward()
        for name, p in made.named_parameters():
            part = sm.distribute_tensor(expected[name], mesh, p.spec, src_data_rank=None)
            torch.testing.assert_close(p.grad.to_local(), part.to_local(), rtol=1e-12, atol=1e-12)

    def rank():
        with on_device():
            program(sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp")))

    plain_values = {name: p * 0.5 for name, p in plain.named_parameters()}
    functional_call(plain, plain_values, (x,)).square().mean().backward()
    expected = gradients(plain)
    sm.simulate(4)(rank)()


def test_what_is_refused():
    def program(mesh):
        made = FORMS["fsdp"](model(), mesh)
        name, x = next(iter(made.named_parameters()))
        tokens = batch(mesh, False)[0]
        with pytest.raises(
            TypeError, match=rf"{name} was replaced by a plain tensor that is an nn.Parameter"
        ):
            functional_call(made, {name: nn.Parameter(x.detach().full_tensor())}, (tokens,))
        with pytest.raises(
            ValueError,
            match=rf"{name} of shape \[11, 5\] was replaced by .*; pass a value of the same shape",
        ):
            functional_call(made, {name: x.detach()[:5]}, (tokens,))
        small = sm.init_device_mesh("cpu", (2, 1), axis_names=("a", "b"))
        with pytest.raises(ValueError, match=rf"{name} was replaced by .*; pass a value on"):
            functional_call(
                made,
                {name: sm.distribute_tensor(x.detach().full_tensor(), small, P("a"))},
                (tokens,),
            )
        loss_of(made, *batch(mesh, False)).backward()

    on_ranks((RANKS,), program)


@pytest.mark.parametrize("kind", [data_parallel, fully_shard])
def test_copies_of_attributes_are_refused(kind):
    higher = pytest.importorskip("higher")

    def program(mesh):
        made, x = kind(nn.Linear(3, 2), mesh), torch.ones(4, 3)
        with (
            higher.innerloop_ctx(
                made, torch.optim.SGD(made.parameters(), 0.5), copy_initial_weights=False
            ) as (fast, _),
            pytest.raises(
                RuntimeError,
                match=r"is a copy of the attributes of Linear, as copy.copy, higher.innerloop_ctx",
            ),
        ):
            fast(x)
        with pytest.raises(RuntimeError, match=r"Linear is a copy of the attributes of Linear"):
            copy.copy(made)(x)
        assert made(x).shape == copy.deepcopy(made)(x).shape == (4, 2)

    on_ranks((RANKS,), program)
