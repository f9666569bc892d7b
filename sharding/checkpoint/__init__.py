"""Checkpoints: state of any mesh, saved whole or not, loaded on any mesh (docs/checkpoint.md)."""
