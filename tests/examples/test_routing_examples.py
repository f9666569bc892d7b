"""Results and communication of the examples: a mixture of experts, AdamW, Muon."""

from __future__ import annotations

from functools import partial
from typing import Any

import adamw
import mixture_of_experts as moe
import muon
import pytest
import torch
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P


def simulated(ranks: int, fn: Any, *args: Any) -> list[Any]:
    return sm.simulate(ranks, prints="first")(fn)(*args)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- mixture of experts ----------------------------------------------------------------------------


def experts_of(count: int, favoured: bool = False) -> dict[str, torch.Tensor]:
    """Return weights in double precision; with `favoured`, all (positive) tokens choose the same
    experts.
    """
    params = {name: p.double() for name, p in moe.problem(count).items()}
    if favoured:
        params["router"][:, : moe.CHOICES] += 100
    return params


def compared(params: dict[str, torch.Tensor], x: torch.Tensor) -> float:
    return moe.compare(sm.init_device_mesh("cpu", (4,), axis_names=("ep",)), params, x)


@pytest.mark.parametrize("favoured", [False, True], ids=["spread", "one rank's experts"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("experts", [4, 12])
def test_mixture_with_empty_experts_and_ranks(experts, tokens, favoured):
    params, x = experts_of(experts, favoured), draw(tokens, moe.WIDTH).abs()
    chosen = moe.choose(x, params["router"])[0]
    assert not favoured or set(chosen.flatten().tolist()) == {0, 1}
    assert max(simulated(4, compared, params, x)) < 1e-12


def traffic_of_the_mixture(
    params: dict[str, torch.Tensor], batches: list[torch.Tensor]
) -> list[Any]:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("ep",))
    params = {name: sm.device_put(p, mesh, moe.LAYOUT[name]) for name, p in params.items()}
    found = []
    for x in batches:
        tokens = sm.device_put(x, mesh, moe.TOKENS)
        with sm.debug.comm_report() as report:
            moe.mixture(params, tokens)
        found.append(report.by_op)
    return found


def test_mixture_moves_exactly_the_routed_rows():
    params, batches = experts_of(8), [draw(20, moe.WIDTH, seed=seed) for seed in range(2)]
    found = simulated(4, traffic_of_the_mixture, params, batches)
    for i, x in enumerate(batches):
        owner = moe.choose(x, params["router"])[0] // 2  # of two experts each
        rows = torch.stack(
            [part.flatten().bincount(minlength=4) for part in owner.chunk(4)]
        ).fill_diagonal_(0)
        for rank in range(4):
            here_and_back = int(rows[:, rank].sum() + rows[rank].sum())
            assert found[rank][i]["all_to_all"] == (2, here_and_back * moe.WIDTH * 8)
    # What the batches choose is not the same.
    assert found[0][0]["all_to_all"] != found[0][1]["all_to_all"]


def test_mixture_with_unequal_numbers_of_experts_raises():
    with pytest.raises(ValueError, match="6 experts over 4 ranks; use 8"):
        simulated(4, compared, experts_of(6), draw(8, moe.WIDTH))


# -- AdamW -----------------------------------------------------------------------------------------

SPECS = [P(), P("dp"), P(("tp", "dp")), P(None, "tp"), P("tp", "dp")]
SHAPES = [(5, 7), (1, 3), (4, 4)]  # with 1 row, parts are empty


def steps(count: int = 3) -> tuple[Any, list[Any]]:
    """Return a tree of parameters with a 0-d one, and gradients for some steps."""
    params = {"list": [draw(*shape) for shape in SHAPES], "scale": draw()}
    return params, [
        pytree.tree_map(lambda p, i=i: draw(*p.shape, seed=7 + i), params) for i in range(count)
    ]


def stepped(params: Any, grads: list[Any]) -> Any:
    state = adamw.init(params)
    for each in grads:
        params, state = adamw.update(params, each, state, rate=0.1, decay=0.3)
    return params, state


def stepped_on_mesh(spec: P) -> Any:
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    place = partial(pytree.tree_map, lambda t: sm.device_put(t, mesh, spec if t.ndim else P()))
    params, grads = place(steps())
    with sm.debug.comm_budget(launches=0):
        found, state = stepped(params, grads)
    lie = [
        [sm.typeof(x) for x in pytree.tree_leaves(tree)]
        for tree in (params, found, state.m, state.v)
    ]
    return pytree.tree_map(lambda p: p.full_tensor(), found), all(each == lie[0] for each in lie)


def stepped_by_torch() -> Any:
    params, grads = steps()
    leaves = [p.requires_grad_() for p in pytree.tree_leaves(params)]
    optimizer = torch.optim.AdamW(leaves, 0.1, weight_decay=0.3)
    for each in grads:
        for leaf, g in zip(leaves, pytree.tree_leaves(each), strict=True):
            leaf.grad = g
        optimizer.step()
    return pytree.tree_map(lambda p: p.detach(), params)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_adamw_equals_torch_in_any_layout(spec):
    expected = stepped_by_torch()
    for found, lie_alike in simulated(4, stepped_on_mesh, spec):
        assert lie_alike  # parameters and both moments, as the parameters lay
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def stepped_inside() -> torch.Tensor:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("dp",))

    def inside(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return adamw.update(p, g, adamw.init(p), rate=0.1)[0]

    p, g = (sm.device_put(draw(5, 3, seed=seed), mesh, P("dp")) for seed in range(2))
    return sm.shard_map(inside, mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))(
        p, g
    ).full_tensor()


