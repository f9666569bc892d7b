"""Backward in two parts on plain tensors.

It has the same bits as a whole backward, and computes nothing twice; hooks, errors and memory.
"""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardmesh.parallel import Schedule, make_schedule
from shardmesh.sharding.parallel.pipeline.actions import Overlap, actions_in
from shardmesh.sharding.parallel.pipeline.deferral.weights import Weights
from shardmesh.sharding.parallel.pipeline.executor import with_whole_backwards
from shardmesh.sharding.parallel.pipeline.split_backward import SplitBackward
from tests.sharding.parallel.pipeline.split_steps import (
    LATE_WEIGHTS,
    ZERO_BUBBLE,
    Products,
    assert_same_bits,
    run_step,
)

D = 6


def seeded(make, seed=0):
    """Return a module with the same values in each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def compare(make, inputs, order=ZERO_BUBBLE, **options):
    """Compare a step of whole backwards with one of backwards in two parts; return the latter."""
    expected = run_step(seeded(make), inputs, order, split=False, **options)
    step = run_step(seeded(make), inputs, order, split=True, **options)
    assert_same_bits(step, expected)
    in_i, in_w = step.products
    assert sorted(in_i + in_w) == sorted(expected.products[0])  # nothing twice
    return step


def inputs_of(*shape, count=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


# -- operators -------------------------------------------------------------------------------------


class Operators(nn.Module):
    """A chain of random operators [... D] -> [... D] on a few weights, some used repeatedly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.square = nn.ParameterList(nn.Parameter(torch.randn(D, D) / D) for _ in range(3))
        self.linear = nn.Linear(D, D)
        self.merged = nn.Parameter(torch.randn(2 * D, D) / D)
        self.experts = nn.Parameter(torch.randn(3, D, D) / D)
        self.norm = nn.LayerNorm(D)
        self.bias = nn.Parameter(torch.randn(D))
        self.frozen = nn.Parameter(torch.randn(D, D) / D, requires_grad=False)
        self.choices = random.Random(seed).choices(sorted(_STEPS), k=7)

    def forward(self, x: Tensor) -> Tensor:
        for number, choice in enumerate(self.choices):
            x = _STEPS[choice](self, x, self.square[number % 3])
        return x


def _rows(x):
    return x.reshape(-1, D)


_STEPS = {
    "linear": lambda m, x, w: m.linear(x),
    "linear without bias": lambda m, x, w: F.linear(x, w),
    "linear with a computed bias": lambda m, x, w: F.linear(x, w, x.mean(list(range(x.ndim - 1)))),
    "linear of a strided input": lambda m, x, w: m.linear(
        x.transpose(0, 1).contiguous().transpose(0, 1)
    ),
    "matmul": lambda m, x, w: x @ w,
    "matmul of a transposed weight": lambda m, x, w: torch.matmul(x, w.t()),
    "matmul of a strided input": lambda m, x, w: x.transpose(0, -2) @ w.mT,
    "mm": lambda m, x, w: _rows(x).mm(w).view(x.shape),
    "mm of a transposed input": lambda m, x, w: torch.mm(_rows(x).t().contiguous().t(), w).view(
        x.shape
    ),
    "weight on the left": lambda m, x, w: (w @ _rows(x).t()).t().reshape(x.shape),
    "transposed weight on the left": lambda m, x, w: (w.T @ _rows(x).t()).t().reshape(x.shape),
    "addmm": lambda m, x, w: torch.addmm(m.bias, _rows(x), w).view(x.shape),
    "scaled addmm": lambda m, x, w: torch.addmm(m.bias, _rows(x), w, alpha=0.5).view(x.shape),
    "bmm": lambda m, x, w: torch.bmm(_rows(x).expand(3, -1, -1), m.experts).sum(0).view(x.shape),
    "parts of a weight": lambda m, x, w: sum(F.linear(x, part) for part in m.merged.chunk(2)),
    "an expert": lambda m, x, w: F.linear(x, m.experts[torch.tensor(1)]) @ m.experts[2],
    "a product of weights": lambda m, x, w: x @ (w @ m.square[0]),
    "a scaled weight": lambda m, x, w: F.linear(x, w * 2),
    "a frozen weight": lambda m, x, w: F.linear(x, m.frozen, m.bias),
    "norm": lambda m, x, w: m.norm(x),
    "bias": lambda m, x, w: x + m.bias,
    "in place": lambda m, x, w: (x * 2).add_(m.bias),
    "not linear": lambda m, x, w: torch.tanh(x) + w[0],
    "vector": lambda m, x, w: x * torch.mv(w, m.bias),
    "double": lambda m, x, w: x.double().matmul(w.double()).to(x.dtype),
}


