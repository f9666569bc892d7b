"""Transport: how activations and gradients get from stage to stage.

Each rank knows from the table in which order every other rank computes what it needs. Between two
ranks, in one direction, messages have the order in which the sender computes them. Receives are
posted ahead in that order, and waited for where their value is used. A send is waited for, so that
its memory is freed, when a message of the other rank shows that it has used what was sent: by its
row it sends that message later.

    rank 0    F0 -- send 0    F1 -- send 1    F2 -- send 2        computes on
    rank 1    post 0    wait 0, post 1, F0    wait 1, post 2, F1

What moves is the local part of each tensor. The first message of a kind (a stage, and the shapes of
a microbatch) is preceded by a header, which says what the tensors are; later ones are not.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....mesh.comm.channel import Channel, connected_channels
from ....mesh.comm.group import Group
from ....mesh.comm.recording.recorder import CommTag
from ....mesh.comm.work import Work
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.sharded_tensor import ShardedTensor
from .actions import Action, Row, Rows, actions_in, stages_of

_HEADER_SIZE = CommTag("pipeline: size of the description of activations")
_HEADER = CommTag("pipeline: description of activations")
_AHEAD = 1  # receives that are posted before the message that is used now


@dataclass(frozen=True)
class Sharding:
    """Of a sharded tensor: the axes of its mesh, its spec, and its global shape."""

    axes: tuple[str, ...]
    spec: P
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ValueMeta:
    """What a stage needs to know of a tensor before it arrives.

    Attributes:
        shape: of the local part.
        dtype: its dtype.
        requires_grad: whether a gradient goes back.
        sharding: None for a plain tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sharding: Sharding | None = None

    @staticmethod
    def of(value: Tensor) -> ValueMeta:
        sharding = None
        if isinstance(value, ShardedTensor):
            sharding = Sharding(tuple(value.mesh.axis_names), value.spec, tuple(value.shape))
        return ValueMeta(tuple(local_of(value).shape), value.dtype, value.requires_grad, sharding)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.sharding is None:
            return f"{dtype}{list(self.shape)}"
        return f"{dtype}{list(self.sharding.shape)} @ {self.sharding.spec}"

    def empty(self, device: torch.device) -> Tensor:
        """Return a buffer for the local part."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def wrap(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the value with this local part, a leaf of the stage's graph.

        Args:
            mesh: the pipeline's mesh; a sharded value is on this rank's slice of it.
        """
        local.requires_grad_(self.requires_grad)
        if self.sharding is None:
            return local
        sharding = self.sharding
        layout = Layout.of(mesh[sharding.axes], sharding.spec, sharding.shape, self.dtype)
        return ShardedTensor._make_guarded(local, layout)


Metas = tuple[ValueMeta, ...]


def local_of(value: Tensor) -> Tensor:
    """Return the tensor that autograd sees: the local part of a sharded one."""
    return value._local if isinstance(value, ShardedTensor) else value


def transfers(rows: Rows) -> dict[tuple[int, int], list[Action]]:
    """Return, by sending and receiving rank (places along the axis), the results that move between
    them, in the order in which the sender computes them.

    A result is named as in `Action.result`: 1F0 is the output of stage 1 for microbatch 0, and 1I0
    the gradient of its input.
    """
    rank_of = stages_of(rows)
    last_stage = max(rank_of)
    moved: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(rows):
        for action in actions_in(row):
            result = action.result
            if result.kind == "W":
                continue
            user = result.stage + (1 if result.kind == "F" else -1)
            if 0 <= user <= last_stage and rank_of[user] != rank:
                moved.setdefault((rank, rank_of[user]), []).append(result)
    return moved


class MetaTable:
    """What is known of the values that enter each stage, by stage and signature of a microbatch.

    Attributes:
        metas: both ends of a channel fill it, the sender from the values, the receiver from the
            header.
    """

    def __init__(self) -> None:
        self.metas: dict[tuple[int, Hashable], Metas] = {}

    def add(self, stage: int, signature: Hashable, values: Sequence[Tensor]) -> Metas:
        """Enter what a stage gets from the one before.

        Raises:
            RuntimeError: the values differ in more than numbers from those of an earlier microbatch
                with the same signature.
        """
        metas = tuple(map(ValueMeta.of, values))
        known = self.metas.setdefault((stage, signature), metas)
        if known != metas:
            raise RuntimeError(
                f"pipeline: stage {stage} gets {', '.join(map(str, metas))} where it got "
                f"{', '.join(map(str, known))} for inputs of the same shapes. What is passed "
                "between stages must follow from the shapes of the inputs: pad what does not."
            )
        return metas


