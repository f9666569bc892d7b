"""Types of values inside a mapped function: varying, replicated or pending along each axis."""
