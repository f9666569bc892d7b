"""Graphs to look at: `f.lower(...)`, `.compile()`, `f.recorded`."""
