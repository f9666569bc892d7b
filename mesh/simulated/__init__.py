"""The simulated world: N ranks as threads of one process."""
