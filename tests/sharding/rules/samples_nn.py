"""Sample calls of layers and losses."""

import torch

from tests.sharding.rules.table import b, call, f, i, pos, samples, unit

X = f(4, 3)
samples(
    "layer_norm",
    call(X, (3,)),
    call(X, (3,), f(3), f(3)),
    call(f(2, 3, 4), [3, 4], pos(3, 4), None, 1e-3),
    call(X, [3], bias=f(3)),
)
samples("rms_norm", call(X, (3,)), call(X, (3,), f(3)), call(f(2, 3, 4), [3, 4], weight=pos(3, 4), eps=1e-3))
samples(
    "F.embedding", call(i(4, 3, high=5), f(5, 2)), call(i(4, high=5), f(5, 2), padding_idx=2), call(i(high=5), f(5, 3))
)
samples("F.embedding", call(i(4, 3, high=5), f(5, 2), -1), call(i(4, high=3), f(3, 2), scale_grad_by_freq=True))
samples("torch.embedding", call(f(5, 2), i(4, 3, high=5)), call(f(5, 2), i(4, high=5), 2))
samples("one_hot", call(i(4, 3, high=5), 6), call(i(4, high=5), num_classes=5))

Q, K, V = f(2, 4, 3, 2), f(2, 4, 5, 2, seed=1), f(2, 4, 5, 3, seed=2)
KG, VG = f(2, 2, 5, 2, seed=1), f(2, 2, 5, 3, seed=2)
samples("scaled_dot_product_attention", call(Q, K, V), call(Q, Q + 1, Q - 1, is_causal=True), call(Q, K, V, scale=0.3))
samples(
    "scaled_dot_product_attention",
    call(Q, K, V, attn_mask=b(3, 5)),
    call(Q, K, V, f(2, 1, 3, 5)),
    call(Q[0], K[0], V[0]),
)
samples("scaled_dot_product_attention", call(Q, KG, VG, enable_gqa=True), call(Q, KG, VG, f(3, 5), enable_gqa=True))
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
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss", *EVERY, call(X, f(4, 3, seed=1))
)
# l1_loss(weight=) is not here: torch does not pass the weight on to __torch_function__.
samples(
    "mse_loss huber_loss", *[call(X, f(4, 3, seed=1), weight=pos(4, 3), reduction=r) for r in ("mean", "sum", "none")]
)
samples("smooth_l1_loss", call(X, f(4, 3, seed=1), beta=0.5))
samples("huber_loss", call(X, f(4, 3, seed=1), delta=0.5))
samples("poisson_nll_loss", call(X, pos(4, 3), log_input=True, full=True))
samples("binary_cross_entropy", *[call(unit(4, 3), unit(4, 3, seed=1), reduction=r) for r in ("mean", "sum", "none")])
samples("binary_cross_entropy", call(unit(4, 3), unit(4, 3, seed=1), weight=pos(3)))
samples("binary_cross_entropy_with_logits", *[call(X, unit(4, 3), reduction=r) for r in ("mean", "sum", "none")])
samples("binary_cross_entropy_with_logits", call(X, unit(4, 3), pos(4, 3), pos_weight=pos(3)))
samples(
    "kl_div",
    *[call(X, unit(4, 3), reduction=r) for r in ("batchmean", "sum", "none")],
    call(X, f(4, 3), log_target=True, reduction="sum"),
)

LOGITS, LABELS = f(5, 3), i(5, high=3)
IGNORED = torch.tensor([-100, -100, -100, 1, 0])  # the first rank of two has nothing but ignored targets
for r in ("mean", "sum", "none"):
    samples("cross_entropy", call(LOGITS, LABELS, reduction=r), call(LOGITS, IGNORED, pos(3), reduction=r))
    samples(
        "cross_entropy", call(LOGITS, IGNORED, reduction=r, label_smoothing=0.2), call(LOGITS, unit(5, 3), reduction=r)
    )
    samples("cross_entropy", call(f(2, 3, 4), i(2, 4, high=3), reduction=r), call(f(3), i(high=3), reduction=r))
    samples("nll_loss", call(LOGITS, LABELS, reduction=r), call(LOGITS, IGNORED, weight=pos(3), reduction=r))
samples("cross_entropy", call(LOGITS, LABELS, ignore_index=1), call(LOGITS, unit(5, 3), pos(3), label_smoothing=0.1))
samples("cross_entropy", call(LOGITS, LABELS, weight=pos(3), label_smoothing=0.1), call(LOGITS, torch.full((5,), -100)))
samples("nll_loss", call(f(2, 3, 4), i(2, 4, high=3)), call(LOGITS, LABELS, ignore_index=0))