def test_adamw_inside_a_mapped_function():
    p, g = (draw(5, 3, seed=seed) for seed in range(2))
    expected, _ = adamw.update(p, g, adamw.init(p), rate=0.1)
    for found in simulated(4, stepped_inside):
        torch.testing.assert_close(found, expected)


def test_adamw_does_not_modify_its_arguments():
    params, grads = steps(2)
    given = params, grads[0], adamw.update(params, grads[1], adamw.init(params), rate=0.1)[1]
    before = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, given)
    _, state = adamw.update(*given, rate=0.1)
    torch.testing.assert_close(
        pytree.tree_leaves(given), pytree.tree_leaves(before), rtol=0, atol=0
    )
    assert (given[2].step, state.step) == (1, 2)


def traffic_of_training() -> dict[str, Any]:
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    params, x, y = adamw.problem(8)
    params = {name: sm.device_put(p, mesh, adamw.STORED[name]) for name, p in params.items()}
    batch = [sm.device_put(t, mesh, P("dp")) for t in (x, y)]
    with sm.debug.comm_report() as report:
        sm.value_and_grad(adamw.loss_of)(params, *batch)
    return report.by_op


def test_adamw_trains_with_one_gather_and_one_scatter_of_all_weights():
    for by_op in simulated(4, traffic_of_training):
        assert (by_op["all_gather"][0], by_op["reduce_scatter"][0]) == (1, 1)
        assert set(by_op) == {"all_gather", "reduce_scatter", "all_reduce"}


# -- Muon ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 8), (1, 5), (5, 1)])
def test_newton_schulz_keeps_singular_vectors_and_equalizes_values(shape):
    x = draw(*shape)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    found = u.mT @ muon.newton_schulz(x) @ vt.mT
    values = found.diagonal()
    torch.testing.assert_close(found, values.diag(), rtol=0, atol=1e-10)
    assert 0.6 < values.min() <= values.max() < 1.3


def test_newton_schulz_of_zeros():
    assert muon.newton_schulz(torch.zeros(3, 4)).eq(0).all()


def test_muon_equals_torch():
    """To the precision of bfloat16, in which torch multiplies."""
    params, *grads = [
        [draw(*shape, seed=seed).float() for shape in ((6, 9), (20, 4))] for seed in range(3)
    ]
    leaves = [p.clone().requires_grad_() for p in params]
    momentum = [torch.zeros_like(p) for p in params]
    optimizer = torch.optim.Muon(leaves, muon.RATE, weight_decay=0, momentum=muon.MOMENTUM)
    for each in grads:
        params, momentum = muon.update(
            params, each, momentum, lambda ahead: [muon.newton_schulz(m) for m in ahead]
        )
        for leaf, g in zip(leaves, each, strict=True):
            leaf.grad = g
        optimizer.step()
    for p, leaf in zip(params, leaves, strict=True):
        torch.testing.assert_close(p, leaf.detach(), rtol=0, atol=0.05 * muon.RATE * 5**0.5)


MATRICES = [(8, 8), (2, 5), (5, 2), (13, 4), (4, 13), (6, 6), (1, 7)]


def test_owners_share_the_work():
    specs = muon.owners(tuple(MATRICES), 4)
    sizes = [dict(spec.sizes)["fsdp",] for spec in specs]
    assert [sorted(each) for each in sizes] == [[0, 0, 0, rows] for rows, _ in MATRICES]
    work = [m * n * min(m, n) for m, n in MATRICES]
    loads = [sum(n for n, each in zip(work, sizes, strict=True) if each[rank]) for rank in range(4)]
    assert max(loads) == 8**3  # the largest has an owner of its own
    assert min(loads) > 0


def orthogonalised() -> tuple[list[torch.Tensor], Any]:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("fsdp",))
    matrices = [sm.device_put(draw(*shape), mesh, muon.STORED) for shape in MATRICES]
    muon.by_owners(matrices)
    with sm.debug.comm_budget(launches=2) as used:
        found = muon.by_owners(matrices)
    assert all(sm.typeof(x) is sm.typeof(m) for x, m in zip(found, matrices, strict=True))
    return [x.full_tensor() for x in found], used.by_op


def test_owners_orthogonalize_with_two_minimal_collectives():
    expected = [muon.newton_schulz(draw(*shape)) for shape in MATRICES]
    sizes = [dict(spec.sizes)["fsdp",] for spec in muon.owners(tuple(MATRICES), 4)]
    for rank, (found, by_op) in enumerate(simulated(4, orthogonalised)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        received = 0
        for (rows, columns), owned in zip(MATRICES, sizes, strict=True):
            part = [*map(len, torch.arange(rows).chunk(4)), 0, 0, 0][rank]
            received += (rows - part if owned[rank] else part) * columns * 8
        assert by_op == {"all_to_all": (2, received)}


def test_matrix_is_orthogonalized_by_one_rank(monkeypatch):
    once, calls = muon.newton_schulz, []

    def counted(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return once(x, steps)

    monkeypatch.setattr(muon, "newton_schulz", counted)
    simulated(4, orthogonalised)
    again = [(n, m) for m, n in MATRICES if m > n]  # tall ones are worked on transposed
    assert sorted(calls) == sorted(2 * (MATRICES + again))


def budgets() -> list[int]:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("fsdp",))
    placed = pytree.tree_map(lambda t: sm.device_put(t, mesh, muon.STORED), muon.problem(8))
    *_, uses = muon.train(muon.loss_sharded, *placed, muon.by_owners)
    return [used.launches for used in uses]


def test_muon_communicates_twice_per_step():
    for launches in simulated(4, budgets):
        assert launches[1:] == [2] * (muon.STEPS - 1)
