"""simulate: N ranks as threads of one process."""
