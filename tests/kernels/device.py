"""The device of kernel tests: a GPU, or the CPU with Triton's interpreter without one."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
