"""Sample calls of layers and losses."""

import torch

from tests.sharding.ops.rules.table import b, call, f, i, pos, samples, unit

X = f(4, 3)
samples(
    "layer_norm",
    call(X, (3,)),
    call(X, (3,), f(3), f(3)),
    call(f(2, 3, 4), [3, 4], pos(3, 4), None, 1e-3),
    call(X, [3], bias=f(3)),
)
samples(
    "rms_norm",
    call(X, (3,)),
    call(X, (3,), f(3)),
    call(f(2, 3, 4), [3, 4], weight=pos(3, 4), eps=1e-3),
)
IMAGE, ROWS = f(3, 4, 2, 3), f(4, 6)
samples("normalize", call(X), call(X, dim=0), call(f(2, 3, 4), 3.0, (1, 2), 0.5))
samples("norm_except_dim", call(f(4, 3, 2)), call(X, 2, 1), call(X, 2, -1))
samples("_weight_norm", call(X, pos(4, 1)), call(X, pos(1, 3), 1))
samples("group_norm", call(IMAGE, 2, pos(4), f(4)), call(f(3, 6), 3, eps=0.1), call(f(2, 6, 4), 2))
samples(
    "F.batch_norm",
    call(ROWS, None, None, pos(6), f(6), True),
    call(IMAGE, None, None, training=True, eps=0.1),
)
samples("F.batch_norm", call(IMAGE, f(4), pos(4), pos(4), f(4)), call(ROWS, f(6), pos(6), eps=0.1))
samples("torch.batch_norm", call(IMAGE, pos(4), f(4), f(4), pos(4), False, 0.1, 1e-5, True))
samples("torch.instance_norm", call(f(3, 4, 5), pos(4), f(4), None, None, True, 0.1, 1e-5, True))
samples("F.instance_norm", call(IMAGE, None, None, pos(4), f(4)), call(f(3, 4, 5), eps=0.1))
samples("F.instance_norm", call(IMAGE, f(4), pos(4), pos(4), use_input_stats=False))
samples("local_response_norm", call(f(2, 5, 3), 3), call(f(2, 4, 2, 2), 4, 0.5, 0.6, 2.0))
samples(
    "F.embedding",
    call(i(4, 3, high=5), f(5, 2)),
    call(i(4, high=5), f(5, 2), padding_idx=2),
    call(i(high=5), f(5, 3)),
)
samples(
    "F.embedding",
    call(i(4, 3, high=5), f(5, 2), -1),
    call(i(4, high=3), f(3, 2), scale_grad_by_freq=True),
)
samples("torch.embedding", call(f(5, 2), i(4, 3, high=5)), call(f(5, 2), i(4, high=5), 2))
samples("one_hot", call(i(4, 3, high=5), 6), call(i(4, high=5), num_classes=5))

Q, K, V = f(2, 4, 3, 2), f(2, 4, 5, 2, seed=1), f(2, 4, 5, 3, seed=2)
KG, VG = f(2, 2, 5, 2, seed=1), f(2, 2, 5, 3, seed=2)
samples(
    "scaled_dot_product_attention",
    call(Q, K, V),
    call(Q, Q + 1, Q - 1, is_causal=True),
    call(Q, K, V, scale=0.3),
)
samples(
    "scaled_dot_product_attention",
    call(Q, K, V, attn_mask=b(3, 5)),
    call(Q, K, V, f(2, 1, 3, 5)),
    call(Q[0], K[0], V[0]),
)
samples(
    "scaled_dot_product_attention",
    call(Q, KG, VG, enable_gqa=True),
    call(Q, KG, VG, f(3, 5), enable_gqa=True),
)
samples(
    "scaled_dot_product_attention",
    call(Q, KG, VG, f(2, 4, 3, 5), enable_gqa=True),
    call(Q, K, V, b(2, 1, 1, 5) | (i(5) >= 0)),
)
samples(
    "scaled_dot_product_attention",
    call(Q, KG, VG, f(2, 1, 3, 5), enable_gqa=True),
    call(Q, KG[:, :1], VG[:, :1], enable_gqa=True),
)
samples("scaled_dot_product_attention", call(Q[:, :3], K[:, :3], V[:, :3], f(4 - 1, 3, 5)))

EVERY = [call(X, f(4, 3, seed=1), reduction=r) for r in ("mean", "sum", "none")]
samples(
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss",
    *EVERY,
    call(X, f(4, 3, seed=1)),
)
samples(
    "mse_loss huber_loss",
    *[call(X, f(4, 3, seed=1), weight=pos(4, 3), reduction=r) for r in ("mean", "sum", "none")],
)
samples(
    "l1_loss",
    *[call(X, f(4, 3, seed=1), weight=pos(4, 3), reduction=r) for r in ("mean", "sum", "none")],
)
samples("smooth_l1_loss", call(X, f(4, 3, seed=1), beta=0.5))
samples("huber_loss", call(X, f(4, 3, seed=1), delta=0.5))
samples("poisson_nll_loss", call(X, pos(4, 3), log_input=True, full=True))
samples(
    "binary_cross_entropy",
    *[call(unit(4, 3), unit(4, 3, seed=1), reduction=r) for r in ("mean", "sum", "none")],
)
samples("binary_cross_entropy", call(unit(4, 3), unit(4, 3, seed=1), weight=pos(3)))
samples(
    "binary_cross_entropy_with_logits",
    *[call(X, unit(4, 3), reduction=r) for r in ("mean", "sum", "none")],
)
samples("binary_cross_entropy_with_logits", call(X, unit(4, 3), pos(4, 3), pos_weight=pos(3)))
samples(
    "kl_div",
    *[call(X, unit(4, 3), reduction=r) for r in ("batchmean", "sum", "none")],
    call(X, f(4, 3), log_target=True, reduction="sum"),
)

