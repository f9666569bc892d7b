"""How bytes move and numbers are made inside one device.

This layer knows tensors, boxes (a half-open interval per dim) and integers; it knows nothing of meshes or layouts.

| file | question it answers |
|---|---|
| `box.py` | what is a box, what do two boxes share |
| `copy.py` | how do boxes of a tensor become one flat buffer, and back |
| `random.py` | which random number belongs to element number i |
"""
