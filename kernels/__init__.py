"""How bytes move and numbers are made inside one device.

This layer knows tensors, boxes (a half-open interval per dim) and integers; it knows nothing of meshes or layouts.

| file | question it answers | its kernels |
|---|---|---|
| `box.py` | what is a box, what do two boxes share | |
| `backend.py` | which form of a kernel runs: Triton's or torch operations | |
| `copy.py` | how do boxes of a tensor become one flat buffer, and back | `strided_triton.py` |
| `reduce.py` | how are contributions in a flat buffer combined | `strided_triton.py` |
| `strided_views.py`, `strided.py` | how is a copy described in strided views; how do many of them become one launch | |
| `quantize.py` | how do boxes become records of 8-bit codes, and back | `quantize_triton.py` |
| `symmetric.py` | how do ranks that can read each other's memory gather, exchange and add up | `symmetric_triton.py` |
| `random.py` | which random number belongs to element number i | `random_triton.py` |
| `laws.py` | the same, for more distributions | `random_triton.py` |
| `elementary.py` | log, exp, cos and sin with the same bits on every device | `random_triton.py` |
| `number_triton.py` | how are numbers converted inside a kernel | |

`docs/kernels.md` says when they are used, what they move and how they are tested.
"""
