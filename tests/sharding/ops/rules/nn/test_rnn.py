"""Recurrent modules, unchanged, on sharded parameters and inputs: outputs, states, gradients and
training steps.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import distribute_module, fully_shard, shard_parameter
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

STEPS, BATCH, INPUT, HIDDEN = 4, 5, 3, 4


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def put(mesh, tensor, spec=P(), grad=True):
    x = sm.distribute_tensor(tensor, mesh, spec, src_data_rank=None)
    return x.requires_grad_() if grad else x


def built(make):
    torch.manual_seed(0)
    return make()


def split_rows(name, module, mesh):
    """Shard every weight of a recurrent module over b by rows."""
    for weight in [name for name, _ in module.named_parameters(recurse=False)]:
        shard_parameter(module, weight, mesh, P("b"))


def flat(tree):
    return [x for part in tree for x in flat(part)] if isinstance(tree, (tuple, list)) else [tree]


def check_training(mesh, make, run, inputs, specs, partition=None):
    """Check that outputs, gradients of the inputs, and parameters after a step equal those of one
    process.
    """
    plain, model = built(make), distribute_module(built(make), mesh, partition)
    theirs = [x.clone().requires_grad_() for x in inputs]
    ours = [put(mesh, *pair) for pair in zip(inputs, specs, strict=True)]
    made = []
    for module, tensors in ((plain, theirs), (model, ours)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        outputs = flat(run(module, *tensors))
        sum(out.square().sum() for out in outputs).backward()
        optimizer.step()
        made.append([*outputs, *[x.grad for x in tensors], *module.parameters()])
    for expected, found in zip(*made, strict=True):
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach())


# -- sequences -------------------------------------------------------------------------------------

OPTIONS = {
    "one layer": {},
    "two layers both ways": {"num_layers": 2, "bidirectional": True},
    "batch first without bias": {"batch_first": True, "bias": False},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("partition", [None, split_rows])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_training_step_without_a_state(kind, options, partition):
    x = numbers(BATCH, STEPS, INPUT) if options.get("batch_first") else numbers(STEPS, BATCH, INPUT)
    spec = P("a") if options.get("batch_first") else P(None, "a")

    def make():
        return kind(INPUT, HIDDEN, dtype=torch.float64, **options)

    on_mesh(
        (2, 2), lambda mesh: check_training(mesh, make, lambda m, x: m(x), [x], [spec], partition)
    )


@pytest.mark.parametrize(
    "specs",
    [
        [P(), P(), P()],
        [P(None, "a"), P(None, "a"), P()],
        [P("a"), P(None, "b"), P(None, None, "a")],
    ],
)
def test_with_a_state_and_projections(specs):
    inputs = [
        numbers(STEPS, BATCH, INPUT),
        numbers(1, BATCH, 2, seed=1),
        numbers(1, BATCH, HIDDEN, seed=2),
    ]

    def make():
        return nn.LSTM(INPUT, HIDDEN, proj_size=2, dtype=torch.float64)

    on_mesh(
        (2, 2),
        lambda mesh: check_training(mesh, make, lambda m, x, h, c: m(x, (h, c)), inputs, specs),
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_ranks_without_sequences(batch):
    def make():
        return nn.LSTM(INPUT, HIDDEN, dtype=torch.float64)

    x = numbers(STEPS, batch, INPUT)
    on_mesh((4,), lambda mesh: check_training(mesh, make, lambda m, x: m(x), [x], [P(None, "a")]))


def test_one_sequence():
    def make():
        return nn.GRU(INPUT, HIDDEN, dtype=torch.float64)

    on_mesh(
        (2,),
        lambda mesh: check_training(
            mesh, make, lambda m, x: m(x), [numbers(STEPS, INPUT)], [P("a")]
        ),
    )


def test_sharded_batch_needs_no_communication():
    def program(mesh):
        model = distribute_module(
            built(lambda: nn.LSTM(INPUT, HIDDEN, 2, dtype=torch.float64)), mesh
        )
        with collectives() as records:
            out, (h, c) = model(put(mesh, numbers(STEPS, BATCH, INPUT), P(None, "a")))
        assert launched(records) == []
        assert out.spec == h.spec == c.spec == P(None, "a", None)

    on_mesh((3,), program)


def test_dropout_between_layers_does_not_depend_on_the_mesh():
    x = numbers(STEPS, BATCH, INPUT)

    def make():
        return nn.LSTM(INPUT, HIDDEN, 3, dropout=0.5, bidirectional=True, dtype=torch.float64)

    def program(mesh):
        outputs = []
        for spec in (P(), P(None, "a")):
            model = distribute_module(built(make), mesh)
            sm.random.manual_seed(0)
            out, (h, c) = model(put(mesh, x, spec))
            out.sum().backward()
            outputs.append([t.detach().full_tensor() for t in (out, h, c, model.weight_ih_l0.grad)])
        for one, other in zip(*outputs, strict=True):
            torch.testing.assert_close(one, other)
        plain = built(make).eval()
        assert not torch.allclose(outputs[0][0], plain(x)[0])
        for ours, theirs in zip(
            flat(model.eval()(put(mesh, x, P(None, "a")))), flat(plain(x)), strict=True
        ):
            torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach())
        return outputs[0]

    for runs in zip(on_mesh((2,), program), on_mesh((3,), program), strict=False):
        for one, other in zip(*runs, strict=True):
            torch.testing.assert_close(one, other)


# -- cells -----------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("partition", [None, split_rows])
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a"), P("b", "a")])
@pytest.mark.parametrize(
    "kind",
    [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda *a, **k: nn.RNNCell(*a, **k, nonlinearity="relu")],
)
def test_cells(kind, spec, partition):
    """Three steps: the first without a state, the others with the state that came out."""

    def run(module, x):
        state = module(x)
        return module(x * 2, module(x + 1, state))

    def make():
        return kind(INPUT, HIDDEN, dtype=torch.float64)

    on_mesh(
        (2, 2),
        lambda mesh: check_training(mesh, make, run, [numbers(BATCH, INPUT)], [spec], partition),
    )


def test_cells_with_sharded_rows_move_gates_not_weights():
    """A row of gates for each sequence; the weights are a hundred times larger."""

    def program(mesh):
        cell = nn.LSTMCell(64, 64)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            shard_parameter(cell, name, mesh, P("a"))
        with collectives() as records:
            cell(put(mesh, numbers(2, 64).float()))
        return sum(record.bytes_received for record in records)

    assert all(0 < count <= 2 * 4 * 64 * 4 for count in on_mesh((4,), program))


# -- refusals --------------------------------------------------------------------------------------


def test_packed_sequences_raise():
    def packing(mesh):
        pack_padded_sequence(
            put(mesh, numbers(STEPS, 2, INPUT), P(None, "a")), torch.tensor([4, 2])
        )

    def packed(mesh):
        model = distribute_module(
            nn.LSTM(INPUT, HIDDEN, dtype=torch.float64), mesh, src_data_rank=None
        )
        plain = pack_padded_sequence(numbers(STEPS, 2, INPUT), torch.tensor([4, 2]))
        model(plain._replace(data=put(mesh, plain.data, P("a"))))

    def unpacking(mesh):
        plain = pack_padded_sequence(numbers(STEPS, 2, INPUT), torch.tensor([4, 2]))
        pad_packed_sequence(plain._replace(data=put(mesh, plain.data, P("a"))))

    for program in (packing, packed, unpacking):
        assert "padded batch" in same_error((2,), program, NotImplementedError)


def test_packed_sequences_of_this_rank():
    """What the refusal says to write, under `fully_shard`."""
    x, lengths = numbers(STEPS, 4, INPUT), torch.tensor([4, 2, 3, 1])
    plain = built(lambda: nn.LSTM(INPUT, HIDDEN, dtype=torch.float64))

    def outputs(module, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(module(packed)[0], total_length=STEPS)[0]

    expected = outputs(plain, x, lengths)
    expected.square().sum().backward()

    def program(mesh):
        module = fully_shard(built(lambda: nn.LSTM(INPUT, HIDDEN, dtype=torch.float64)), mesh)
        part = put(mesh, x, P(None, "a"), grad=False).to_local()
        own = outputs(module, part, lengths.chunk(2)[mesh.get_rank()])
        out = sm.ShardedTensor.from_local(own, mesh, P(None, "a"))
        torch.testing.assert_close(out.full_tensor(), expected)
        own.square().sum().backward()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor() * 2, q.grad)  # averaged over ranks

    on_mesh((2,), program)


def test_a_plain_state_counts_as_replicated_if_it_is():
    """`distribute_module` has prepared the cell; the function alone takes no plain state."""

    def cell(mesh):
        torch.manual_seed(0)
        return distribute_module(nn.GRUCell(INPUT, HIDDEN), mesh, src_data_rank=None)

    def program(mesh):
        x, state = numbers(2, INPUT).float(), torch.ones(2, HIDDEN)
        made = cell(mesh)
        torch.testing.assert_close(
            made(put(mesh, x, P("a")), state), made(put(mesh, x, P("a")), put(mesh, state, P()))
        )

    def different(mesh):
        cell(mesh)(
            put(mesh, numbers(2, INPUT).float(), P("a")),
            torch.full((2, HIDDEN), 1.0 + mesh.get_rank()),
        )

    on_mesh((2,), program)
    with pytest.raises(
        sm.errors.ReplicaError,
        match=r"a plain operand with a ShardedTensor counts as replicated inside a prepared module",
    ):
        on_mesh((2,), different)


def test_weights_are_not_flattened(monkeypatch):
    """On a GPU the module asks for the memory of its weights, which sharded ones have not in one
    piece.
    """
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    monkeypatch.setattr(sm.ShardedTensor, "is_cuda", True)

    def program(mesh):
        model = distribute_module(nn.LSTM(INPUT, HIDDEN, dtype=torch.float64), mesh)
        model.flatten_parameters()
        assert model(put(mesh, numbers(STEPS, 2, INPUT), P(None, "a")))[0].shape == (
            STEPS,
            2,
            HIDDEN,
        )
        with pytest.raises(RuntimeError, match="not one block of memory"):
            model.weight_ih_l0.data_ptr()

    on_mesh((2,), program)
