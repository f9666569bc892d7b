"""Redistribution: plans from one layout to another, and their execution with gradients."""
