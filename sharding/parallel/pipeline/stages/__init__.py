"""A model in stages, without changes to its code: calls of its submodules are intercepted.

Read `units`, `module_calls`, `values`, `skeleton`, `recording`, `dependencies`, `split`,
`ownership`, `signature`, `precision`, `run`, `stage`, `assembly` and `staged_model`, in this order.
"""
