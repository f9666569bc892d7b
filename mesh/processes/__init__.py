"""Worlds of processes: groups on torch.distributed, watched by the monitor."""
