"""Transforms of functions: derivatives, vmap, custom gradients."""
