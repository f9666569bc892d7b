"""Every way of writing a parameter while its unit is gathered: kept as torch's DDP keeps it, or an
error that names it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import MixedPrecisionPolicy, data_parallel, fully_shard
from shardmesh.sharding.replicas.compare import ReplicaError
from tests.sharding.parallel.data.training import gradients, on_ranks, same, values, whole

RANKS = 2
_ROWS = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).cos()


class _Inner(nn.Module):
    """Writes to the parameters of another module."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.owner = []

    def forward(self, x):
        for owner in self.owner:
            owner.weight.data.clamp_(-0.1, 0.1)
        return x + self.bias


class _Writer(nn.Module):
    """A layer that writes to its weight, `frozen` or not, and then uses both."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(3, 3).double(), _Inner()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.write = write

    def forward(self, x):
        x = self.first(x).tanh()
        self.write(self)
        return F.linear(self.inner(x), self.weight) * self.frozen


def _like(x, values):
    """Return values as the module's parameters are: plain, or a sharded tensor."""
    return values * torch.ones_like(x) if isinstance(x, sm.ShardedTensor) else values.clone()


def _assign_data(m):
    m.weight.data = torch.renorm(m.weight.data, 2, 0, 0.3)


def _assign_data_of_frozen(m):
    m.frozen.data = m.frozen.data * 0.5 + m.weight.data[0] * 0.5


def _data_in_place(m):
    m.weight.data.clamp_(-0.1, 0.1)


def _data_of_frozen_in_place(m):
    m.frozen.data.mul_(0.5)


def _foreach_data(m):
    torch._foreach_mul_([m.weight.data, m.frozen.data], 0.5)


@torch.no_grad()
def _in_place(m):
    m.weight.clamp_(-0.1, 0.1)


@torch.no_grad()
def _copy(m):
    m.weight.copy_(m.weight * 0.5)


@torch.no_grad()
def _fill_one(m):
    m.weight[1:2].zero_()


def _frozen_in_place_with_gradients(m):
    m.frozen.mul_(0.5)


def _detached_view(m):
    m.weight.detach().clamp_(-0.1, 0.1)


def _state_dict(m):
    m.state_dict()["weight"].clamp_(-0.1, 0.1)


def _load_state_dict(m):
    m.load_state_dict({name: x.detach() * 0.5 for name, x in m.named_parameters()}, strict=False)


def _initialise(m):
    nn.init.constant_(m.weight, 0.25)


def _optimizer(m):
    m.frozen.grad = torch.ones_like(m.frozen)
    torch.optim.SGD([m.frozen], lr=0.1).step()
    m.frozen.grad = None


def _in_hook(m):
    pass


def _in_submodule(m):
    pass


@torch.no_grad()
def _set(m):
    m.weight.set_(m.weight.detach() * 0.5)


def _vector(m):
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector([m.weight, m.frozen]).detach() * 0.5, [m.weight, m.frozen]
    )


WAYS = [
    _assign_data,
    _assign_data_of_frozen,
    _data_in_place,
    _data_of_frozen_in_place,
    _foreach_data,
    _in_place,
    _copy,
    _fill_one,
    _frozen_in_place_with_gradients,
    _detached_view,
    _state_dict,
    _load_state_dict,
    _initialise,
    _optimizer,
    _in_hook,
    _in_submodule,
    _set,
    _vector,
]
PLAIN_ONLY = (_set, _vector)  # on ShardedTensors these have no meaning, and raise

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
FORMS = {
    "ddp": (data_parallel, {}),
    "zero1": (data_parallel, {"optimizer": "dp"}),
    "zero2": (data_parallel, {"optimizer": "dp", "gradient": "dp"}),
    "fsdp": (fully_shard, {}),
    "fsdp, let go": (fully_shard, {"reshard_after_forward": True}),
    "zero3": (data_parallel, {"parameter": "dp", "optimizer": "dp"}),
    "ddp, bf16": (data_parallel, {"mp_policy": BF16}),
    "zero1, bf16": (data_parallel, {"optimizer": "dp", "mp_policy": BF16}),
    "fsdp, bf16": (fully_shard, {"mp_policy": BF16}),
}
KEPT = ("ddp", "zero1", "zero2")


def _clamp_before(m, _):
    m.weight.data.clamp_(-0.1, 0.1)


def _made(way):
    made = _Writer(way)
    if way is _in_hook:
        made.register_forward_pre_hook(_clamp_before)
    if way is _in_submodule:
        made.inner.owner = [made]
    return made


def _train(made, x):
    """Return losses, gradients and parameters after two steps in which forward writes, and one in
    which it does not.
    """
    losses, grads = [], []
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = made(x).square().mean()
        loss.backward()
        grads.append(gradients(made))
        losses.append(whole(loss))
        optimizer.step()
    made.write, made.inner.owner = lambda _: None, []
    made._forward_pre_hooks.clear()
    losses.append(whole(made(x).square().mean()))
    return losses, grads, values(made)


