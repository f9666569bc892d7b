"""torch's styles with plain tensors between the modules: the all_reduces of Megatron, one for each
block and pass, in every step but the first, which also checks that ranks use replicated outputs
alike.
"""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import shardmesh as sm
from tests.device import DEVICE
from tests.sharding.ranks import collectives, on_mesh

ROWS, WIDTH, HIDDEN = 6, 8, 10  # HIDDEN is cut unevenly by four ranks
ACTIVATION = ("all_reduce", ROWS * WIDTH * 8 * 2 * 3 // 4)  # of 4 ranks
COLUMNS, ROWWISE = torch_parallel.ColwiseParallel, torch_parallel.RowwiseParallel


def linear(k: int, n: int, **kwargs) -> nn.Linear:
    return nn.Linear(k, n, dtype=torch.float64, **kwargs)


class GeluMLP(nn.Module):
    def __init__(self, residual: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down, self.residual = linear(WIDTH, hidden), linear(hidden, WIDTH), residual

    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))
        return x + y if self.residual else y


class PlainAttention(nn.Module):
    """Four heads, one per rank, on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // 4)).transpose(-2, -3)
            for part in (self.q, self.k, self.v)
        )
        return self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        )


class PreNormLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.attention = PlainAttention()
        self.mlp = GeluMLP(True, hidden)

    def forward(self, x):
        return self.mlp(x + self.attention(self.norm(x)))


class Transformer(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList([PreNormLayer(hidden), PreNormLayer(hidden)])
        self.head = linear(WIDTH, 12, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "*.up": COLUMNS(),
    "*.down": ROWWISE(),
}
TRANSFORMER_PLAN = {
    "embed": ROWWISE(input_layouts=Replicate()),
    **{f"layers.*.attention.{name}": COLUMNS() for name in "qkv"},
    "layers.*.attention.o": ROWWISE(),
    "layers.*.mlp.up": COLUMNS(),
    "layers.*.mlp.down": ROWWISE(),
    "head": COLUMNS(output_layouts=Replicate()),
}
TOKENS = torch.tensor([1, 11, 0, 5, 5, 7])
X = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def seeded(make):
    """Return the module with the same values on every rank."""
    torch.manual_seed(0)
    return make().to(DEVICE)


def blocks(residual: bool = False, hidden: int = HIDDEN) -> nn.Module:
    return nn.Sequential(*[GeluMLP(residual, hidden) for _ in range(4)])


def counted(records) -> Counter:
    return Counter((record.op, record.bytes_sent) for record in records)


def whole(x):
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


def step(model, x):
    """Return the communication of forward and backward, the loss and the gradients."""
    with collectives() as forward:
        loss = model(x).square().mean()
    with collectives() as backward:
        loss.backward()
    named = {name: whole(p.grad) for name, p in model.named_parameters()}
    return counted(forward), counted(backward), (loss.item(), named, x.grad)


def check_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("input_grad", [True, False])
def test_calls_of_four_blocks(residual, input_grad):
    def inputs():
        return X.clone().to(DEVICE).requires_grad_(input_grad)

    expected = step(seeded(lambda: blocks(residual)), inputs())[2]

    def program(mesh):
        model = sm.compat.parallelize_module(seeded(lambda: blocks(residual)), mesh, PLAN)
        for checks in ({("all_reduce", 152 * 2 * 3 // 4): 4}, {}):
            model.zero_grad()
            forward, backward, found = step(model, inputs())
            check_same(found, expected)
            assert forward == {ACTIVATION: 4}
            assert backward == {ACTIVATION: 3 + input_grad, **checks}

    on_mesh((4,), program)


def test_calls_of_a_transformer():
    """Forward: embedding, attention and GeluMLP of two layers, and the logits. Backward: the inputs
    of q, k, v, up and head.
    """
    expected = step(seeded(Transformer), TOKENS.to(DEVICE))[2]

    def program(mesh):
        model = sm.compat.parallelize_module(seeded(Transformer), mesh, TRANSFORMER_PLAN)
        for _ in range(2):
            model.zero_grad()
            forward, backward, found = step(model, TOKENS.to(DEVICE))
            check_same(found, expected)
        assert forward == {ACTIVATION: 5, ("all_gather", ROWS * 12 // 4 * 8 * 3): 1}
        assert backward == {ACTIVATION: 9}

    on_mesh((4,), program)


def test_prepared_input_shared_by_q_k_and_v():
    """A prepared input of the attention, as a ShardedTensor: the gradients of q, k and v are summed
    before they are reduced.
    """
    expected = step(seeded(Transformer), TOKENS.to(DEVICE))[2]
    whole_input = sm.compat.PrepareModuleInput(
        input_layouts=sm.Replicate(), desired_input_layouts=sm.Replicate()
    )

    def program(mesh):
        model = sm.compat.parallelize_module(
            seeded(Transformer), mesh, {**TRANSFORMER_PLAN, "layers.*.attention": whole_input}
        )
        for _ in range(2):
            model.zero_grad()
            _, backward, found = step(model, TOKENS.to(DEVICE))
            check_same(found, expected)
        assert backward == {ACTIVATION: 5}

    on_mesh((4,), program)


def beside_torch() -> None:
    """Compare with torch, with a hidden size that torch can shard too."""
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("tp",))
    theirs = init_device_mesh(DEVICE, (4,))
    x = X.clone().requires_grad_()
    for make, plan, given in (
        (lambda: blocks(hidden=12), PLAN, x),
        (lambda: Transformer(12), TRANSFORMER_PLAN, TOKENS),
    ):
        own = sm.compat.parallelize_module(seeded(make), mesh, plan)
        torchs = torch_parallel.parallelize_module(seeded(make), theirs, plan)
        for _ in range(2):
            # Of the hooks by which it follows modules.
            with warnings.catch_warnings(action="ignore"):
                with CommDebugMode() as forward:
                    loss = torchs(given).square().mean()
                with CommDebugMode() as backward:
                    loss.backward()
            found = step(own, given)
        assert found[0].total() <= forward.get_total_counts()
        assert found[1].total() <= backward.get_total_counts()


def test_no_more_calls_than_torch(world4):
    world4(beside_torch)


def test_accumulated_gradients():
    """Over three backward passes, with and without `accumulate_grads`: biases are not reduced
    either.
    """

    def total(model, accumulating):
        with (
            collectives() as records,
            sm.accumulate_grads() if accumulating else torch.enable_grad(),
        ):
            for factor in (1.0, 2.0, 3.0):
                model(X.to(DEVICE) * factor).square().mean().backward()
        return counted(records), {name: whole(p.grad) for name, p in model.named_parameters()}

    plain = seeded(lambda: blocks(residual=True))
    for factor in (1.0, 2.0, 3.0):
        plain(X.to(DEVICE) * factor).square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}

    def program(mesh):
        for accumulating in (False, True):
            model = sm.compat.parallelize_module(seeded(lambda: blocks(residual=True)), mesh, PLAN)
            for _ in range(2):
                model.zero_grad()
                counts, found = total(model, accumulating)
                check_same(found, expected)
            # In the block they are summed once, at its end.
            biases = {("all_reduce", 4 * WIDTH * 8 * 2 * 3 // 4): 1}
            assert counts == {ACTIVATION: 3 * (4 + 3), **(biases if accumulating else {})}

    on_mesh((4,), program)


def test_second_derivatives():
    """Differentiate the gradient of the input by the input and by the parameters."""

    def second(model):
        x = X.clone().to(DEVICE).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return (
            first.detach(),
            x.grad,
            {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        )

    expected = second(seeded(blocks))

    def program(mesh):
        model = sm.compat.parallelize_module(seeded(blocks), mesh, PLAN)
        check_same(second(model), expected)

    on_mesh((4,), program)


def test_a_block_inside_a_block():
    """A parallel module whose forward calls another one, with ShardedTensors outside and plain
    tensors inside.
    """

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.down = GeluMLP(residual=True), linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.down(self.inner(x) + self.inner(x * 2))

    def make():
        return nn.Sequential(Outer(), Outer())

    expected = step(seeded(make), X.clone().to(DEVICE).requires_grad_())[2]
    style = sm.compat.PrepareModuleInputOutput(
        input_layouts=sm.Replicate(),
        desired_input_layouts=sm.Replicate(),
        use_local_input=True,
        output_layouts=sm.Replicate(),
        desired_output_layouts=sm.Replicate(),
    )

    def program(mesh):
        plan = {
            "*": style,
            "*.inner.up": COLUMNS(),
            "*.inner.down": ROWWISE(),
            "*.down": ROWWISE(input_layouts=Replicate()),
        }
        model = sm.compat.parallelize_module(seeded(make), mesh, plan)
        for _ in range(2):
            model.zero_grad()
            x = X.clone().to(DEVICE).requires_grad_()
            check_same(step(model, x)[2], expected)

    on_mesh((4,), program)


def test_ranks_that_use_an_output_differently_raise():
    def program(mesh):
        model = sm.compat.parallelize_module(seeded(blocks), mesh, PLAN)
        with pytest.raises(RuntimeError, match="differ between the replicas"):
            (model(X.to(DEVICE)) * (1 + mesh.world.rank)).sum().backward()

    on_mesh((4,), program)
