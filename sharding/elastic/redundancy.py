"""`Redundancy`: each rank has a copy of the parts of a rank on another host.

    FSDP over 4 ranks    host 0: rank 0 [0:2]  rank 1 [2:4]     host 1: rank 2 [4:6]  rank 3 [6:8]
    copies                       of rank 2     of rank 3                of rank 0     of rank 1

Only boxes that ranks of a single host hold are copied: what is replicated over hosts survives one
of them anyway. A version is kept until all ranks have the next one, so that a refresh that a loss
cuts off leaves the older version whole.

    refresh(step 5)   own parts -> snapshot -> all_to_all ...       versions: 4
    refresh(step 6)   all have those of 5: 4 is freed; the next     versions: 5
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import Box, box_shape, box_size
from ...mesh.comm.agreement import gather_facts
from ...mesh.comm.group import Group
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.work import DONE, Work
from ...mesh.device_mesh import DeviceMesh
from ...mesh.text import table_lines
from ..checkpoint.agreement import agree
from ..checkpoint.load import line_of
from ..checkpoint.plan import holders_of, without_pending
from ..checkpoint.tree import leaves, map_leaves, name_of, without_stateful
from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor

_ALIGNED = 64  # bytes at which parts start in a buffer, so that it can be viewed in any dtype
_TAG = CommTag("elastic: copies of parts on another host")


@dataclass(frozen=True, eq=False)
class StateCopy:
    """A version of the state that this rank has besides the current one; by `Redundancy.version`.

    Attributes:
        step: the step that was passed to `refresh`.
        state: the tree with copies of this rank's own parts and values.
        holders: which ranks have a copy of which box, by name; the same on every rank.
        received: this rank's copies of parts of other ranks, by name and box.
        nbytes: memory of the tensors.
    """

    step: int
    state: Any
    holders: Mapping[str, Mapping[Box, tuple[int, ...]]]
    received: Mapping[tuple[str, Box], Tensor]
    nbytes: int


# -- who has copies of what ------------------------------------------------------------------------


class Placement(NamedTuple):
    """Which rank copies which boxes to which.

    Attributes:
        sent: (name, box, bytes) by (sender, receiver), in the order of the tensors.
        holders: which ranks have a copy of which box, by name.
    """

    sent: dict[tuple[int, int], list[tuple[str, Box, int]]]
    holders: dict[str, dict[Box, tuple[int, ...]]]

    def sent_by(self, rank: int) -> int:
        """Return how many bytes a rank sends in a refresh."""
        return _total(self.sent, 0, rank)

    def held_by(self, rank: int) -> int:
        """Return how many bytes of other ranks a rank has copies of."""
        return _total(self.sent, 1, rank)


def _total(
    sent: Mapping[tuple[int, int], list[tuple[str, Box, int]]], index: int, rank: int
) -> int:
    return sum(size for pair, parts in sent.items() if pair[index] == rank for *_, size in parts)


def place_copies(layouts: Mapping[str, Layout], hosts: Mapping[int, int]) -> Placement:
    """Return a placement in which each box is on two hosts at least.

    A box that ranks of a single host hold is sent by the one of them that sends the fewest bytes so
    far, to the rank at its place on the next host.

    Args:
        layouts: of the tensors, by name.
        hosts: the host of each rank. If there is only one, each rank counts as a host.
    """
    if len(set(hosts.values())) == 1:
        hosts = {rank: rank for rank in hosts}
    neighbors = _neighbors(hosts)
    load = dict.fromkeys(hosts, 0)
    placement = Placement({}, {})
    for name, layout in layouts.items():
        for box_in_layout, ranks in holders_of(layout).items():
            box = box_in_layout or ((0, 1),)
            if len({hosts[rank] for rank in ranks}) > 1:
                continue
            sender = min(ranks, key=load.__getitem__)
            receiver = neighbors[sender]
            if receiver == sender:
                continue
            size = box_size(box) * layout.dtype.itemsize
            load[sender] += size
            placement.sent.setdefault((sender, receiver), []).append((name, box, size))
            placement.holders.setdefault(name, {})[box] = (receiver,)
    return placement


def _neighbors(hosts: Mapping[int, int]) -> dict[int, int]:
    """Return for each rank the one at its place on the next host, in the order of ranks."""
    ranks_of: dict[int, list[int]] = {}
    for rank in sorted(hosts):
        ranks_of.setdefault(hosts[rank], []).append(rank)
    in_order = list(ranks_of.values())
    neighbors: dict[int, int] = {}
    for index, ranks in enumerate(in_order):
        others = in_order[(index + 1) % len(in_order)]
        for place, rank in enumerate(ranks):
            neighbors[rank] = others[place % len(others)]
    return neighbors


# -- the copies ------------------------------------------------------------------------------------


class _Arriving(NamedTuple):
    """Copies that are under way.

    Attributes:
        step, state: of which they are; the tree has views of `own`.
        placement: of the copies.
        own: the bytes of this rank's parts, those that are sent first.
        received: the bytes of the parts of others.
        work: the collective.
    """

    step: int
    state: Any
    placement: Placement
    own: Tensor
    received: Tensor
    work: Work


class Redundancy:
    """Redundancy(mesh): copies of each rank's parts on another host, for state without replicas.

    With it FSDP over all ranks survives the loss of any rank, or of all ranks of any one host. The
    copies are of the step of a refresh, and so is what each rank keeps of its own parts: `recover`
    goes back to that step, and the steps since are computed again.

        refresh after       a loss costs, besides the step that it interrupts
        every step          nothing; one step, if the last copies had not arrived on all ranks
        every k steps       up to k - 1 steps, or 2 k - 1

    Args:
        mesh: all ranks that hold state. Hosts are the nodes of its topology, whose order decides
            where copies are: on the next host, the last one's on the first. On a single host each
            rank has the parts of the rank before, which survives a rank, not the host.
        device: where versions are kept; by default the device of the mesh. "cpu" for the memory of
            the host: then the device has a version only while it is sent.
        hosts: a number of the host of each rank, the same on every rank, where the topology does
            not know them: it has nodes of one size.

    Memory: a version has this rank's own parts of the state, and the parts of others that it has
        copies of: with FSDP over n ranks 2/n of the state in all. There is one version after
        `finish`, and two from a `refresh` to the next one, or to `finish`.

    Communication: as `mesh.duplicate`, and see the methods: in process groups of its own, so that
        collectives of a step do not wait for copies.

    Example:
        >>> redundancy = sm.elastic.Redundancy(mesh)
        >>> for step in range(1, steps + 1):
        ...     train_step(state)
        ...     redundancy.refresh(state, step)
        >>> # after a loss, on each rank that is left
        >>> step = redundancy.newest_step(group_of_the_others)
        >>> recover(redundancy.version(step), like, alive)
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        device: torch.device | str | None = None,
        hosts: Mapping[int, int] | None = None,
    ) -> None:
        self.mesh = mesh
        self.device = torch.device(mesh.device if device is None else device)
        ranks = mesh.ranks.ravel().tolist()
        nodes = mesh.topology.node_ids(mesh).ravel().tolist()
        if hosts is None:
            hosts = dict(zip(ranks, nodes, strict=True))
        self.hosts: dict[int, int] = {rank: hosts[rank] for rank in ranks}
        self._group: Group = mesh.duplicate("redundancy").group(mesh.axis_names)
        self._layouts: dict[str, Layout] = {}
        self._lines: dict[str, str] = {}
        self._placement = Placement({}, {})
        self._arriving: _Arriving | None = None
        # of which all copies on this rank are complete, the newest last
        self._versions: list[StateCopy] = []

    def refresh(self, state: Any, step: int) -> None:
        """refresh(state, step): begin to copy this version; every rank of the mesh calls it.

        It waits until the copies of the refresh before have arrived on all ranks; then the version
        before that one is freed, this rank's parts are copied, and their sending begins. The state
        may change as soon as it returns.

        Args:
            state: the tree, as for `recover`.
            step: its version; later than those before.

        Raises:
            ValueError: a step that is not later; tensors on ranks outside of the mesh.
            CheckpointError: ranks have different trees or steps; on every rank, the same text.

        Communication: the reduction of pending values; one all_gather of 32 bytes from each rank;
            without being waited for, an all_to_all of the parts that no other host has.
        """
        last = self._versions[-1].step if self._versions else None
        if self._arriving is not None:
            last = self._arriving.step
        if last is not None and step <= last:
            raise ValueError(
                f"Redundancy.refresh(step={step}) after a refresh of step {last}: steps ascend; a "
                "job that goes back to an earlier one makes a new Redundancy, on its new mesh"
            )
        tree = map_leaves(without_stateful(state), lambda _, leaf: reduced(leaf))
        layouts: dict[str, Layout] = {}
        for path, leaf in leaves(tree):
            if isinstance(leaf, ShardedTensor):
                layouts[name_of(path)] = self._check(name_of(path), leaf)
        if layouts != self._layouts:  # the first time, and after an optimizer's first step
            self._layouts = layouts
            self._lines = {name: line_of(layout) for name, layout in layouts.items()}
            self._placement = place_copies(layouts, self.hosts)
        self._receive()
        self._agree("Redundancy.refresh", {"": f"step={step}", **self._lines})
        self._free_older()
        self._arriving = self._start(tree, self._placement, step)

    def _check(self, name: str, leaf: ShardedTensor) -> Layout:
        outside = set(leaf.mesh.ranks.ravel().tolist()) - self.hosts.keys()
        if outside:
            raise ValueError(
                f"Redundancy.refresh: {name!r} is {leaf._layout}, on ranks {sorted(outside)} that "
                f"are not of {self.mesh!r}; make Redundancy with a mesh of all ranks"
            )
        return leaf._layout

    def finish(self) -> None:
        """Wait for the copies of the last refresh on all ranks, and free the version before.

        Every rank of the mesh calls it.

        Communication: one all_gather of 32 bytes from each rank.
        """
        self._receive()
        self._agree("Redundancy.finish", {})
        self._free_older()

    @property
    def steps(self) -> tuple[int, ...]:
        """The versions of which this rank has all that it should have, the newest first.

        Copies that a loss has cut off are not among them.

        Communication: none.
        """
        if self._arriving is not None and self._arriving.work.is_completed():
            try:
                self._receive()
            except Exception:  # the loss has cut the collective off
                self._arriving = None
        return tuple(version.step for version in reversed(self._versions))

    def newest_step(self, group: Group) -> int | None:
        """newest_step(group) -> the newest version that all ranks of the group have, or None.

        Every rank that is left calls it.

        Communication: one all_gather of small objects over the group.
        """
        told = gather_facts(group, self.steps)
        common = set.intersection(*map(set, told.values()))
        return max(common, default=None)

    def version(self, step: int) -> StateCopy:
        """version(step) -> this rank's part of a version, for `recover`.

        Raises:
            ValueError: this rank does not have it.

        Communication: none.
        """
        for version in self._versions:
            if version.step == step:
                return version
        raise ValueError(
            f"Redundancy.version({step}): this rank has versions {list(self.steps)}; take one that "
            "all ranks have, by newest_step"
        )

    @property
    def nbytes(self) -> int:
        """Memory of all versions on this rank, with those that are under way."""
        total = sum(version.nbytes for version in self._versions)
        if self._arriving is not None:
            total += self._arriving.own.nbytes + self._arriving.received.nbytes
        return total

    def __str__(self) -> str:
        placement = self._placement
        rows = [("rank", "host", "sends", "to", "holds")]
        for rank, host in sorted(self.hosts.items()):
            to = ", ".join(str(pair[1]) for pair in placement.sent if pair[0] == rank)
            sent, held = placement.sent_by(rank), placement.held_by(rank)
            rows.append((str(rank), str(host), f"{sent:,}", to, f"{held:,}"))
        head = f"copies of parts of {len(placement.holders)} tensors"
        return "\n".join([head, *table_lines(rows, right=(0, 1, 2, 4))])

    # -- a refresh ---------------------------------------------------------------------------------

    def _start(self, tree: Any, placement: Placement, step: int) -> _Arriving:
        """Copy this rank's parts, and begin to send them."""
        parts: dict[str, Tensor] = {}
        for path, leaf in leaves(tree):
            if isinstance(leaf, Tensor):
                local = leaf._local if isinstance(leaf, ShardedTensor) else leaf
                parts[name_of(path)] = local.detach()
        rank = self.mesh.world.rank
        in_splits = [extent(placement, rank, other) for other in self._group.ranks]
        out_splits = [extent(placement, other, rank) for other in self._group.ranks]
        first = [
            name
            for other in self._group.ranks
            for name, *_ in placement.sent.get((rank, other), ())
        ]
        offsets: dict[str, int] = {}
        size = 0
        for name in dict.fromkeys([*first, *parts]):
            offsets[name] = size
            size += aligned(parts[name].nbytes)
        own = torch.empty(size, dtype=torch.uint8, device=self.mesh.device)
        for name, part in parts.items():
            view(own, offsets[name], part.dtype, tuple(part.shape)).copy_(part)
        state = map_leaves(
            tree, lambda path, leaf: _copied_leaf(leaf, own, offsets.get(name_of(path)))
        )
        received = torch.empty(sum(out_splits), dtype=torch.uint8, device=self.mesh.device)
        work: Work | None = DONE
        if placement.sent:
            sent = own[: sum(in_splits)]
            work = self._group.all_to_all(
                received, sent, out_splits, in_splits, async_op=True, tag=_TAG
            )
        return _Arriving(step, state, placement, own, received, work or DONE)

    def _receive(self) -> None:
        """Wait for this rank's copies of the last refresh."""
        arriving = self._arriving
        if arriving is None:
            return
        arriving.work.wait()
        self._versions.append(self._version_of(arriving))
        self._arriving = None

    def _version_of(self, arriving: _Arriving) -> StateCopy:
        """Return copies that have arrived, on their device."""
        rank = self.mesh.world.rank
        buffer = arriving.received.to(self.device)
        dtypes = {
            name_of(path): leaf.dtype
            for path, leaf in leaves(arriving.state)
            if isinstance(leaf, Tensor)
        }
        received: dict[tuple[str, Box], Tensor] = {}
        start = 0
        for sender in self._group.ranks:
            for name, box, size in arriving.placement.sent.get((sender, rank), ()):
                received[name, box] = view(buffer, start, dtypes[name], box_shape(box))
                start += aligned(size)
        state = arriving.state
        if arriving.own.device != self.device:
            state = map_leaves(state, lambda _, leaf: _moved_leaf(leaf, self.device))
        nbytes = arriving.own.nbytes + buffer.nbytes
        return StateCopy(arriving.step, state, arriving.placement.holders, received, nbytes)

    def _agree(self, what: str, lines: Mapping[str, str]) -> None:
        """Wait until all ranks have received their copies, and check that these are of one step."""
        received = [version.step for version in self._versions[-1:]]
        agree(self._group, what, {**lines, "received copies": f"of steps {received}"})

    def _free_older(self) -> None:
        """Free all but the newest version, which all ranks have."""
        del self._versions[:-1]


