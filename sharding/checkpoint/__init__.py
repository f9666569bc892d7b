"""Checkpoints: state on any mesh, saved so that it survives anything, loaded onto any other mesh (docs/checkpoint.md)."""
