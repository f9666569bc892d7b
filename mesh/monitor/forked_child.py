"""Detach a forked child from its rank.

A child has the rank's memory and sockets, but none of the threads that communicate: a collective
that it called would hang, or take what other ranks have sent to the rank. So the child records into
memory of its own, and collectives on the rank's groups raise. It may start a default group of its
own.
"""

from __future__ import annotations

import os

from . import termination
from .torch_calls import hooks

_is_installed = False


def install() -> None:
    """Detach every child that this process forks from now on."""
    global _is_installed
    if not _is_installed and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_be_no_rank)
        _is_installed = True


def _be_no_rank() -> None:
    for monitor in list(termination.monitors):
        monitor.detach()
    hooks.refuse_calls()
    termination.monitors.clear()
    termination.keep_groups()  # the child has none of the threads that torch would wait for at exit
