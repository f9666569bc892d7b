"""Data parallelism: parameters are sharded and gathered for use."""