def aligned(size: int) -> int:
    """Return the bytes that a part of this size takes in a buffer."""
    return -(-size // _ALIGNED) * _ALIGNED


def extent(placement: Placement, sender: int, receiver: int) -> int:
    """Return the bytes that a rank sends to another, with the gaps between parts."""
    return sum(aligned(size) for *_, size in placement.sent.get((sender, receiver), ()))


def view(buffer: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that starts at a byte of a buffer."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return buffer[start : start + size].view(dtype).view(shape)


def _copied_leaf(leaf: Any, own: Tensor, start: int | None) -> Any:
    """Return a leaf as a view of the buffer that it was copied to; other values are copied."""
    if start is None:
        return copy.deepcopy(leaf)
    local = leaf._local if isinstance(leaf, ShardedTensor) else leaf
    part = view(own, start, local.dtype, tuple(local.shape))
    if isinstance(leaf, ShardedTensor):
        return ShardedTensor._make_guarded(part, leaf._layout)
    return part


def reduced(leaf: Any) -> Any:
    """Return a leaf of which each rank has a part by itself."""
    return without_pending(leaf) if isinstance(leaf, ShardedTensor) else leaf


def _moved_leaf(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, ShardedTensor):
        return ShardedTensor._make_guarded(leaf._local.to(device), leaf._layout)
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
