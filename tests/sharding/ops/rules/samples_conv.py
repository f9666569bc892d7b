"""Sample calls of convolutions, pooling, images, distances and recurrent layers."""

import torch
import torch.nn.functional as F

from tests.sharding.ops.rules.table import call, f, pos, samples, unit

# -- convolutions ----------------------------------------------------------------------------------

X, X3 = f(2, 3, 5, 4), f(1, 2, 3, 4, 3)
samples(
    "conv1d",
    call(f(2, 3, 7), f(4, 3, 3), f(4), 1, 1),
    call(f(4, 8), f(6, 2, 3), None, 3, 2, 2, groups=2),
)
samples("conv2d", call(X, f(4, 3, 3, 2), bias=f(4), stride=(2, 1), padding=(1, 0)))
samples("conv2d", call(f(1, 4, 5, 3), f(4, 1, 3, 3), padding="same", groups=4))
samples("conv3d", call(X3, f(2, 2, 2, 2, 2), f(2), padding=1))
samples("conv_tbc", call(f(5, 2, 3), f(3, 3, 4), f(4), 1))
samples(
    "conv_transpose1d",
    call(f(2, 3, 5), f(3, 4, 2), f(4), 3, 1, 2),
    call(f(4, 4), f(4, 1, 3), f(2), 1, 0, 0, 2, 2),
)
samples("conv_transpose2d", call(f(2, 4, 3, 4), f(4, 3, 3, 2), f(6), stride=2, groups=2))
samples("conv_transpose3d", call(f(1, 2, 3, 2, 3), f(2, 2, 2, 2, 2), f(2)))
samples("convolution", call(f(2, 3, 5), f(4, 3, 3), f(4), [1], [1], [1], False, [0], 1))
samples("convolution", call(f(2, 3, 5), f(3, 4, 3), None, [2], [1], [1], True, [1], 1))

# -- pooling ---------------------------------------------------------------------------------------

LINE, PLANE, SOLID = f(2, 3, 7), f(2, 2, 7, 5), f(1, 2, 4, 3, 3)
NOTHING = torch.full((1, 7, 5), -torch.inf, dtype=torch.float64)
samples("max_pool1d max_pool1d_with_indices", call(LINE, 3, 2, 1), call(f(3, 8), 2))
samples(
    "max_pool2d max_pool2d_with_indices",
    call(PLANE, 3, 2, 1),
    call(PLANE, (3, 2), (2, 1), (1, 0), (2, 1), True),
)
samples("max_pool2d", call(NOTHING, 3, 2, 1))
samples("max_pool3d max_pool3d_with_indices", call(SOLID, 2, 1))
samples("avg_pool1d", call(LINE, 3, 2, 1), call(f(3, 8), 3, 2, 1, True, False))
samples(
    "avg_pool2d",
    call(PLANE, 3, 2, 1, True, False),
    call(PLANE, (3, 2), ceil_mode=True),
    call(PLANE, 3, 2, 1, divisor_override=5),
)
samples("avg_pool3d", call(SOLID, 2, 1, 1))
samples("lp_pool1d", call(pos(2, 3, 7), 2, 3, 2))
samples("lp_pool2d", call(pos(2, 2, 7, 5), 3.0, 2, ceil_mode=True))
samples("lp_pool3d", call(pos(1, 2, 4, 3, 3), 2.0, 2))
for _pool in ("avg", "max"):
    samples(f"adaptive_{_pool}_pool1d", call(f(2, 3, 8), 4), call(f(3, 7), 3))
    samples(f"adaptive_{_pool}_pool2d", call(f(2, 3, 6, 5), (3, None)), call(PLANE, (1, 2)))
    samples(f"adaptive_{_pool}_pool3d", call(SOLID, (2, 1, 3)))
for _n in (1, 2, 3):
    samples(
        f"adaptive_max_pool{_n}d_with_indices",
        call((f(2, 3, 8), f(2, 3, 6, 4), f(1, 2, 4, 3, 3))[_n - 1], 2),
    )
