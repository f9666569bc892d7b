"""Check that all ranks make the same meshes in the same order, without waiting for any of them.

rank 0   mesh 0 is (dp=2, tp=2)   first in the store: the reference
rank 1   mesh 0 is (dp=2, tp=2)   the same
rank 2   mesh 0 is (dp=4)         differs: waits a moment for others, finds the outliers by votes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, distributed_c10d

from ... import errors
from ...comm.call_site import user_line
from ...settings import settings
from ...text import printable, ranks_text
from ..diagnosis.votes import minority, parties_by
from ..monitor import monitor_of
from ..store_values import MOST_RANKS, bad_value, checked, has_fields, json_object, parsed, whole
from ..verdict import Observation, Verdict, composed
from .rank_info import file_store_fault

if TYPE_CHECKING:
    from ...comm.world import World
    from ...device_mesh import DeviceMesh

_TO_COME_S = 0.3  # how long to wait for other ranks before votes decide which are the outliers
_PAUSE_S = 0.01
_KEYS = "shardmesh/meshes/*"
_FIELDS = ("device type", "shape", "axis names", "rank order", "backends")


@dataclass(frozen=True)
class MeshCall:
    """One rank's call of `init_device_mesh`.

    Attributes:
        text: the mesh, for people.
        fields: what must be the same on every rank, by the names in `_FIELDS`.
        place: file:line in the user's program.
    """

    rank: int
    text: str
    fields: dict[str, Any]
    place: str

    @staticmethod
    def from_json(text: str) -> MeshCall:
        """Return the call in a text that anybody may have written. Raises: ValueError."""
        found = has_fields(json_object(text), MeshCall.__dataclass_fields__)
        has_fields(checked(found["fields"], dict), _FIELDS)
        shown, place = (printable(checked(found[name], str)) for name in ("text", "place"))
        return MeshCall(whole(found["rank"], MOST_RANKS - 1), shown, found["fields"], place)


class _Meshes:
    """The meshes that this rank has made in one world, and where the ranks compare them."""

    def __init__(self, world: World) -> None:
        self.known: set[str] = set()
        self.store = _store_of(world)


_meshes: WeakKeyDictionary[World, _Meshes] = WeakKeyDictionary()


def compare(mesh: DeviceMesh) -> None:
    """Compare a mesh that `init_device_mesh` made with those that the other ranks made.

    Raises: MeshMismatchError, on every rank, when the ranks differ; LaunchEnvironmentError when the
        group's store is a file that another job has left.
    Communication: two messages to the store of the default group, for each new mesh; does not wait
    unless ranks differ.
    """
    world = mesh.world
    if world.size == 1 or settings().mode == "off":
        return
    if world not in _meshes:
        _meshes[world] = _Meshes(world)
    meshes = _meshes[world]
    fields = _fields_of(mesh)
    key = json.dumps(fields)
    if meshes.store is None or key in meshes.known:
        return
    line = user_line()
    made = MeshCall(world.rank, repr(mesh), fields, f"{line[0]}:{line[1]}")
    keys = PrefixStore(str(len(meshes.known)), meshes.store)
    meshes.known.add(key)
    # The store is gone: the next collective tells what happened.
    with contextlib.suppress(dist.DistError):
        _compare(world, keys, key, made, len(meshes.known))


def _fields_of(mesh: DeviceMesh) -> dict[str, Any]:
    order = hashlib.sha1(
        mesh.ranks.tobytes(), usedforsecurity=False
    ).hexdigest()  # a list of thousands of ranks would fill the store
    backends = [backend.name for backend in mesh.backends]
    values = mesh.device_type, list(mesh.shape), list(mesh.axis_names), order, backends
    return dict(zip(_FIELDS, values, strict=True))


def _store_of(world: World) -> Any:
    """Return the part of the default group's store for a world; None without one, or if fake."""
    accessor = getattr(distributed_c10d, "_get_default_store", None)
    if accessor is None:
        return None
    store = accessor()
    if isinstance(_whole(store), FileStore) and (fault := file_store_fault(store, world.rank)):
        raise errors.LaunchEnvironmentError(fault)
    job = getattr(world, "job", "")
    return PrefixStore(f"shardmesh/meshes/{job}", store) if job else None


def _whole(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _compare(world: World, keys: Any, key: str, made: MeshCall, number: int) -> None:
    keys.append("made", json.dumps(asdict(made)) + "\n")
    first = keys.compare_set("first", "", key)
    if first == key.encode():
        return
    meshes = _all_made(world, keys)
    if all(one.fields == made.fields for one in meshes):
        raise bad_value(f"{_KEYS}/first", first, "no rank has made such a mesh")
    verdict = parsed(
        f"{_KEYS}/verdict",
        keys.compare_set("verdict", "", _diagnosed(meshes, number).to_json()),
        Verdict.from_json,
    )
    monitor = monitor_of(world)
    raise verdict.error() if monitor is None else monitor.failed(verdict)


def _all_made(world: World, keys: Any) -> list[MeshCall]:
    """Return the meshes of the ranks that arrive within a moment."""
    deadline = time.monotonic() + _TO_COME_S
    while True:
        made = {}
        for line in keys.get("made").splitlines():
            one = parsed(f"{_KEYS}/made", line, MeshCall.from_json)
            made[one.rank] = one
        if len(made) == world.size or time.monotonic() > deadline:
            return [made[rank] for rank in sorted(made)]
        time.sleep(_PAUSE_S)


def _diagnosed(made: list[MeshCall], number: int) -> Verdict:
    parties = sorted(parties_by(made, lambda one: json.dumps(one.fields)), key=len)
    outliers = minority([[one.rank for one in party] for party in parties])
    usual, other = parties[-1][0].fields, parties[0][0].fields
    field = next(name for name in _FIELDS if usual[name] != other[name])
    rest = [one.rank for one in made if one.rank not in outliers]
    who = (
        f"{ranks_text(outliers)} made another mesh than {ranks_text(rest)}"
        if outliers
        else "the ranks made different meshes"
    )
    seen = sorted(made, key=lambda one: one.rank not in outliers)
    said = f"{who} as mesh {number} of the program: they differ in {field}."
    lines = [
        f"  {ranks_text([one.rank for one in party])}: {party[0].text} at {party[0].place}"
        for party in parties
    ]
    advice = (
        "Call init_device_mesh for the same meshes in the same order on every rank. A mesh over "
        "some of the ranks is DeviceMesh(device_type, array_of_ranks), which only those need."
    )
    observed = tuple(Observation(one.rank, one.text, one.place) for one in seen)
    return Verdict("mesh", outliers, field, observed, composed(said, advice, lines))
