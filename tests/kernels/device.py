"""Where the tests of kernels put their tensors: the GPU where there is one, else the CPU, for Triton's interpreter."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
