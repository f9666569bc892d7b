"""Tensor and sequence parallelism: layouts of weights, and of activations between modules."""