for _name in ("fractional_max_pool2d", "fractional_max_pool2d_with_indices"):
    samples(_name, call(PLANE, 2, (3, 2), _random_samples=unit(2, 2, 2)))
    samples(_name, call(PLANE[0], 2, output_ratio=(0.5, 0.5), _random_samples=unit(1, 2, 2)))
for _name in ("fractional_max_pool3d", "fractional_max_pool3d_with_indices"):
    samples(_name, call(f(2, 2, 4, 4, 4), 2, (2, 2, 2), _random_samples=unit(2, 2, 3)))
samples("max_unpool1d", call(*F.max_pool1d(f(3, 7), 2, return_indices=True), 2, output_size=(7,)))
samples("max_unpool2d", call(*F.max_pool2d(f(2, 3, 6, 4), 2, return_indices=True), 2))
samples("max_unpool3d", call(*F.max_pool3d(f(1, 2, 4, 2, 2), 2, return_indices=True), 2))

# -- images ----------------------------------------------------------------------------------------

samples("interpolate", call(LINE, size=4), call(X, scale_factor=(2, 0.6), mode="nearest-exact"))
samples("interpolate", call(LINE, scale_factor=1.7, mode="linear"), call(X, 3, mode="area"))
samples("interpolate", call(f(1, 2, 5, 3), (3, 7), mode="bilinear", align_corners=True))
samples("grid_sample", call(X, unit(2, 3, 4, 2), align_corners=False))
samples("grid_sample", call(f(2, 2, 3, 2, 3), unit(2, 3, 2, 1, 3), "nearest", "border", True))
samples(
    "affine_grid",
    call(f(3, 2, 3), (3, 1, 4, 5), align_corners=False),
    call(f(2, 3, 4), torch.Size((2, 1, 3, 4, 2)), True),
)
samples("pixel_shuffle", call(f(2, 12, 3, 4), 2), call(f(4, 3, 4), 2))
samples("pixel_unshuffle", call(f(2, 3, 6, 4), 2))
samples("channel_shuffle native_channel_shuffle", call(f(2, 6, 3, 2), 3))
samples("F.unfold", call(X, (2, 3), 1, 1, 2), call(X[0], 2))
samples("F.fold", call(f(2, 12, 9), (4, 4), 2), call(f(8, 6), (3, 4), 2, stride=1))

# -- distances -------------------------------------------------------------------------------------

A, B = f(4, 3), f(4, 3, seed=1)
samples(
    "cosine_similarity",
    call(A, B),
    call(f(2, 1, 3), A, -1, 1e-3),
    call(A * 1e-3, B * 1e-3, dim=0, eps=1.0),
)
samples("pairwise_distance", call(A, B), call(A, f(3), 1.0, keepdim=True))
samples("pdist", call(f(5, 3)), call(f(4, 2), 1.0))
samples("cdist", call(A, f(5, 3)), call(f(2, 1, 4, 3), f(3, 2, 3), p=1.0), call(f(27, 3), A))

# -- recurrent -------------------------------------------------------------------------------------

STEPS, H, C = f(4, 3, 2), f(1, 3, 2), f(1, 3, 2, seed=1)
samples("lstm", call(STEPS, (H, C), [f(8, 2), f(8, 2, seed=1)], False, 1, 0.0, True, False, False))
samples("gru", call(STEPS, H, [f(6, 2), f(6, 2, seed=1)], False, 1, 0.0, True, False, False))
PLAIN = [f(2, 2), f(2, 2, seed=1), f(2), f(2, seed=1)]
samples("rnn_tanh rnn_relu", call(STEPS.transpose(0, 1), H, PLAIN, True, 1, 0.0, True, False, True))
samples(
    "lstm_cell",
    call(f(3, 4), (H[0], C[0]), f(8, 4), f(8, 2)),
    call(f(3, 4), (H[0], C[0]), f(8, 4), f(8, 2), f(8), f(8, seed=1)),
)
samples("gru_cell", call(f(3, 4), H[0], f(6, 4), f(6, 2), f(6), f(6, seed=1)))
samples("rnn_tanh_cell rnn_relu_cell", call(f(3, 4), H[0], f(2, 4), f(2, 2), f(2), f(2, seed=1)))
