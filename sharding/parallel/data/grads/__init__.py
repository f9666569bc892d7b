"""Reduction of gradients over ranks."""
