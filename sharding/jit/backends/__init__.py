"""What compiles a graph: generated Python, Inductor, or any backend of `torch.compile`."""
