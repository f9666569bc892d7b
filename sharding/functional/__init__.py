"""The functional API.

Functions of local tensors mapped over a mesh, collectives by axis name, types, gradients.
"""
