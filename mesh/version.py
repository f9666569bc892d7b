"""The version of this package, from its metadata."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed_version() -> str:
    try:
        return version("shardmesh")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+unknown"


__version__ = _installed_version()