class Outbox:
    """The messages from this rank to another one.

    Args:
        channel: to the receiver.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._described: set[tuple[int, Hashable]] = set()
        # the result that is sent, the work, and what must live until then
        self._in_flight: list[tuple[Action, Work, Tensor]] = []

    def send_activations(
        self, action: Action, signature: Hashable, values: Sequence[Tensor], metas: Metas
    ) -> None:
        """Send the output of a stage, after a header if the receiver does not know what comes."""
        key = (action.stage + 1, signature)
        if key not in self._described:
            self._described.add(key)
            data = torch.frombuffer(bytearray(pickle.dumps(metas)), dtype=torch.uint8)
            device = values[0].device if values else torch.device("cpu")
            self._start(action, torch.tensor([len(data)], device=device), _HEADER_SIZE)
            self._start(action, data.to(device), _HEADER)
        for value in values:
            self._start(action, local_of(value).detach(), tag_of(action))

    def send_gradients(self, action: Action, grads: Sequence[Tensor]) -> None:
        """Send the gradients of a stage's inputs."""
        for grad in grads:
            self._start(action, grad, tag_of(action))

    def release(self, is_used: Callable[[Action], bool]) -> None:
        """Free what has arrived.

        Args:
            is_used: whether the receiver is known to have used a result.
        """
        waiting = self._in_flight
        self._in_flight = []
        for entry in waiting:
            action, work, _ = entry
            if is_used(action) or work.is_completed():
                work.wait()
            else:
                self._in_flight.append(entry)

    def _start(self, action: Action, x: Tensor, tag: CommTag) -> None:
        x = x.contiguous()
        self._in_flight.append((action, self._channel.send(x, tag), x))


class Inbox:
    """The messages from another rank to this one.

    Args:
        channel: from the sender.
        device: where they arrive.
        table: what is known of the values.
    """

    def __init__(self, channel: Channel, device: torch.device, table: MetaTable) -> None:
        self._channel = channel
        self._device = device
        self._table = table
        self._described: set[tuple[int, Hashable]] = set()
        self._to_post: deque[Action] = deque()
        self._posted: dict[Action, list[tuple[Tensor, Work]]] = {}
        self._signatures: Sequence[Hashable] = ()

    def begin(self, order: Iterable[Action], signatures: Sequence[Hashable]) -> None:
        """Begin a step.

        Args:
            order: the results that come, in the order of sending.
            signatures: of the microbatches.
        """
        self._to_post = deque(order)
        self._posted = {}
        self._signatures = signatures
        self._post_ahead()

    def take(self, action: Action) -> list[Tensor]:
        """Wait for a result; return its tensors."""
        while action not in self._posted:
            metas = self._known_metas(self._to_post[0])
            self._post(self._receive_header(self._to_post[0]) if metas is None else metas)
        arrived: list[Tensor] = []
        for buffer, work in self._posted.pop(action):
            work.wait()
            arrived.append(buffer)
        self._post_ahead()
        return arrived

    def _post_ahead(self) -> None:
        """Post receives ahead of those that are used now, as far as it is known what comes."""
        while self._to_post and len(self._posted) < _AHEAD:
            metas = self._known_metas(self._to_post[0])
            if metas is None:
                return
            self._post(metas)

    def _key(self, action: Action) -> tuple[int, Hashable]:
        """Return the stage whose inputs the values or gradients are, and the signature."""
        stage = action.stage + 1 if action.kind == "F" else action.stage
        return stage, self._signatures[action.microbatch]

    def _known_metas(self, action: Action) -> Metas | None:
        """Return the metas of a message; None if they are not known yet."""
        key = self._key(action)
        if action.kind == "F":
            return self._table.metas[key] if key in self._described else None
        metas = self._table.metas.get(key)
        return None if metas is None else tuple(meta for meta in metas if meta.requires_grad)

    def _receive_header(self, action: Action) -> Metas:
        """Receive the header of the next message, which has activations."""
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self._channel.receive(size, _HEADER_SIZE).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._channel.receive(data, _HEADER).wait()
        metas: Metas = pickle.loads(data.cpu().numpy().tobytes())
        self._described.add(self._key(action))
        self._table.metas[self._key(action)] = metas
        return metas

    def _post(self, metas: Metas) -> None:
        """Post the receives of the next message."""
        action = self._to_post.popleft()
        buffers = [meta.empty(self._device) for meta in metas]
        tag = tag_of(action)
        self._posted[action] = [(x, self._channel.receive(x, tag)) for x in buffers]


