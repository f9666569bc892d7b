"""Optimizers of matrices, each of which one rank works on whole."""
