"""The device of kernel tests: the GPU if there is one, else the CPU with Triton's interpreter."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
