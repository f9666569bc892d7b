"""Start and end the processes of a program.

launch, the default process group, sessions, preemption, work for rank 0.
"""
