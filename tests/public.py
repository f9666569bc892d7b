"""The public names of the package and of its namespaces."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import shardmesh as sm

NAMESPACES = sm._NAMESPACES


def public_names() -> dict[str, Any]:
    """Return what every public name stands for."""
    modules = [sm, *(import_module(f"shardmesh.{name}") for name in NAMESPACES)]
    return {name: getattr(module, name) for module in modules for name in module.__all__}
