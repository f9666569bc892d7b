"""Parallel layers: layouts of the parameters, gradients and activations of modules."""
