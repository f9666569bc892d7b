"""Utilities of a training loop: gradient clipping, norms, averages, loss scaling, samplers and
batches.
"""