@pytest.mark.parametrize("step", sorted(_STEPS))
@pytest.mark.parametrize("shape", [(4, D), (2, 3, D), (2, 1, 3, D), (0, D)], ids=str)
def test_each_operator(step, shape):
    def make():
        module = Operators(0)
        module.choices = [step, "linear", step]
        return module

    compare(make, inputs_of(*shape))


@pytest.mark.one_in(3, each=["dtype"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_networks(seed, dtype):
    shape = random.Random(seed).choice([(4, D), (2, 3, D), (3, 1, 2, D)])
    inputs = inputs_of(*shape, count=3, dtype=dtype)
    for forward in (
        lambda m, x: m(x),
        lambda m, x: checkpoint(m, x, use_reentrant=False),
        lambda m, x: m(checkpoint(m, torch.tanh(m(x)), use_reentrant=False)),
        lambda m, x: checkpoint(
            lambda y: m(checkpoint(m, y, use_reentrant=False)), x, use_reentrant=False
        ),
    ):
        compare(lambda: Operators(seed).to(dtype), inputs, LATE_WEIGHTS, forward=forward)


@pytest.mark.parametrize("seed", range(4))
def test_reentrant_checkpoint(seed):
    """Each weight inside of one checkpoint: with several, gradients are summed in another order."""

    expected, step = (
        run_step(
            seeded(lambda: Operators(seed)),
            inputs_of(2, 3, D),
            ZERO_BUBBLE,
            split=split,
            forward=lambda m, x: checkpoint(m, x, use_reentrant=True),
        )
        for split in (False, True)
    )
    assert_same_bits(step, expected)


@pytest.mark.parametrize("seed", range(6))
def test_autocast(seed):
    def forward(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x) + checkpoint(module, x, use_reentrant=False)

    compare(lambda: Operators(seed), inputs_of(2, 3, D), forward=forward)


def test_weight_products_are_all_deferred():
    """In I only the gradients of inputs; on the first stage not that of the first layer either."""

    def make():
        return nn.Sequential(
            nn.Embedding(11, 8, padding_idx=2), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3, False)
        )

    tokens = [torch.randint(0, 11, (4, 2)) for _ in range(2)]
    step = compare(make, tokens)
    assert step.products[0] == [(8, 5), (8, 8)] * 2
    assert step.products[1] == [(3, 5), (5, 8), (11, 8)] * 2
    step = compare(lambda: nn.Linear(8, 5), inputs_of(4, 8))
    assert step.products == ([(4, 8)] * 2, [(5, 8)] * 2)

    without_input_grads = run_step(
        nn.Linear(8, 5),
        [torch.ones(4, 8).bool()],
        ("F0", "I0", "W0"),
        split=True,
        forward=lambda m, x: m(x.float()),
    )
    assert without_input_grads.products == ([], [(5, 8)])


def test_grouped_mm():
    class Groups(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 16, 32))
            self.other = nn.Parameter(torch.randn(3, 16, 32))

        def forward(self, x):
            ends = torch.tensor([2, 2, 8], dtype=torch.int32)  # the second group is empty
            y = F.grouped_mm(x, self.weight, offs=ends)
            return F.grouped_mm(y, self.other.transpose(-2, -1), offs=ends)

    step = compare(lambda: Groups().bfloat16(), inputs_of(8, 16, dtype=torch.bfloat16))
    assert step.products[1]


def test_modules_of_torch():
    compare(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        inputs_of(2, 5, 8),
    )
    compare(lambda: nn.LSTM(8, 4, 2), inputs_of(2, 5, 8), forward=lambda m, x: m(x)[0])
    compare(
        lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.Linear(6, 2)),
        inputs_of(2, 5, 8),
    )
    compare(lambda: nn.Bilinear(8, 8, 3), inputs_of(4, 8), forward=lambda m, x: m(x, x))


def test_dropout_with_recomputation():
    def forward(module, x):
        torch.manual_seed(int(x.detach().abs().sum() * 1000))
        return checkpoint(module, x, use_reentrant=False)

    compare(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8)),
        inputs_of(4, 8),
        forward=forward,
    )


