"""Checkpoints: state on any mesh, saved completely or not at all, loaded onto any other mesh
(docs/checkpoint.md).
"""
