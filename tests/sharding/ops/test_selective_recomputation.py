"""Selective recomputation: a policy sees the operators of the program on local tensors, and nothing
of what the library does.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm import dispatch_modes
from shardmesh.parallel import colwise, data_parallel, fully_shard, parallelize, rowwise
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh, place

MM = torch.ops.aten.mm.default
X = torch.linspace(-1, 1, 32, dtype=torch.float64).sin().view(8, 4)


class Policy:
    """Saves some operators, as torchtitan does: all products, every other one, or none. Records
    what it sees.
    """

    def __init__(self, saves):
        self.saves, self.seen = saves, Counter()

    def __call__(self, ctx, op, *args, **kwargs):
        assert not ctx.is_recompute
        # as texts: a size is a SymInt, which has no hash, where Dynamo takes the shape as dynamic
        self.seen[op, *[str(tuple(x.shape)) for x in args if isinstance(x, torch.Tensor)]] += 1
        number = sum(count for (name, *_), count in self.seen.items() if name == MM)
        saved = op == MM and (self.saves == "all" or (self.saves == "every other" and number % 2))
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def operators(self):
        found = Counter()
        for (op, *_), count in self.seen.items():
            found[op] += count
        return found


class Products(TorchDispatchMode):
    """Counts products that are computed, also those of recomputation and of backward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func == MM
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        mask = torch.arange(4, device=x.device) > 0
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * mask


def _model(policies, wrap=True, compiled=False, dynamic=False):
    torch.manual_seed(0)
    blocks = [Block().double().to(DEVICE) for _ in policies]
    contexts = [
        functools.partial(create_selective_checkpoint_contexts, policy) for policy in policies
    ]
    if not wrap:
        return nn.Sequential(*blocks)
    model = nn.Sequential(
        *[checkpoint_wrapper(b, context_fn=c) for b, c in zip(blocks, contexts, strict=True)]
    )
    for block in model if compiled else ():
        block.compile(backend="aot_eager", dynamic=dynamic)
    return model


def _tensor_parallel(model, mesh):
    for block in model:
        inner = getattr(block, "_checkpoint_wrapped_module", block)
        parallelize(inner, mesh["b"], {"up": colwise(), "down": rowwise()})
    return model


def _fully_sharded(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh["a"], **options)
    return fully_shard(model, mesh["a"], **options)


FORMS = {
    "fully_shard": lambda m, mesh: _fully_sharded(m, mesh),
    "fully_shard, kept": lambda m, mesh: _fully_sharded(m, mesh, reshard_after_forward=False),
    "fully_shard of the whole": lambda m, mesh: fully_shard(m, mesh["a"]),
    "data_parallel": lambda m, mesh: data_parallel(m, mesh["a"]),
    "parallelize": lambda m, mesh: _tensor_parallel(m, mesh),
    "both": lambda m, mesh: _fully_sharded(_tensor_parallel(m, mesh), mesh),
}


def _input(form, mesh):
    """Return the input: rows of this rank's along "a" where the model is data-parallel, sharded
    under tensor parallelism alone.
    """
    if form == "parallelize":
        return sm.device_put(X.to(DEVICE), mesh["b"], P())
    return X.to(DEVICE).chunk(mesh.size("a"))[mesh.coordinate[0]]


def _step(model, x):
    """Return the gradients of a mean over rows, and the number of products of forward and
    backward.
    """
    with Products() as products:
        loss = model(x).square().sum() / (x.shape[0] * 1.0)
        loss.backward()
    return [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()
    ], products.count


def _in_one_process(saves, wrap=True, x=None):
    policies = [Policy(saves) for _ in range(2)]
    found, products = _step(_model(policies, wrap), X.to(DEVICE) if x is None else x)
    return found, products, [p.operators() for p in policies]