LOGITS, LABELS = f(5, 3), i(5, high=3)
# The first rank of two has nothing but ignored targets.
IGNORED = torch.tensor([-100, -100, -100, 1, 0])
# More options of these are in test_loss.py.
samples(
    "cross_entropy",
    call(LOGITS, IGNORED, pos(3)),
    call(LOGITS, LABELS, reduction="sum"),
    call(f(3), i(high=3)),
)
samples(
    "cross_entropy",
    call(f(2, 3, 4), i(2, 4, high=3), reduction="none"),
    call(LOGITS, torch.full((5,), -100)),
)
samples(
    "cross_entropy",
    call(LOGITS, unit(5, 3), pos(3), label_smoothing=0.1),
    call(LOGITS, unit(5, 3), reduction="none"),
)
samples("cross_entropy", call(LOGITS, LABELS, weight=pos(3), label_smoothing=0.1, ignore_index=1))
samples(
    "nll_loss",
    call(LOGITS, IGNORED, weight=pos(3)),
    call(f(2, 3, 4), i(2, 4, high=3), ignore_index=0),
)
samples("nll_loss", call(LOGITS, LABELS, reduction="none"), call(LOGITS, LABELS, reduction="sum"))


def _distance(x, y):
    return (x - y).abs().sum(-1)


TRIPLET = f(5, 3), f(5, 3, seed=1), f(5, 3, seed=2)
SIGNS, LENGTHS = 2.0 * b(5) - 1, torch.tensor([2, 1, 0])
SEQUENCES = call(
    f(6, 3, 4).log_softmax(2), i(3, 2, low=1, high=4), torch.tensor([6, 5, 6]), LENGTHS
)
samples("triplet_margin_loss", call(*TRIPLET, reduction="sum"))
samples("triplet_margin_with_distance_loss", call(*TRIPLET, margin=2.0))
for r in ("mean", "none"):
    samples("hinge_embedding_loss", call(f(5), SIGNS, margin=2.0, reduction=r))
    samples("margin_ranking_loss", call(f(5), f(5, seed=1), SIGNS, 0.5, reduction=r))
    samples("cosine_embedding_loss", call(f(5, 3), f(5, 3, seed=1), SIGNS, margin=0.1, reduction=r))
    samples("triplet_margin_loss", call(*TRIPLET, swap=True, reduction=r))
    samples(
        "triplet_margin_with_distance_loss",
        call(*TRIPLET, distance_function=_distance, reduction=r),
    )
    samples("multi_margin_loss", call(LOGITS, LABELS, 2, weight=pos(3), reduction=r))
    samples("multilabel_margin_loss", call(LOGITS, torch.tensor([[0, 2, -1]] * 5), reduction=r))
    samples("multilabel_soft_margin_loss", call(LOGITS, unit(5, 3), weight=pos(3), reduction=r))
    samples("gaussian_nll_loss", call(LOGITS, f(5, 3, seed=1), pos(5, 3), full=True, reduction=r))
    samples("ctc_loss", call(*SEQUENCES.args, reduction=r))
    samples("linear_cross_entropy", call(f(5, 2), f(3, 2), LABELS, reduction=r))
samples("cosine_embedding_loss", call(f(3), f(3, seed=1), torch.tensor(1.0)))
samples("multi_margin_loss", call(f(3), i(high=3)))
samples("multilabel_margin_loss", call(f(3), torch.tensor([1, -1, 0])))
samples(
    "gaussian_nll_loss", call(LOGITS, f(5, 3, seed=1), pos(5)), call(LOGITS, f(5, 3, seed=1), 0.5)
)
samples(
    "ctc_loss",
    call(SEQUENCES.args[0], i(3, low=1, high=4), (6, 5, 6), (2, 1, 0), zero_infinity=True),
)
samples(
    "linear_cross_entropy", call(f(5, 2), f(3, 2), IGNORED, linear_bias=f(3), label_smoothing=0.1)
)

PROJECTIONS = f(12, 4), f(12), None, None, False, 0.0, f(4, 4), f(4)
samples(
    "multi_head_attention_forward", call(f(3, 2, 4), f(5, 2, 4), f(5, 2, 4), 4, 2, *PROJECTIONS)
)
STATIC = {"static_k": f(4, 5, 2), "static_v": f(4, 5, 2, seed=1), "need_weights": False}
samples(
    "multi_head_attention_forward",
    call(f(3, 2, 4), f(5, 2, 4), f(5, 2, 4), 4, 2, *PROJECTIONS, **STATIC),
)

# Under torch they take the reduction as a number.
samples("torch.cosine_embedding_loss", call(f(5, 3), f(5, 3, seed=1), SIGNS, 0.1, 2))
samples("torch.hinge_embedding_loss", call(f(5), SIGNS, 2.0, 0))
samples("torch.margin_ranking_loss", call(f(5), f(5, seed=1), SIGNS))
samples("torch.triplet_margin_loss", call(*TRIPLET, margin=2.0, reduction=2))
samples("torch.poisson_nll_loss", call(X, pos(4, 3), True, True, 1e-8, 1))
samples("torch.binary_cross_entropy_with_logits", call(X, unit(4, 3), pos(4, 3), pos(3), 1))
samples("torch.kl_div", call(X, unit(4, 3), 2, log_target=True))
samples("torch.ctc_loss", call(*SEQUENCES.args, 0, 1))
