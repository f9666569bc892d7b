"""Data parallelism: parameters that are split at rest and gathered while they are used."""
