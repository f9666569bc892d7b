"""Optimizers that need whole matrices: each matrix is processed by one rank."""
