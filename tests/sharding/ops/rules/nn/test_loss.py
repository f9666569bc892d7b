"""Losses: bytes and memory of the cross entropy over sharded classes, second gradients, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import place
from tests.sharding.ranks import collectives, on_mesh, same_error

LOGITS = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
LABELS = torch.tensor([9, 0, -100, 4, -100, 4])
WEIGHT = torch.arange(1.0, 11, dtype=torch.float64)
OPTIONS = [
    {},
    {"reduction": "sum", "weight": WEIGHT},
    {"reduction": "none", "label_smoothing": 0.1},
    {"label_smoothing": 0.2, "weight": WEIGHT},
    {"ignore_index": -100, "reduction": "none"},
]


def laid_out(options, mesh, spec):
    """Return the options with the weight on the mesh."""
    return {
        name: place(x, mesh, spec) if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
    }


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "spec", [P(None, "a"), P("b", "a"), P(None, ("b", "a")), P("a", unreduced={"b"})], ids=str
)
def test_cross_entropy_and_its_second_gradient(options, spec):
    def second(x, labels, options):
        loss = F.cross_entropy(x, labels, **options)
        (g,) = torch.autograd.grad((loss * loss).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        return loss.detach(), g.detach(), h

    wanted = second(LOGITS.clone().requires_grad_(), LABELS, options)

    def program(mesh):
        given = laid_out(options, mesh, P(spec.dims[1] or None) if len(spec.dims) > 1 else P())
        found = second(
            place(LOGITS, mesh, spec).requires_grad_(), place(LABELS, mesh, P("b")), given
        )
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), want)

    on_mesh((4, 2), program)


def test_bytes_per_row_do_not_depend_on_the_number_of_classes():
    """512 rows of 32000 classes on 8 ranks: two reductions of 512 numbers and two of one number,
    one in backward.

    So that 4096 rows receive 57 KB per rank, and the same operator with gathered logits 459 MB.
    """
    rows = 512
    logits = torch.randn(rows, 4000)
    labels = torch.arange(rows) * 61

    def program(mesh):
        x = sm.from_local(logits, mesh, P(None, "a"), shape=(rows, 32000)).requires_grad_()
        targets = place(labels, mesh, P())
        with collectives() as forward:
            loss = F.cross_entropy(x, targets)
        with collectives() as backward:
            loss.backward()
        return sum(r.bytes_received for r in forward), sum(r.bytes_received for r in backward)

    share = 2 * 7 / 8 * 4
    for forward, backward in on_mesh((8,), program):
        assert forward == 2 * rows * share + share
        assert rows * share <= backward <= rows * share + 2 * share
        assert forward * 8 < 100_000


def test_backward_saves_nothing_of_the_size_of_the_logits():
    """Exponentials are recomputed: forward temporarily holds one copy of the logits, backward two,
    including the gradient.
    """

    def program(mesh):
        x = place(torch.randn(64, 4096), mesh, P(None, "a")).requires_grad_()
        targets = place(torch.arange(64), mesh, P())
        kept = {}

        def keep(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = F.cross_entropy(x, targets)
        del kept[x.to_local().untyped_storage().data_ptr()]
        assert 0 < sum(kept.values()) < x.to_local().nbytes / 50
        loss.backward()

    on_mesh((4,), program)


@pytest.mark.parametrize("sizes", [(10, 0, 0), (0, 4, 6)], ids=str)
def test_ranks_without_classes_and_ranks_with_ignored_rows_only(sizes):
    leaf = LOGITS.clone().requires_grad_()
    labels = torch.tensor([-100, -100, -100, -100, 7, 2])
    want = F.cross_entropy(leaf, labels)
    want.backward()

    def program(mesh):
        for spec in (P("b", "a", sizes={"a": sizes}), P("a", "b"), P("a")):
            x = sm.distribute_tensor(LOGITS, mesh, spec, src_data_rank=None).requires_grad_()
            got = F.cross_entropy(x, place(labels, mesh, P("b")))
            got.backward()
            assert got.item() == pytest.approx(want.item(), rel=1e-12)
            torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)
        nothing = F.cross_entropy(x, place(torch.full((6,), -100), mesh, P()))
        assert nothing.isnan().item()

    on_mesh((3, 2), program)


def test_half_precision_accumulates_in_float32():
    x = torch.zeros(3, 2000, dtype=torch.bfloat16)
    labels = torch.tensor([0, 999, 1999])

    def program(mesh):
        split = place(x, mesh, P(None, "a"))
        for reduction in ("none", "mean", "sum"):
            got = F.cross_entropy(split, place(labels, mesh, P()), reduction=reduction)
            assert got.dtype is torch.bfloat16
            assert torch.equal(got.full_tensor(), F.cross_entropy(x, labels, reduction=reduction))

    on_mesh((4,), program)


def test_invalid_label_raises():
    """As in torch, on the ranks that hold the row."""

    def program(mesh):
        with pytest.raises(IndexError, match="Target 10 is out of bounds"):
            F.cross_entropy(
                place(LOGITS, mesh, P(None, "a")), place(torch.full((6,), 10), mesh, P())
            )

    on_mesh((2,), program)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("rows", [5, 7])
def test_mismatched_rows_raise(loss, rows):
    def program(mesh):
        loss(
            place(LOGITS, mesh, P(None, "a")),
            place(torch.zeros(rows, dtype=torch.int64), mesh, P()),
        )

    assert str(rows) in same_error((2,), program, (ValueError, RuntimeError, AssertionError))


def test_small_losses_are_not_rounded_to_zero():
    """The loss of a confident correct row is small, and as precise as torch's."""
    x = torch.tensor([[1000.0, 990.0, 985.0], [0.0, -8.0, -12.0]])
    want = F.cross_entropy(x, torch.tensor([0, 0]), reduction="none")

    def program(mesh):
        got = F.cross_entropy(
            place(x, mesh, P(None, "a")), place(torch.tensor([0, 0]), mesh, P()), reduction="none"
        )
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=0)

    on_mesh((3,), program)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weight_of_l1_loss_is_used(reduction):
    """torch does not pass it to what overrides `l1_loss`."""
    x, y, weight = LOGITS, LOGITS.flip(0), WEIGHT.expand(6, 10).contiguous()
    want = F.l1_loss(x, y, weight=weight, reduction=reduction)

    def program(mesh):
        given = [place(t, mesh, P("a")) for t in (x, y, weight)]
        torch.testing.assert_close(
            F.l1_loss(*given[:2], weight=given[2], reduction=reduction).full_tensor(), want
        )
        # A mode: torch calls the function twice, the second time without the weight.
        with torch.device("cpu"):
            torch.testing.assert_close(
                F.l1_loss(*given[:2], weight=given[2], reduction=reduction).full_tensor(), want
            )
        torch.testing.assert_close(F.l1_loss(given[0], given[1]).full_tensor(), F.l1_loss(x, y))

    on_mesh((4,), program)


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, F.l1_loss, F.cross_entropy, F.multilabel_soft_margin_loss, F.triplet_margin_loss],
)
def test_deprecated_arguments_raise(loss):
    def program(mesh):
        count = 3 if loss is F.triplet_margin_loss else 2
        loss(*[place(LOGITS, mesh, P("a"))] * count, size_average=True)

    assert "size_average= is deprecated by torch" in same_error((2,), program, ValueError)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits, F.soft_margin_loss]
)
def test_half_precision_means_accumulate_in_float32(loss):
    """The sum of 4096 ones would be 256 in bfloat16; what is pending is reduced before it is
    rounded.
    """
    x, y = torch.zeros(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)

    def program(mesh):
        got = loss(place(x, mesh, P("a")), place(y, mesh, P("a")))
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.full_tensor(), loss(x, y), rtol=0.004, atol=0)
        total = loss(place(x, mesh, P("a")), place(y, mesh, P("a")), reduction="sum")
        torch.testing.assert_close(
            total.full_tensor(), loss(x, y, reduction="sum"), rtol=0.004, atol=0
        )

    on_mesh((3,), program)
