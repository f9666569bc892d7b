"""`sm.ops.flex_attention`: batch, heads and query rows split, score and mask functions with global
positions, gradients, errors.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.nn.flex_attention import _PartOfAttention
from tests.sharding.ops.rules.table import f
from tests.sharding.ranks import collectives, launched, on_mesh, place, same_error

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")

LENGTH, FEATURES = 12, 8
Q, K, V = (f(4, 4, LENGTH, FEATURES, seed=seed).float() for seed in range(3))
BIAS = f(4, 4, LENGTH, LENGTH, seed=4).float()
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] * 2 + [1] * 10, [0] * 9 + [1] * 3])


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def packed(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (DOCUMENTS[b, q] == DOCUMENTS[b, kv])


def sloped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * (1 + h) + (q - kv) * 0.1


def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + BIAS[b, h, q, kv]


def mask_of(mask_mod: Any, batches: int | None = None, block: int = 4) -> Any:
    return flex.create_block_mask(
        mask_mod, batches, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block
    )


CASES: dict[str, Any] = {
    "nothing": dict,
    "causal": lambda: {"block_mask": mask_of(causal)},
    "blocks that parts cut": lambda: {"block_mask": mask_of(causal, block=8)},
    "packed documents": lambda: {"block_mask": mask_of(packed, 4)},
    "score": lambda: {"score_mod": sloped},
    "score of a captured bias, masked": lambda: {
        "score_mod": biased,
        "block_mask": mask_of(causal),
        "scale": 0.3,
    },
}
QUERY = {
    "batch": P("a"),
    "heads": P(None, "a"),
    "rows": P(None, None, "a"),
    "features": P(None, None, None, "a"),
    "batch and heads": P("a", "b"),
    "heads and rows": P(None, "a", "b"),
    "pending": P(unreduced={"a"}),
}


def reference(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
) -> Any:
    """Compute attention of whole tensors, element by element of the scores, with torch's ordinary
    operators.
    """
    scores = query @ key.transpose(-2, -1) * (FEATURES**-0.5 if scale is None else scale)
    b, h, q, kv = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, kv)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(b, h, q, kv), -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.one_in(6, each=["name"])
@pytest.mark.parametrize("layout", QUERY)
@pytest.mark.parametrize("name", CASES)
def test_like_torch(name: str, layout: str) -> None:
    options = CASES[name]()
    expected = flex.flex_attention(Q, K, V, **options)
    torch.testing.assert_close(expected, reference(Q, K, V, **options))

    def program(mesh: Any) -> None:
        for keys in (QUERY[layout], P()):
            with torch.no_grad():
                q = sm.device_put(Q, mesh, QUERY[layout])
                out = sm.ops.flex_attention(
                    q, sm.device_put(K, mesh, keys), sm.device_put(V, mesh, keys), **options
                )
            torch.testing.assert_close(out.full_tensor(), expected)
        if layout in ("batch", "heads", "rows"):
            assert out.spec == QUERY[layout].padded(4)

    on_mesh((2, 2), program)


@pytest.mark.one_in(6, each=["layout"])
@pytest.mark.parametrize("layout", QUERY)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, layout: str) -> None:
    options = CASES[name]()

    def gradients(attend: Any, *tensors: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        attend(*leaves, **options).square().sum().backward()
        return [x.grad for x in leaves]

    expected = gradients(reference, Q.double(), K.double(), V.double())

    def program(mesh: Any) -> None:
        specs = QUERY[layout], P(), QUERY[layout]
        tensors = [
            sm.device_put(x.double(), mesh, spec) for x, spec in zip((Q, K, V), specs, strict=True)
        ]
        for grad, other in zip(gradients(sm.ops.flex_attention, *tensors), expected, strict=True):
            torch.testing.assert_close(grad.full_tensor(), other)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("size", [2, 3])
def test_grouped_heads_and_uneven_rows(size: int) -> None:
    """Two key heads for four query heads; on three ranks a rank has no heads and parts of rows are
    uneven.
    """
    rows = (
        f(2, 4, 7, FEATURES).float(),
        f(2, 2, LENGTH, FEATURES, seed=1).float(),
        f(2, 2, LENGTH, FEATURES, seed=2).float(),
    )
    expected = flex.flex_attention(*rows, score_mod=sloped, enable_gqa=True)

    def program(mesh: Any) -> None:
        for spec in (P(), P("a"), P(None, "a"), P(None, None, "a")):
            for gradients in (False, True):
                q, k, v = (sm.device_put(x, mesh, spec).requires_grad_(gradients) for x in rows)
                out = sm.ops.flex_attention(q, k, v, score_mod=sloped, enable_gqa=True)
                torch.testing.assert_close(out.full_tensor(), expected)
                if gradients:
                    out.sum().backward()
                    assert k.grad is not None

    on_mesh((size,), program)


def test_batch_and_heads_communicate_nothing() -> None:
    def program(mesh: Any) -> None:
        q, k, v = (sm.device_put(x, mesh, P("a", "b")).requires_grad_() for x in (Q, K, V))
        with collectives() as records:
            out = sm.ops.flex_attention(q, k, v, block_mask=mask_of(causal))
            out.sum().backward()
        assert not launched(records)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("gradients", [False, True])
def test_auxiliary_results(gradients: bool) -> None:
    _, expected = flex.flex_attention(
        Q, K, V, score_mod=sloped, return_aux=flex.AuxRequest(lse=True)
    )

    def program(mesh: Any) -> None:
        q, k, v = (
            sm.device_put(x, mesh, P("a", None, "b")).requires_grad_(gradients) for x in (Q, K, V)
        )
        out, aux = sm.ops.flex_attention(
            q, k, v, score_mod=sloped, return_aux=flex.AuxRequest(lse=True)
        )
        torch.testing.assert_close(aux.lse.full_tensor(), expected.lse)
        assert aux.max_scores is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, lse = sm.ops.flex_attention(q, k, v, score_mod=sloped, return_lse=True)
        torch.testing.assert_close(lse.full_tensor(), expected.lse)
        assert out.shape == Q.shape

    on_mesh((2, 2), program)


def test_rows_that_see_no_key_are_zero() -> None:
    options = {"block_mask": mask_of(lambda b, h, q, kv: (q >= kv) & (q != 5))}
    expected = flex.flex_attention(Q, K, V, **options)
    assert expected[:, :, 5].abs().max() == 0

    def program(mesh: Any) -> None:
        for gradients in (False, True):
            q, k, v = (
                sm.device_put(x, mesh, P(None, None, "a")).requires_grad_(gradients)
                for x in (Q, K, V)
            )
            out = sm.ops.flex_attention(q, k, v, **options)
            torch.testing.assert_close(out.full_tensor(), expected)
            if gradients:
                out.sum().backward()
                assert not q.grad.full_tensor().isnan().any()

    on_mesh((2,), program)


def test_whole_blocks_are_sliced_and_others_made_again() -> None:
    """Parts of six rows cut blocks of four; parts of four do not."""

    def program(mesh: Any) -> None:
        layout = sm.typeof(sm.device_put(Q, mesh, P(None, None, "a")))
        part = _PartOfAttention(
            layout, layout, None, mask_of(causal), 1.0, False, None, None
        )._part_of_mask()
        start, stop = layout.box[2]
        expected = flex.create_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu")[:, :, start:stop]
        assert torch.equal(
            flex.create_mask(part.mask_mod, 1, 1, stop - start, LENGTH, device="cpu"), expected
        )
        assert part.shape[-2:] == (stop - start, LENGTH)

    on_mesh((2,), program)
    on_mesh((3,), program)


def test_ranks_outside_the_mesh() -> None:
    def program() -> Any:
        mesh = sm.DeviceMesh("cpu", [0, 2])
        q, k, v = (sm.device_put(x, mesh, [sm.Shard(0)]).requires_grad_() for x in (Q, K, V))
        out = sm.ops.flex_attention(q, k, v)
        out.sum().backward()
        return out.shape, out.to_local().shape[0]

    assert sm.simulate(3)(program)() == [(Q.shape, 2), (Q.shape, 0), (Q.shape, 2)]


def test_plain_tensors_call_torch() -> None:
    torch.testing.assert_close(
        sm.ops.flex_attention(Q, K, V, score_mod=sloped),
        flex.flex_attention(Q, K, V, score_mod=sloped),
    )


def _captured(mesh: Any, q: Any) -> Any:
    bias = place(mesh, BIAS)
    return sm.ops.flex_attention(
        q, q, q, score_mod=lambda score, b, h, i, j: score + bias[b, h, i, j]
    )


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda mesh, q: sm.ops.flex_attention(q, K, V),
            TypeError,
            "key and value must be a ShardedTensor",
        ),
        (lambda mesh, q: sm.ops.flex_attention(*[q.flatten(0, 1)] * 3), ValueError, "4 dims"),
        (
            lambda mesh, q: sm.ops.flex_attention(q, q[:, :3], q[:, :3]),
            ValueError,
            "4 query heads and 3 key heads",
        ),
        (lambda mesh, q: sm.ops.flex_attention(q, q, q[..., :5, :]), ValueError, "do not fit"),
        (
            lambda mesh, q: sm.ops.flex_attention(q[:, :, :8], q, q, block_mask=mask_of(causal)),
            ValueError,
            "for the global lengths",
        ),
        (_captured, TypeError, "score_mod closes over a ShardedTensor"),
    ],
    ids=["plain", "dims", "heads", "lengths", "mask", "captured"],
)
def test_errors_are_the_same_on_every_rank(call: Any, kind: Any, text: str) -> None:
    assert text in same_error((2,), lambda mesh: call(mesh, place(mesh, Q, sm.Shard(0))), kind)


def test_torchs_own_function_names_ours() -> None:
    def program(mesh: Any) -> None:
        with torch.no_grad():
            q = place(mesh, Q, sm.Shard(0))
            flex.flex_attention(q, q, q)

    assert "sm.ops.flex_attention" in same_error((2,), program, Exception)