def test_low_rank_adapter():
    """Of a frozen weight only the gradient of the input is computed, in I."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    step = compare(Adapter, inputs_of(4, 8))
    assert step.products[1] == [(8, 2), (2, 8)] * 2
    assert step.grads["base.weight"] is None


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [
        lambda w: w.t(),
        lambda w: w.T,
        lambda w: w.mT,
        lambda w: w.to(torch.bfloat16),
        lambda w: w.double().float(),
        lambda w: w.view(4, 6).transpose(0, 1),
        lambda w: w.t().reshape(-1),
        lambda w: w.t().contiguous(),
        lambda w: w[1:, ..., None],
        lambda w: w[torch.tensor(1)],
        lambda w: w.chunk(2)[1],
        lambda w: w.split([1, 2, 1])[1],
        lambda w: w.unbind()[2],
        lambda w: w.unsqueeze(0).squeeze(0),
        lambda w: w.narrow(0, 1, 2).expand(2, 2, 6),
        lambda w: w.unflatten(0, (2, 2)).flatten(0, 1),
        lambda w: w.movedim(0, 1).permute(1, 0),
    ],
)
def test_conversions_of_a_weight(convert):
    """Views, copies and casts of a parameter are weights; of another leaf they are not."""
    weight = nn.Parameter(torch.randn(4, 6))
    assert Weights().is_weight(convert(weight))
    assert not Weights().is_weight(convert(weight.detach().requires_grad_()))
    assert not Weights().is_weight(convert(weight * 2))


def test_hooks_of_parameters():
    """Hooks get the gradient of a microbatch once, in W, also of a weight used twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    calls = []
    state = []

    def on_grad(grad):
        calls.append(("grad", *state, grad.clone()))
        return grad * 2

    model[0].weight.register_hook(on_grad)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda x, name=name: calls.append((name, *state))
        )
    x = torch.randn(3, 4)
    split = SplitBackward()
    with split.recording():
        y = model(model(x))
    state[:] = ["I"]
    split.backward_input([y], [torch.ones_like(y)])
    assert not calls
    state[:] = ["W"]
    split.backward_weight()
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert sorted(call[:2] for call in calls) == sorted((n, "W") for n in ["grad", *names])
    doubled = model[0].weight.grad
    model.zero_grad()
    model(model(x)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, doubled)


# -- recomputation and compiled functions ----------------------------------------------------------


def test_recomputation_runs_once_and_its_results_are_shared():
    runs = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            runs.append(torch.is_grad_enabled())
            return self.b(torch.relu(self.a(x)))

    block, split = Counted(), SplitBackward()
    x = torch.randn(4, 8, requires_grad=True)
    with split.recording():
        y = checkpoint(block, x, use_reentrant=False)
    assert len(runs) == 1
    with Products() as products:
        split.backward_input([y], [torch.ones_like(y)])
    assert len(runs) == 2
    assert products.shapes == [(4, 16), (4, 16), (4, 8)]  # a again, then gradients; b is not needed
    split.backward_weight()
    assert len(runs) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(backend):
    def make():
        torch._dynamo.reset()
        block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        return nn.Sequential(
            nn.Linear(8, 8), torch.compile(block, backend=backend), nn.Linear(8, 8)
        )

    step = compare(make, inputs_of(4, 8))
    outside = [(8, 8)] * 4
    assert step.products[1][:4] == outside  # what is compiled has its whole backward in I


def test_input_phase_in_another_thread():
    """The recording is of the forward, not of a thread: W and I may run elsewhere."""
    import concurrent.futures

    def forward(module, x):
        return checkpoint(module, x, use_reentrant=False)

    model = seeded(lambda: Operators(3))
    (x,) = inputs_of(2, 3, D, count=1)
    step = run_step(seeded(lambda: Operators(3)), [x], ("F0", "I0", "W0"), split=True)
    split = SplitBackward()
    with split.recording():
        out = forward(model, x)
    grad = torch.cos(torch.arange(out.numel(), dtype=torch.float64).reshape(out.shape)).float()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(split.backward_input, [out], [grad]).result()
        pool.submit(split.backward_weight).result()
    for name, parameter in model.named_parameters():
        expected = step.grads[name]
        assert (parameter.grad is None) == (expected is None)
        assert expected is None or torch.equal(parameter.grad, expected)


# -- errors ----------------------------------------------------------------------------------------


def recorded(model, x):
    split = SplitBackward()
    with split.recording():
        y = model(x)
    return split, y


def test_i_and_w_are_one_backward_where_no_other_rank_waits():
    def merged(*row: str) -> str:
        return " ".join(map(str, with_whole_backwards(Schedule([row]).rows[0])))

    assert merged("0F0", "0I0", "0W0") == "0F0 0B0"
    assert merged("0F0", "0F1", "0I0", "0I1", "0W1", "0W0") == "0F0 0F1 0I0 0B1 0W0"
    assert merged("3F0", "3I0", "3W0") == "3F0 3I0 3W0"  # the rank of stage 2 waits
    assert merged("1F0", "2F0", "2I0", "2W0", "1I0", "1W0") == "1F0 2F0 2B0 1I0 1W0"
    assert merged("0F0", "0I0", "(1F0;0W0)OVERLAP_F_B") == "0F0 0I0 (1F0;0W0)OVERLAP_F_B"
    for name, count in (("zb_h1", 8), ("dualpipe_v", 4), ("zb_v", 0)):
        schedule = make_schedule(name, 4, 8)
        rows = [with_whole_backwards(row) for row in schedule.rows]
        kinds = [cell.kind for row in rows for cell in row if not isinstance(cell, Overlap)]
        before = [c.kind for row in schedule.rows for c in row if not isinstance(c, Overlap)]
        assert kinds.count("B") - before.count("B") == count
        # what a rank computes for others, and the order of it, is as before
        for row, whole in zip(schedule.rows, rows, strict=True):
            results = [[x.result for x in actions_in(r) if x.kind != "W"] for r in (row, whole)]
            assert results[0] == results[1]