@pytest.mark.one_in(2, each=["form", "saves"])
@pytest.mark.parametrize("saves", ["all", "every other", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_saved_and_what_is_recomputed(form, saves):
    expected, count, seen = _in_one_process(saves)
    recomputed = {"all": 0, "every other": 1, "none": 2}[saves] * 2
    assert count == _in_one_process(saves, wrap=False)[1] + recomputed

    def program(mesh):
        policies = [Policy(saves) for _ in range(2)]
        model = FORMS[form](_model(policies), mesh)
        # Strategies are chosen, and plain operands compared, in the first step only.
        for _ in range(3):
            for policy in policies:
                policy.seen.clear()
            model.zero_grad()
            found, products = _step(model, _input(form, mesh))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert products == count
            for policy, names in zip(policies, seen, strict=True):
                assert policy.operators()[MM] == names[MM] == 2
                alien = {op for op in policy.operators() if op not in names}
                assert not {op for op in alien if "empty" in str(op) or "c10d" in str(op)}, alien
                if form in ("fully_shard", "fully_shard, kept", "fully_shard of the whole"):
                    assert policy.operators() == names

    on_mesh((2, 2), program)


def test_operators_of_a_policy_are_on_local_tensors():
    def program(mesh):
        policy = Policy("all")
        _step(_tensor_parallel(_model([policy]), mesh), _input("parallelize", mesh))
        return {tuple(shapes): count for (op, *shapes), count in policy.seen.items() if op == MM}

    # `up` is [8, 4] and down [4, 8] in one process.
    assert on_mesh((1, 2), program) == [{("(8, 4)", "(4, 4)"): 2}] * 2


@pytest.mark.one_in(2, each=["dynamic", "form"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", ["fully_shard", "both"])
def test_compiled_blocks(form, dynamic):
    torch._dynamo.reset()  # what another test compiled of torch's checkpoint wrapper
    expected = _in_one_process("all")[0]

    def program(mesh):
        policies = [Policy("all") for _ in range(2)]
        compiled = form == "fully_shard"
        model = FORMS[form](_model(policies, compiled=compiled, dynamic=dynamic), mesh)
        for _ in range(2):
            model.zero_grad()
            found, _ = _step_plain(model, _input(form, mesh))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    on_mesh((2, 2), program)


def _step_plain(model, x):
    loss = model(x).square().sum() / x.shape[0]
    loss.backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()], None


@every_rank(2)
def test_redistribution_and_checks_inside_of_a_checkpoint(mesh):
    """All that the library does the first time only: strategies, comparisons of plain operands,
    exchanges of shapes.
    """

    def f(x, w):
        y = (x @ w).redistribute(P())
        part = sm.ShardedTensor.from_local(
            y.to_local(check="always")[: 2 - mesh.get_rank()] * 0, mesh, [sm.Shard(0)]
        )
        return (
            part * torch.full((5,), 2.0, dtype=torch.float64, device=DEVICE)
            + sm.ops.apply(torch.mm, x, w, out_sharding=P())[:3]
        )

    def run(again):
        x, w = (
            place(mesh, t.to(DEVICE), sm.Shard(0), grad=True)
            for t in (X, torch.linspace(0, 1, 20, dtype=torch.float64).view(4, 5))
        )
        with sm.ops.implicit_replication():
            context = functools.partial(create_selective_checkpoint_contexts, Policy("every other"))
            y = checkpoint(f, x, w, use_reentrant=False, context_fn=context) if again else f(x, w)
            y.square().sum().backward()
        return x.grad.full_tensor(), w.grad.full_tensor()

    for _ in range(2):
        torch.testing.assert_close(run(True), run(False), rtol=1e-12, atol=1e-12)


# -- other modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_flop_counter_counts_the_operators_of_the_program(form):
    """Also in the first step, in which strategies are chosen on tensors on "meta", and gradients of
    replicas are compared.
    """

    def count(model, x):
        with FlopCounterMode(display=False) as counter:
            model(x).square().sum().backward()
        return counter.get_total_flops()

    def program(mesh):
        model, x = FORMS[form](_model([Policy("none")] * 2, wrap=False), mesh), _input(form, mesh)
        return [count(model, x) for _ in range(2)]

    whole = count(_model([Policy("none")] * 2, wrap=False), X.to(DEVICE))
    share = {"parallelize": 2, "both": 4}.get(form, 2)
    for found in on_mesh((2, 2), program):
        assert found[0] == found[1]
        assert found[0] >= whole / share


@every_rank(2)
def test_modes_are_active_again_in_their_order(mesh):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(self)
            return func(*args, **(kwargs or {}))

    seen = []
    outer, inner = Mode(), Mode()
    caching, _ = create_selective_checkpoint_contexts(Policy("all"))
    with outer, caching, inner:
        with dispatch_modes.outside_of_recomputation():
            torch.ones(2)
            assert seen == [inner, outer]
        with pytest.raises(ZeroDivisionError), dispatch_modes.outside_of_program_modes():
            torch.ones(2)
            raise ZeroDivisionError
        seen.clear()
        torch.ones(2)
        assert seen == [inner, outer]
        assert torch._C._get_dispatch_stack_at(1) is caching
    assert torch._C._len_torch_dispatch_stack() == 0


@every_rank(2)
def test_modes_of_torch_stay(mesh):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with (
        FakeTensorMode(),
        FlopCounterMode(display=False),
        dispatch_modes.outside_of_program_modes(),
    ):
        assert isinstance(torch.ones(2), FakeTensor)
