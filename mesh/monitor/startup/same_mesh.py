"""Check that all ranks make the same meshes in the same order, without waiting for any of them.

rank 0   mesh 0 is (dp=2, tp=2)   first in the store: the reference
rank 1   mesh 0 is (dp=2, tp=2)   the same
rank 2   mesh 0 is (dp=4)         differs: waits for a majority of the ranks, which decides by votes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, distributed_c10d

from ... import errors
from ...abstract_mesh import AbstractMesh
from ...comm.call_site import user_line
from ...comm.world import World
from ...settings import settings
from ...text import printable, ranks_text
from ..diagnosis.votes import minority, parties_by
from ..monitor import monitor_of
from ..store_keys import StoreKeys
from ..store_values import MOST_RANKS, checked, has_fields, json_object, whole
from ..verdict import Observation, Verdict, compose_text
from .rank_info import file_store_fault

_DECIDED_S = 0.3  # how long to wait for the other ranks once a majority has decided
_UNDECIDED_S = 10.0  # and before: ranks of a busy host arrive far apart
_FIRST_PAUSE_S, _PAUSE_S = 0.01, 0.1
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
        call = has_fields(json_object(text), MeshCall.__dataclass_fields__)
        has_fields(checked(call["fields"], dict), _FIELDS)
        shown, place = (printable(checked(call[name], str)) for name in ("text", "place"))
        return MeshCall(whole(call["rank"], MOST_RANKS - 1), shown, call["fields"], place)


class _Meshes:
    """The meshes that this rank has made in one world, and where the ranks compare them."""

    def __init__(self, world: World) -> None:
        self.known: set[str] = set()
        self.store = _store_of(world)


def compare(
    world: World, mesh: AbstractMesh, device_type: str, backends: Sequence[str | None]
) -> None:
    """Compare a mesh that `init_device_mesh` made with those that the other ranks made.

    Raises: MeshMismatchError, on every rank, when the ranks differ; LaunchEnvironmentError when the
        group's store is a file that another job has left.

    Communication: two messages to the store of the default group, for each new mesh. Where ranks
    differ, those that differ from the first one wait up to 10 s for the others' votes.
    """
    if world.size == 1 or settings().mode == "off":
        return
    meshes = world.state(_Meshes)
    # a list of thousands of ranks would fill the store
    order = hashlib.sha1(mesh.ranks.tobytes(), usedforsecurity=False).hexdigest()
    values = device_type, list(mesh.shape), list(mesh.axis_names), order, list(backends)
    fields: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    key = json.dumps(fields)
    if meshes.store is None or key in meshes.known:
        return
    line = user_line()
    call = MeshCall(world.rank, repr(mesh), fields, f"{line[0]}:{line[1]}")
    keys = meshes.store.below(str(len(meshes.known)), "*")
    meshes.known.add(key)
    # when the store is gone, the next collective tells what happened
    with contextlib.suppress(dist.DistError):
        _compare(world, keys, key, call, len(meshes.known))


def _store_of(world: World) -> StoreKeys | None:
    """Return a part of the default group's store for one world.

    None without a group, or with torch's fake store.
    """
    accessor = getattr(distributed_c10d, "_get_default_store", None)
    if accessor is None:
        return None
    store = accessor()
    if isinstance(_whole(store), FileStore) and (fault := file_store_fault(store, world.rank)):
        raise errors.LaunchEnvironmentError(fault)
    job = getattr(world, "job", "")
    return StoreKeys(store, f"shardmesh/meshes/{job}", "shardmesh/meshes") if job else None


def _whole(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _compare(world: World, keys: StoreKeys, key: str, call: MeshCall, number: int) -> None:
    keys.append("made", json.dumps(asdict(call)) + "\n")
    first = keys.claim("first", key, str)
    if first == key:
        return
    # a rank claims to be the first after it has appended its mesh
    if all(json.dumps(other.fields) != first for other in _calls(keys).values()):
        raise keys.bad_value("first", first, "no rank has made such a mesh")
    calls = _wait_for_votes(world, keys)
    verdict = keys.claim("verdict", _name_outliers(calls, number).to_json(), Verdict.from_json)
    monitor = monitor_of(world)
    raise verdict.error() if monitor is None else monitor.failed(verdict)


def _calls(keys: StoreKeys) -> dict[int, MeshCall]:
    """Return the meshes that ranks have made so far, by rank."""
    return {call.rank: call for call in keys.read_lines("made", MeshCall.from_json)}


def _wait_for_votes(world: World, keys: StoreKeys) -> list[MeshCall]:
    """Return the meshes of all ranks, or of those that arrive in time.

    The time is short once more than half of the ranks have made the same mesh, since the others
    cannot change which ranks are the outliers. Before, it is less than the stall timeout, after
    which the ranks that wait for this one would raise.
    """
    since = time.monotonic()
    undecided_s = min(_UNDECIDED_S, settings().timeout / 2)
    pause = _FIRST_PAUSE_S
    while True:
        calls = _calls(keys)
        limit_s = min(_DECIDED_S, undecided_s) if _is_decided(calls, world.size) else undecided_s
        has_all = len(calls) == world.size
        if has_all or keys.has("verdict") or time.monotonic() - since > limit_s:
            return [calls[rank] for rank in sorted(calls)]
        time.sleep(pause)
        pause = min(1.5 * pause, _PAUSE_S)


def _is_decided(calls: Mapping[int, MeshCall], size: int) -> bool:
    return 2 * max(map(len, _parties(calls.values()))) > size


def _parties(calls: Iterable[MeshCall]) -> list[list[MeshCall]]:
    """Return the calls in groups that made the same mesh."""
    return parties_by(calls, lambda call: json.dumps(call.fields))


def _name_outliers(calls: list[MeshCall], number: int) -> Verdict:
    parties = sorted(_parties(calls), key=len)
    outliers = minority([[one.rank for one in party] for party in parties])
    usual, other = parties[-1][0].fields, parties[0][0].fields
    field = next(name for name in _FIELDS if usual[name] != other[name])
    rest = [one.rank for one in calls if one.rank not in outliers]
    who = (
        f"{ranks_text(outliers)} made another mesh than {ranks_text(rest)}"
        if outliers
        else "the ranks made different meshes"
    )
    seen = sorted(calls, key=lambda one: one.rank not in outliers)
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
    return Verdict("mesh", outliers, field, observed, compose_text(said, advice, lines))