def test_order_of_calls():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    split, y = recorded(model, x)
    with pytest.raises(RuntimeError, match=r"backward_weight\(\): backward_input\(\) has not been"):
        split.backward_weight()
    split.backward_input([y], [torch.ones_like(y)])
    with pytest.raises(RuntimeError, match=r"backward_input\(\) has been called"):
        split.backward_input([y], [torch.ones_like(y)])
    with pytest.raises(RuntimeError, match=r"recording.*backward_input\(\) has been called"):
        with split.recording():
            pass
    split.backward_weight()
    with pytest.raises(RuntimeError, match=r"backward_weight\(\) has been called"):
        split.backward_weight()


def test_gradients_outside_of_the_two_parts():
    model, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    _, y = recorded(model, x)
    with pytest.raises(RuntimeError, match="outside of its backward_input"):
        y.sum().backward()
    _, y = recorded(model, x)
    with pytest.raises(RuntimeError, match="outside of its backward_input"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    _, y = recorded(nn.LayerNorm(3), x)
    with pytest.raises(RuntimeError, match="outside of its backward_input"):
        y.sum().backward()


def test_second_derivatives_inside_of_a_forward():
    """A gradient penalty with respect to the input, inside of the stage."""
    model, x = nn.Linear(3, 1), torch.randn(2, 3, requires_grad=True)
    split = SplitBackward()
    with pytest.raises(RuntimeError, match="outside of its backward_input"), split.recording():
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise ValueError("in backward")


def test_failures_leave_nothing_behind():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(2, 3)

    split = SplitBackward()
    with pytest.raises(ValueError, match="in forward"), split.recording():
        model(x)
        raise ValueError("in forward")
    with pytest.raises(RuntimeError, match="an earlier part has failed"):
        split.backward_input([], [])

    split = SplitBackward()
    with split.recording():
        y = model[1](_Fails.apply(model[0](x)))
    with pytest.raises(ValueError, match="in backward"):
        split.backward_input([y], [torch.ones_like(y)])
    with pytest.raises(RuntimeError, match="an earlier part has failed"):
        split.backward_weight()
    assert all(parameter.grad is None for parameter in model.parameters())

    split, y = recorded(model, x)
    split.backward_input([y], [torch.ones_like(y)])
    handle = model[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        split.backward_weight()
    handle.remove()
    with pytest.raises(RuntimeError, match="an earlier part has failed"):
        split.backward_weight()

    model.zero_grad()
    split, y = recorded(model, x)
    split.backward_input([y], [torch.ones_like(y)])
    split.backward_weight()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name])


# -- memory ----------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Keeps weak references to its activations: of the linear layers' inputs, and of the others."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inputs, self.others = [], []

    def forward(self, x):
        hidden = self.a(x)
        squashed = torch.tanh(hidden)
        self.inputs.append(weakref.ref(squashed.untyped_storage()))
        scaled = squashed.sigmoid().exp()
        self.others.append(weakref.ref(scaled.untyped_storage()))
        return self.b(squashed) + scaled[..., :8].sin()


def test_memory_is_freed_without_the_garbage_collector():
    """After I the graph is freed, but for inputs of weights; after W everything is."""
    model = Watched()
    gc.collect()
    gc.disable()
    try:
        split, y = recorded(model, torch.randn(4, 8))
        grad = torch.ones_like(y)
        references = [weakref.ref(split), weakref.ref(grad.untyped_storage())]
        split.backward_input([y], [grad])
        del y, grad
        assert model.others[0]() is None
        assert model.inputs[0]() is not None
        split.backward_weight()
        assert model.inputs[0]() is None
        del split
        assert all(reference() is None for reference in references)

        split, y = recorded(model, torch.randn(4, 8))  # a backward that never runs
        references = [weakref.ref(split), weakref.ref(y.untyped_storage())]
        del split, y
        assert model.inputs[1]() is None
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_live_tensors_do_not_grow_with_microbatches():
    def live():
        gc.collect()
        return [x for x in gc.get_objects() if isinstance(x, Tensor)]

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    before: list[Tensor] = []  # kept, so that nothing which other tests have left is freed
    counts = []
    for _ in range(5):
        split, y = recorded(model, torch.randn(4, 8))
        split.backward_input([y], [torch.ones_like(y)])
        split.backward_weight()
        del split, y
        before = before or live()
        counts.append(len(live()))
    assert len(set(counts)) == 1
