"""Copies, reductions, quantization and random numbers on one device.

The lowest layer, without meshes and layouts.

Its inputs are tensors, boxes (a half-open interval per dim) and integers.

| file | question it answers | its kernels |
|---|---|---|
| `box.py` | what is a box, where do two boxes intersect | |
| `backend.py` | does an operation run as a Triton kernel or as torch operations | |
| `copy.py`, `box_runs.py` | how do boxes become one flat buffer, and back | `strided_triton.py` |
| `reduce.py` | how are contributions in a flat buffer combined | `strided_triton.py` |
| `strided_views.py`, `strided.py` | how is a copy described; how do many become one launch | |
| `quantize.py`, `quantize_format.py` | how do boxes become 8-bit codes | `quantize_triton.py` |
| `symmetric/` | how do ranks read each other's memory | `symmetric/symmetric_triton.py` |
| `random/` | which random number has element i, everywhere alike | `random/random_triton.py` |
| `number_triton.py` | how are numbers converted inside a kernel | |
| `launcher.py` | how is a kernel launched in a few microseconds | |
| `device_copies.py` | how do tables get to a device, also in the capture of a CUDA graph | |

`docs/kernels.md` says when they are used, how many bytes they move and how they are tested.
"""
