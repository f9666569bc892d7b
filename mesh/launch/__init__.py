"""Start and end processes: local launches, process groups, preemption, work for rank 0."""
