"""Worlds of processes: groups on torch.distributed, checked by the monitor."""
