"""Utilities of a training loop: clipping, norms, averages, loss scaling, samplers and batches."""
