"""Settings of the monitor: `collective_check` and `watchdog`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import errors
from .text import shortened

monotonic_ns = time.monotonic_ns

MODES = ("on", "strict", "full", "off")
_EXIT_SHARE = 0.8  # share of the time to exit that a wait may take which nothing interrupts


@dataclass(slots=True)
class Settings:
    """The monitor's settings in this process; use the same on all ranks.

    Attributes:
        mode: "on", "strict", "full" or "off".
        warn, timeout: seconds that a rank may keep others waiting.
        exit_s: seconds that a process has to exit after a verdict; 0 for no limit.
        torch_calls: whether the program's own calls of torch.distributed are monitored, too.
    """

    mode: str = "on"
    warn: float = 30.0
    timeout: float = 300.0
    exit_s: float = 10.0
    torch_calls: bool = True


def wait_before_exit(longest_s: float, exit_s: float) -> float:
    """Return the seconds for a wait that nothing interrupts, to end before its process is ended.

    Args:
        longest_s: the result at most.
        exit_s: seconds after which the process is ended; 0 for never.
    """
    return min(longest_s, _EXIT_SHARE * exit_s) if exit_s else longest_s


def from_environment(env: Mapping[str, str]) -> Settings:
    """Return the settings that environment variables give.

    Raises: LaunchEnvironmentError for invalid values.
    """
    mode = env.get("SHARDMESH_MONITOR", "on")
    if mode not in MODES:
        raise errors.LaunchEnvironmentError(
            f"SHARDMESH_MONITOR={shortened(mode, 80)!r}: write one of {', '.join(MODES)}."
        )
    calls = env.get("SHARDMESH_MONITOR_TORCH", "on")
    if calls not in ("on", "off"):
        raise errors.LaunchEnvironmentError(
            f"SHARDMESH_MONITOR_TORCH={shortened(calls, 80)!r}: write one of on, off."
        )
    _seconds(env, "SHARDMESH_HOST_LOST_S", 10.0)
    return Settings(
        mode,
        _seconds(env, "SHARDMESH_STALL_WARN_S", 30.0),
        _seconds(env, "SHARDMESH_STALL_TIMEOUT_S", 300.0),
        0.0 if env.get("SHARDMESH_EXIT_S") == "0" else _seconds(env, "SHARDMESH_EXIT_S", 10.0),
        calls == "on",
    )


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, str(default))
    try:
        # `float` takes digits of every script.
        seconds = float(text) if text.isascii() else math.nan
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise errors.LaunchEnvironmentError(
            f"{name}={shortened(env[name], 80)!r}: write a positive number of seconds."
        )
    return seconds


_settings: Settings | None = None
on_timeout: list[Callable[[], None]] = []  # called after `watchdog`


def settings() -> Settings:
    """Return the settings of this process.

    The defaults where those of the environment are invalid, which `check_environment` reports.
    """
    global _settings
    if _settings is None:
        try:
            _settings = from_environment(os.environ)
        except errors.LaunchEnvironmentError:
            _settings = Settings()
    return _settings


def check_environment() -> None:
    """Raise LaunchEnvironmentError for an invalid setting in the environment, before ranks meet."""
    from_environment(os.environ)


def collective_check(mode: str) -> None:
    """collective_check(mode): set how ranks' collectives are compared.

    From the next collective on; call it with the same mode on all ranks.

    Args:
        mode: "on" compares while the collective runs, without waiting: a difference is an error on
            every rank within half a second. "strict" waits before each collective until all ranks
            of the group call the same, so that nothing wrong is ever computed; it costs one
            synchronization per collective. Messages of `Group.send` and `Group.receive`, as between
            stages of a pipeline, wait for nobody: the second of the two ranks compares operation,
            dtype and purpose before it sends or reads, not sizes and directions. "full" is
            "strict", and compares the input of each asynchronous collective with a copy when it is
            waited for: a write in between is an error. "off" compares nothing, records nothing, and
            does not look for stalls. The environment variable SHARDMESH_MONITOR sets it for all
            ranks.

    Raises: ValueError for another mode.

    Communication: none.

    >>> import shardmesh as sm
    >>> sm.monitor.collective_check("on")
    """
    if mode not in MODES:
        raise ValueError(f"collective_check({mode!r}): write one of {', '.join(map(repr, MODES))}.")
    settings().mode = mode


def watchdog(warn: float | None = None, timeout: float | None = None) -> None:
    """watchdog(warn=30, timeout=300): set how long a rank may keep others waiting, in any group.

    Args:
        warn: seconds until waiting ranks print which rank is missing, and its stack.
        timeout: seconds until that is an error, `StallError`, on every rank.
            The environment variables SHARDMESH_STALL_WARN_S and SHARDMESH_STALL_TIMEOUT_S set them,
            too.

    Raises: ValueError for numbers that are not positive.

    Communication: none. Call it alike on all ranks, at any time.

    >>> import shardmesh as sm
    >>> sm.monitor.watchdog(timeout=600)
    """
    for name, value in (("warn", warn), ("timeout", timeout)):
        if value is not None and not value > 0:
            raise ValueError(f"watchdog({name}={value!r}): write a positive number of seconds.")
    current = settings()
    current.warn = current.warn if warn is None else float(warn)
    current.timeout = current.timeout if timeout is None else float(timeout)
    for call in on_timeout:
        call()
