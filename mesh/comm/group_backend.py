"""GroupBackend: torch's backend and its options for the process groups of one mesh axis.

For axes where they are not the default ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import errors

FAKE = "fake"


class GroupBackend(NamedTuple):
    """The backend of a process group, such as "nccl" or "cpu:gloo,cuda:nccl", and options.

    None for the default one.

    Attributes:
        communicator: tells process groups of the same ranks and backend apart, see
            `DeviceMesh.duplicate`; "" for those that meshes share.
    """

    name: str | None = None
    options: Any = None
    communicator: str = ""


DEFAULT = GroupBackend()


def as_group_backend(value: Any) -> GroupBackend:
    """Return the backend for a name, torch's options of a backend, or a pair of both.

    Raises: MeshError for another value, or a name that torch does not have.
    """
    if value is None:
        return DEFAULT
    if isinstance(value, str):
        name, options = value, None
    elif (
        isinstance(value, Sequence)
        and len(value) == 2
        and (value[0] is None or isinstance(value[0], str))
    ):
        name, options = value
    else:
        name, options = None, value
    known = {FAKE, *getattr(dist.Backend, "backend_list", ())} if dist.is_available() else {FAKE}
    parts = [] if name is None else [part.rpartition(":")[2].lower() for part in name.split(",")]
    unknown = [part for part in parts if part not in known]
    if unknown or (options is not None and not hasattr(options, "_timeout")):
        raise errors.MeshError(
            f"backend_override: {value!r} is no backend; write a name of {sorted(known)}, torch's "
            "options of a backend (such as torch.distributed.ProcessGroupNCCL.Options()), or a "
            "pair (name, options)."
        )
    return GroupBackend(name, options)


def backends_of_axes(
    override: Mapping[Any, Any] | Sequence[Any] | None, names: Sequence[str]
) -> tuple[GroupBackend, ...]:
    """Return the backend of each axis.

    Args:
        override: axis, by name or position, -> what `as_group_backend` takes; or one for each axis.

    Raises: MeshError for an axis that does not exist or is given twice, and another number of
        entries than axes.
    """
    if override is None:
        return (DEFAULT,) * len(names)
    if not isinstance(override, Mapping):
        if len(override) != len(names):
            raise errors.MeshRuntimeError(
                f"backend_override has {len(override)} entries for the {len(names)} axes "
                f"{tuple(names)}: write one for each."
            )
        return tuple(map(as_group_backend, override))
    backends = [DEFAULT] * len(names)
    positions: set[int] = set()
    for key, value in override.items():
        position = names.index(key) if key in names else key
        if not isinstance(position, int) or not 0 <= position < len(names):
            raise errors.MeshRuntimeError(
                f"backend_override: {key!r} is no axis; write a name of {list(names)} or a "
                f"position of 0 to {len(names) - 1}."
            )
        if position in positions:
            raise errors.MeshRuntimeError(
                f"backend_override gives axis {names[position]!r} twice, by its name and by its "
                f"position {position}."
            )
        positions.add(position)
        backends[position] = as_group_backend(value)
    return tuple(backends)
