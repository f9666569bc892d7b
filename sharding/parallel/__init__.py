"""Layers: where parameters, gradients and activations of a module lie."""
