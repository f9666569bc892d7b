"""When each operator and each collective of a graph of `sm.jit` runs."""