def tag_of(action: Action) -> CommTag:
    """Return what a message is for, as the monitor and errors name it."""
    if action.kind == "F":
        return CommTag.of(
            f"pipeline: activations into stage {action.stage + 1}, microbatch {action.microbatch}"
        )
    return CommTag.of(
        f"pipeline: gradients into stage {action.stage - 1}, microbatch {action.microbatch}"
    )


class Transport:
    """All messages of one rank of a pipeline.

    Args:
        group: the ranks along the pipeline's axis.
        mesh: the pipeline's mesh.
        device: of activations.

    Communication: see `connect`.
    """

    def __init__(self, group: Group, mesh: DeviceMesh) -> None:
        self._group = group
        self._mesh = mesh
        self._table = MetaTable()
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._rank_of: dict[int, int] = {}
        # by rank: the place in its row of the action that computes a result
        self._places: list[dict[Action, int]] = []
        # Results for stages of this rank: never sent.
        self._own: dict[Action, list[Tensor]] = {}

    def begin(self, rows: Rows, signatures: Sequence[Hashable]) -> None:
        """Begin a step: connect to ranks that are new, and post the first receives.

        Communication: one byte for each channel that is new.
        """
        rank = self._group.rank
        moved = transfers(rows)
        self._rank_of = stages_of(rows)
        self._places = [_places(row) for row in rows]
        self._own = {}
        self._connect(moved)
        for (source, destination), order in moved.items():
            if destination == rank:
                self._inboxes[source].begin(order, signatures)

    def _connect(self, moved: Iterable[tuple[int, int]]) -> None:
        rank, ranks = self._group.rank, self._group.ranks
        new = [
            (source, destination)
            for source, destination in sorted(moved)
            if (source == rank and destination not in self._outboxes)
            or (destination == rank and source not in self._inboxes)
        ]
        pairs = [(ranks[source], ranks[destination]) for source, destination in new]
        channels = connected_channels(self._group.world, pairs, self._mesh.device)
        for source, destination in new:
            channel = channels[ranks[source], ranks[destination]]
            if source == rank:
                self._outboxes[destination] = Outbox(channel)
            else:
                self._inboxes[source] = Inbox(channel, self._mesh.device, self._table)

    def put_activations(
        self, action: Action, signature: Hashable, values: Sequence[Tensor]
    ) -> None:
        """Pass on the output of a stage."""
        metas = self._table.add(action.stage + 1, signature, values)
        receiver = self._rank_of[action.stage + 1]
        if receiver == self._group.rank:
            self._own[action] = [local_of(value).detach() for value in values]
        else:
            self._outboxes[receiver].send_activations(action, signature, values, metas)

    def take_activations(self, stage: int, microbatch: int, signature: Hashable) -> list[Tensor]:
        """Return the inputs of a stage, as leaves of its graph."""
        action = Action(stage - 1, "F", microbatch)
        sender = self._rank_of[stage - 1]
        if sender == self._group.rank:
            locals_ = self._own.pop(action)
        else:
            locals_ = self._take(sender, action)
        metas = self._table.metas[stage, signature]
        return [meta.wrap(x, self._mesh) for meta, x in zip(metas, locals_, strict=True)]

    def put_gradients(self, action: Action, grads: Sequence[Tensor]) -> None:
        """Pass on the gradients of a stage's inputs."""
        receiver = self._rank_of[action.stage - 1]
        if receiver == self._group.rank:
            self._own[action] = list(grads)
        else:
            self._outboxes[receiver].send_gradients(action, grads)

    def take_gradients(self, stage: int, microbatch: int) -> list[Tensor]:
        """Return the gradients of a stage's outputs, of those that require them."""
        action = Action(stage + 1, "I", microbatch)
        sender = self._rank_of[stage + 1]
        if sender == self._group.rank:
            return self._own.pop(action)
        return self._take(sender, action)

    def _take(self, sender: int, action: Action) -> list[Tensor]:
        """Receive a result, and free what its sender had used before."""
        arrived = self._inboxes[sender].take(action)
        outbox = self._outboxes.get(sender)
        if outbox is not None:
            places = self._places[sender]
            outbox.release(lambda sent: places[_user_of(sent)] < places[action])
        return arrived

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for outbox in self._outboxes.values():
            outbox.release(lambda _: True)


def _places(row: Row) -> dict[Action, int]:
    actions = [action for action in actions_in(row) if action.kind != "W"]
    return {action.result: place for place, action in enumerate(actions)}


def _user_of(result: Action) -> Action:
    """Return what another stage computes from a result, named as a result."""
    step = 1 if result.kind == "F" else -1
    return result._replace(stage=result.stage + step)
