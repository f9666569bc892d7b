"""Tensor and sequence parallelism: which weights are split, and how activations lie between modules."""