@pytest.mark.one_in(6, each=["way", "form"])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[1:])
def test_a_write_is_kept_or_refused(way, form, sharded):
    if sharded and way in PLAIN_ONLY:
        pytest.skip("no such operation on ShardedTensors")
    kind, options = FORMS[form]

    def program(mesh):
        made = kind(_made(way), mesh, **options)
        x = sm.distribute_tensor(_ROWS, mesh, P("dp"), src_data_rank=None) if sharded else _ROWS
        if form in KEPT:
            return _train(made, x)
        before = values(made)
        for _ in range(2):  # the values of the first forward are not used by the second
            with pytest.raises(
                RuntimeError,
                match=r"(weight|frozen|bias) was written in forward, and the write would be lost",
            ):
                made(x)
        same(values(made), before)
        made.write, made.inner.owner = lambda _: None, []
        made._forward_pre_hooks.clear()
        if "bf16" not in form:
            torch.testing.assert_close(
                whole(made(x)), plain(_ROWS).detach(), rtol=1e-12, atol=1e-12
            )
        return None

    plain = _made(way)
    plain.write, plain.inner.owner = lambda _: None, []
    plain._forward_pre_hooks.clear()
    found = on_ranks((RANKS,), program)
    if form in KEPT:
        losses, grads, parameters = _train(_made(way), _ROWS)
        for found_losses, found_grads, found_parameters in found:
            torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=0)
            same(found_parameters, parameters)
            for one, other in zip(found_grads, grads, strict=True):
                same(one, other)


def _replace(m):
    m.weight = nn.Parameter(m.weight.detach() * 0.5)


def _shape(m):
    m.weight.data = m.weight.data[:2]


def _dtype(m):
    m.weight.data = m.weight.data.double()


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize(
    ("way", "text"),
    [
        (_replace, "weight was replaced in forward, by Parameter"),
        (_shape, "weight was written in forward"),
        (_dtype, "weight was written in forward"),
    ],
)
def test_what_no_form_keeps(way, text, form):
    kind, options = FORMS[form]

    class Writer(nn.Linear):
        def forward(self, x):
            way(self)
            return x

    def program(mesh):
        made = kind(Writer(3, 3), mesh, **options)
        before = made.weight
        with pytest.raises(RuntimeError, match=text):
            made(torch.ones(2, 3))
        assert made.weight is before

    on_ranks((RANKS,), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_reading_data_is_no_write(form):
    kind, options = FORMS[form]

    def read(m):
        assert m.weight.data.norm() > 0
        m.weight.data.clamp_(-100, 100)

    def program(mesh):
        return _train(kind(_Writer(read), mesh, **options), _ROWS)[0]

    expected = _train(_Writer(lambda _: None), _ROWS)[0]
    for losses in on_ranks((RANKS,), program):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["zero1", "zero2"])
def test_ranks_that_write_different_values(form):
    """Each rank keeps rows of the optimizer's parameter, so different values would make a
    mixture.
    """
    kind, options = FORMS[form]

    def program(mesh):
        def write(m):
            m.weight.data.mul_(2 + mesh.get_rank())

        with pytest.raises(
            ReplicaError, match=r"written in forward: weight, .* is not the same on ranks"
        ):
            kind(_Writer(write), mesh, **options)(_ROWS)

    on_ranks((RANKS,), program)


class _MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(3, 2).double(), nn.Linear(3, 2).double().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                k.data = k.data * 0.5 + q.data * 0.5
            target = self.k(x)
        return (self.q(x) - target).square().mean()


@pytest.mark.parametrize("units", [None, nn.Linear])
@pytest.mark.parametrize("form", ["ddp", "zero1", "zero2", "fsdp", "fsdp, let go"])
def test_a_momentum_encoder(form, units):
    """In units of their own the encoders are not gathered while the model writes, so every form
    keeps it.
    """
    kind, options = FORMS[form]

    def train(made, x):
        optimizer, losses = torch.optim.SGD(made.q.parameters(), 0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(made(x))
            losses[-1].backward()
            optimizer.step()
        return [whole(x) for x in losses], values(made)

    def program(mesh):
        made = kind(_MoCo(), mesh, units=units, **options)
        if units is None and kind is fully_shard:
            with pytest.raises(RuntimeError, match=r"k.weight was written in forward"):
                made(_ROWS)
            return None
        return train(made, _ROWS.chunk(2)[mesh.get_rank()])

    losses, parameters = train(_MoCo(), _ROWS)
    found = on_ranks((RANKS,), program)
    if found[0] is not None:
        torch.testing.assert_close(
            [sum(x) / 2 for x in zip(*(one for one, _ in found), strict=True)],
            losses,
            rtol=1e-12,
            atol=0,
        )
        for _, found_parameters in found:
            same(found_parameters, parameters)


def test_a_value_of_functional_call_that_forward_writes():
    """A whole value is written as in torch; a write to the gathered copy of a split one is an
    error.
    """

    def program(mesh):
        made = fully_shard(_Writer(_data_in_place), mesh)
        plain = {"weight": torch.ones(3, 3, dtype=torch.float64)}
        torch.func.functional_call(made, plain, (_ROWS,))
        assert plain["weight"].max() == 0.1
        made = fully_shard(_Writer(_data_in_place), mesh)
        with pytest.raises(
            RuntimeError,
            match=r"weight was written in forward.* the value that replaces it is used from a copy",
        ):
            torch.func.functional_call(made, {"weight": made.weight.detach() * 2}, (_ROWS,))

    on_ranks((RANKS,), program)


def test_embedding_with_a_largest_norm():
    def program(mesh, kind):
        torch.manual_seed(0)
        return kind(nn.Sequential(nn.Embedding(5, 3, max_norm=0.5)).double(), mesh)

    tokens = torch.tensor([[0, 3, 4]])
    plain = program(None, lambda m, _: m)
    plain(tokens)
    for found in on_ranks(
        (RANKS,), lambda mesh: (made := program(mesh, data_parallel), made(tokens), values(made))[2]
    ):
        same(found, values(plain))

    def refused(mesh):
        with pytest.raises(RuntimeError, match=r"0.weight was written in forward"):
            program(mesh, fully_shard)(tokens)

    on_ranks((RANKS,), refused)
