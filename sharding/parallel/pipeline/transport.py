"""Transport: how activations and gradients get from stage to stage.

Each rank knows from the table in which order every other rank computes what it needs. Between two
ranks, in one direction, messages have the order in which the sender computes them. Receives are
posted ahead in that order, and waited for where their value is used. A send's buffer is freed once
a later message from the receiver arrives: its row sends that message after using this one.

    rank 0    F0 -- send 0    F1 -- send 1    F2 -- send 2        computes on
    rank 1    post 0    wait 0, post 1, F0    wait 1, post 2, F1

What moves is the local part of each tensor. The first message of a kind (a stage, and the shapes of
a microbatch) is preceded by a header, which says what the tensors are; later ones are not.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ....mesh.comm.channel import Channel, connected_channels
from ....mesh.comm.null import NullWorld
from ....mesh.comm.recording.recorder import CommTag
from ....mesh.comm.work import Work
from ....mesh.comm.world import World
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.convert import device_put
from ...tensor.sharded_tensor import ShardedTensor, local_of
from .actions import Action, Row, Rows, actions_in, stages_of
from .places import Places
from .stage_meshes import WHOLE, Route, StageMeshes

_HEADER_SIZE = CommTag("pipeline: size of the description of activations")
_HEADER = CommTag("pipeline: description of activations")
_AHEAD = 1  # receives that are posted before the message that is used now


@dataclass(frozen=True)
class Sharding:
    """Of a sharded tensor: the axes of its mesh, its spec, and its global shape."""

    axes: tuple[str, ...]
    spec: P
    shape: tuple[int, ...]

    @staticmethod
    def of(value: Tensor) -> Sharding | None:
        """Return the sharding of a value; None for a plain tensor."""
        if not isinstance(value, ShardedTensor):
            return None
        return Sharding(tuple(value.mesh.axis_names), value.spec, tuple(value.shape))


@dataclass(frozen=True)
class ValueMeta:
    """What a stage needs to know of a tensor before it arrives.

    Attributes:
        shape: of what is sent, the local part; between stages with meshes of different shapes, the
            whole value.
        dtype: its dtype.
        requires_grad: whether a gradient goes back.
        sharding: as the stage before returned it; None for a plain tensor.
        batch_dim: the dim that is split over data ranks, where stages have meshes of different
            shapes; None if there is none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sharding: Sharding | None = None
    batch_dim: int | None = None

    @staticmethod
    def of(value: Tensor, sharding: Sharding | None, batch_dim: int | None = None) -> ValueMeta:
        shape = tuple(local_of(value).shape)
        return ValueMeta(shape, value.dtype, value.requires_grad, sharding, batch_dim)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.sharding is None:
            return f"{dtype}{list(self.shape)}"
        return f"{dtype}{list(self.sharding.shape)} @ {self.sharding.spec}"

    def empty(self, device: torch.device) -> Tensor:
        """Return a buffer for the local part."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def with_rows(self, numerator: int, denominator: int) -> ValueMeta:
        """Return the same value where a rank has another share of its rows."""
        if self.batch_dim is None:
            return self
        shape = list(self.shape)
        shape[self.batch_dim] = shape[self.batch_dim] * numerator // denominator
        return replace(self, shape=tuple(shape))

    def on_route(self, route: Route) -> ValueMeta | None:
        """Return what goes along a route of this value; None for nothing."""
        if self.batch_dim is None:
            return self if route.whole else None
        if route.row_range is None:
            return None
        return self.with_rows(route.row_range.stop - route.row_range.start, route.row_range.of)

    def take(self, x: Tensor, route: Route) -> Tensor | None:
        """Return the part of a local tensor that goes along a route; None for nothing."""
        if self.batch_dim is None:
            return x if route.whole else None
        return None if route.row_range is None else route.row_range.take(x, self.batch_dim)

    def leaf(self, local: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """Return the value with this local part, a leaf of the stage's graph.

        Args:
            mesh: the axes of a sharded value are this mesh's; None for the value as it is sent,
                which is plain.
        """
        local.requires_grad_(self.requires_grad)
        if self.sharding is None or mesh is None:
            return local
        sharding = self.sharding
        layout = Layout.of(mesh[sharding.axes], sharding.spec, sharding.shape, self.dtype)
        return ShardedTensor._make_guarded(local, layout)

    def shard_on(self, value: Tensor, mesh: DeviceMesh, data_axes: Sequence[str]) -> Tensor:
        """Return a whole value with its spec on the mesh of another stage.

        It is split over the axes that both meshes have; without any, it stays plain.

        Args:
            value: the rows of this rank.
            mesh: of its stage.
            data_axes: over which rows are split; they split nothing again.

        Communication: none; backward: an all_gather of the gradient of each part.
        """
        if self.sharding is None:
            return value
        axes = set(mesh.axis_names) - set(data_axes)
        names = tuple(name for name in self.sharding.axes if name in axes)
        if not names:
            return value
        dims = [[name for name in axes if name in names] for axes in self.sharding.spec.dims]
        return device_put(value, mesh[names], P(*dims), src_data_rank=None)


Metas = tuple[ValueMeta, ...]


def transfers(rows: Rows) -> dict[tuple[int, int], list[Action]]:
    """Return the results that move between ranks, by sender and receiver.

    Ranks are places along the axis. Results are in the order in which the sender computes them.

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


class AssumedMetas:
    """What enters stages in a world whose other ranks send no headers (`null_world`).

    Stages are taken to pass on what the first one does; `StageRun` compares the shapes.

    Attributes:
        metas: by the signature of a microbatch. A rank that has the first stage fills it; for one
            that has not, copy it from the world of such a rank.
    """

    def __init__(self, world: World) -> None:
        self.metas: dict[Hashable, Metas] = {}


class MetaTable:
    """What is known of the values that enter each stage, by stage and signature of a microbatch.

    Args:
        world: this rank's.

    Attributes:
        metas: both ends of a channel fill it, the sender from the values, the receiver from the
            header.
        assumed: in a world whose other ranks send no headers; None in others.
    """

    def __init__(self, world: World) -> None:
        self.metas: dict[tuple[int, Hashable], Metas] = {}
        is_alone = isinstance(world, NullWorld)
        self.assumed = world.state(AssumedMetas) if is_alone else None

    def metas_of_gradients(self, stage: int, signature: Hashable) -> Metas | None:
        """Return what goes back from a stage; None if it is not known yet."""
        metas = self.metas.get((stage, signature))
        return None if metas is None else _requiring_gradients(metas)

    def add(
        self,
        stage: int,
        signature: Hashable,
        values: Sequence[Tensor],
        shardings: Sequence[Sharding | None],
        batch_dims: Sequence[int | None] | None,
    ) -> Metas:
        """Enter what a stage gets from the one before.

        Args:
            values: as they are sent.
            shardings: of the values that the stage before returned.
            batch_dims: the dim of each value that is split over data ranks; None for no value.

        Raises:
            RuntimeError: the values differ in more than numbers from those of an earlier microbatch
                with the same signature.
        """
        dims = [None] * len(values) if batch_dims is None else batch_dims
        metas = tuple(map(ValueMeta.of, values, shardings, dims))
        known = self.metas.setdefault((stage, signature), metas)
        if known != metas:
            raise RuntimeError(
                f"pipeline: stage {stage} gets {', '.join(map(str, metas))} where it got "
                f"{', '.join(map(str, known))} for inputs of the same shapes. What is passed "
                "between stages must follow from the shapes of the inputs: pad what does not."
            )
        if self.assumed is not None:
            self.assumed.metas.setdefault(signature, metas)
        return metas

    def assume(self, stage: int, signature: Hashable) -> Metas:
        """Return what enters a stage if no other rank says it.

        Raises:
            RuntimeError: it is not known what stage 0 passes on.
        """
        metas = None if self.assumed is None else self.assumed.metas.get(signature)
        if metas is None:
            raise RuntimeError(
                f"pipeline: in null_world no other rank says what enters stage {stage}; run the "
                "rank that has stage 0"
            )
        return metas


class Outbox:
    """The messages from this rank to another one.

    Args:
        channel: to the receiver.
        route: what goes to it.
    """

    def __init__(self, channel: Channel, route: Route) -> None:
        self._channel = channel
        self._route = route
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
        self._send(action, [local_of(value).detach() for value in values], metas)

    def send_gradients(self, action: Action, grads: Sequence[Tensor], metas: Metas) -> None:
        """Send the gradients of a stage's inputs."""
        self._send(action, grads, metas)

    def _send(self, action: Action, locals_: Sequence[Tensor], metas: Metas) -> None:
        for meta, x in zip(metas, locals_, strict=True):
            part = meta.take(x, self._route)
            if part is not None:
                self._start(action, part, tag_of(action))

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
        route: what comes from the sender.
        shares: into how many parts rows are split on the sender's side, and on this one.
    """

    def __init__(
        self,
        channel: Channel,
        device: torch.device,
        table: MetaTable,
        route: Route,
        shares: tuple[int, int],
    ) -> None:
        self._channel = channel
        self._route = route
        self._shares = shares
        self._device = device
        self._table = table
        self._described: set[tuple[int, Hashable]] = set()
        self._to_post: deque[Action] = deque()
        self._posted: dict[Action, list[tuple[Tensor, Work] | None]] = {}
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

    def take(self, action: Action) -> list[Tensor | None]:
        """Wait for a result; return the part of each of its tensors that this sender has.

        None where it sends nothing of a tensor.
        """
        while action not in self._posted:
            metas = self._known_metas(self._to_post[0])
            self._post(self._receive_header(self._to_post[0]) if metas is None else metas)
        arrived: list[Tensor | None] = []
        for posted in self._posted.pop(action):
            if posted is not None:
                posted[1].wait()
            arrived.append(None if posted is None else posted[0])
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
        return self._table.metas_of_gradients(*key)

    def _receive_header(self, action: Action) -> Metas:
        """Receive the header of the next message, which has activations."""
        stage, signature = self._key(action)
        if self._table.assumed is not None:
            of_sender = self._table.assume(stage, signature)
        else:
            of_sender = self._received_metas()
        metas = tuple(meta.with_rows(*self._shares) for meta in of_sender)
        self._described.add((stage, signature))
        self._table.metas[stage, signature] = metas
        return metas

    def _received_metas(self) -> Metas:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self._channel.receive(size, _HEADER_SIZE).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._channel.receive(data, _HEADER).wait()
        metas: Metas = pickle.loads(data.cpu().numpy().tobytes())
        return metas

    def _post(self, metas: Metas) -> None:
        """Post the receives of the next message."""
        action = self._to_post.popleft()
        tag = tag_of(action)
        posted: list[tuple[Tensor, Work] | None] = []
        for meta in metas:
            part = meta.on_route(self._route)
            buffer = None if part is None else part.empty(self._device)
            posted.append(None if buffer is None else (buffer, self._channel.receive(buffer, tag)))
        self._posted[action] = posted


def tag_of(action: Action) -> CommTag:
    """Return what a message is for, as the monitor and errors name it."""
    if action.kind == "F":
        return CommTag.of(
            f"pipeline: activations into stage {action.stage + 1}, microbatch {action.microbatch}"
        )
    return CommTag.of(
        f"pipeline: gradients into stage {action.stage - 1}, microbatch {action.microbatch}"
    )


BatchDimsOf: TypeAlias = Callable[[int, Hashable], Sequence[int | None]]


class Transport:
    """All messages of one rank of a pipeline.

    Args:
        places: of the pipeline.
        mesh: the pipeline's mesh.
        stage_meshes: where stages have meshes of different shapes; None where a rank exchanges
            its parts of values with the ranks at its position in other stages.

    Communication: see `begin`.
    """

    def __init__(
        self, places: Places, mesh: DeviceMesh, stage_meshes: StageMeshes | None = None
    ) -> None:
        self._places = places
        self._mesh = mesh
        self._stage_meshes = stage_meshes
        self._table = MetaTable(mesh.world)
        # by the other rank
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._routes_between: dict[tuple[int, int], Sequence[Route]] = {}
        self._schedule_rows: Rows | None = None  # of the last step; what follows from them:
        self._moved: dict[tuple[int, int], list[Action]] = {}
        self._place_of: dict[int, int] = {}  # by stage
        # by place: the position in its row of the action that computes a result
        self._positions: list[dict[Action, int]] = []
        # Results for stages of this rank: never sent.
        self._own: dict[Action, list[Tensor]] = {}
        self._signatures: Sequence[Hashable] = ()
        self._batch_dims_of: BatchDimsOf | None = None

    def begin(
        self,
        schedule_rows: Rows,
        signatures: Sequence[Hashable],
        batch_dims_of: BatchDimsOf | None = None,
    ) -> None:
        """Begin a step: connect to ranks that are new, and post the first receives.

        Args:
            schedule_rows: by place along the axis.
            signatures: of this rank's microbatches.
            batch_dims_of: with `stage_meshes`: for a stage and a signature, the dim of each value
                that enters the stage that is split over data ranks, None where there is none.

        Communication: one byte for each channel that is new.
        """
        place = self._places.own
        if schedule_rows is not self._schedule_rows:
            self._moved = transfers(schedule_rows)
            self._place_of = stages_of(schedule_rows)
            self._positions = [_positions(row) for row in schedule_rows]
            self._connect(self._moved)
            self._schedule_rows = schedule_rows
        self._own = {}
        self._signatures = signatures
        self._batch_dims_of = batch_dims_of
        for (source, destination), order in self._moved.items():
            if destination == place:
                for route in self._routes(source, place):
                    self._inboxes[route.peer].begin(order, signatures)

    def _routes(self, source: int, destination: int) -> Sequence[Route]:
        """Return what this rank exchanges in one direction between two places, one of them its own.

        They are the same for all messages.
        """
        places = source, destination
        routes = self._routes_between.get(places)
        if routes is None:
            if self._stage_meshes is not None:
                routes = self._stage_meshes.routes(source, destination)
            else:
                other = destination if source == self._places.own else source
                routes = [Route(self._places.counterpart(other), WHOLE, True)]
            self._routes_between[places] = routes
        return routes

    def _shares(self, source: int, destination: int) -> tuple[int, int]:
        if self._stage_meshes is None:
            return 1, 1
        return self._stage_meshes.data_size(source), self._stage_meshes.data_size(destination)

    def _connect(self, moved: Iterable[tuple[int, int]]) -> None:
        place, own = self._places.own, self._places.rank
        outboxes: dict[int, Route] = {}
        inboxes: dict[int, tuple[Route, tuple[int, int]]] = {}
        for source, destination in moved:
            if source == place:
                outboxes |= {route.peer: route for route in self._routes(place, destination)}
            if destination == place:
                shares = self._shares(source, destination)
                routes = self._routes(source, place)
                inboxes |= {route.peer: (route, shares) for route in routes}
        pairs = [(own, peer) for peer in outboxes if peer not in self._outboxes]
        pairs += [(peer, own) for peer in inboxes if peer not in self._inboxes]
        channels = connected_channels(self._mesh.world, pairs, self._mesh.device)
        for (source, destination), channel in channels.items():
            if source == own:
                self._outboxes[destination] = Outbox(channel, outboxes[destination])
            else:
                route, shares = inboxes[source]
                self._inboxes[source] = Inbox(
                    channel, self._mesh.device, self._table, route, shares
                )

    def put_activations(
        self, action: Action, signature: Hashable, values: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Pass on the output of a stage; return the tensors whose gradients come back.

        Raises:
            RuntimeError: values differ from those of an earlier microbatch in more than numbers;
                or, between stages with meshes of different shapes, a value whose gradient would
                have to be summed over data ranks, or that is sharded over these.

        Communication: messages that are not waited for; between stages with meshes of different
            shapes, an all_gather of each sharded value.
        """
        stage = action.stage + 1
        receiver = self._place_of[stage]
        shardings = [Sharding.of(value) for value in values]
        if self._between_meshes(receiver):
            values = [x.full_tensor() if isinstance(x, ShardedTensor) else x for x in values]
        dims_of = self._batch_dims_of
        batch_dims = None if dims_of is None else dims_of(stage, signature)
        metas = self._table.add(stage, signature, values, shardings, batch_dims)
        if receiver == self._places.own:
            self._own[action] = [local_of(value).detach() for value in values]
            return values
        if self._stage_meshes is not None:
            self._stage_meshes.check_values(metas, self._places.own, receiver, stage)
        for route in self._routes(self._places.own, receiver):
            self._outboxes[route.peer].send_activations(action, signature, values, metas)
        return values

    def take_activations(
        self, stage: int, microbatch: int, signature: Hashable
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs of a stage, as leaves of its graph, and as the stage takes them.

        Both are the same but for sharded values between stages with meshes of different shapes.
        """
        action = Action(stage - 1, "F", microbatch)
        sender = self._place_of[stage - 1]
        if sender == self._places.own:
            locals_ = self._own.pop(action)
        else:
            parts = self._take(sender, action)
            locals_ = self._assemble(sender, parts, self._table.metas[stage, signature])
        metas = self._table.metas[stage, signature]
        mesh = self._mesh if self._stage_meshes is None else self._stage_meshes.mesh
        if self._stage_meshes is None or not self._between_meshes(sender):
            leaves = [meta.leaf(x, mesh) for meta, x in zip(metas, locals_, strict=True)]
            return leaves, leaves
        data_axes = self._stage_meshes.data_axes
        leaves = [meta.leaf(x, None) for meta, x in zip(metas, locals_, strict=True)]
        inputs = [meta.shard_on(x, mesh, data_axes) for meta, x in zip(metas, leaves, strict=True)]
        return leaves, inputs

    def _between_meshes(self, place: int) -> bool:
        """Return whether the stages of another place have a mesh of their own."""
        return self._stage_meshes is not None and place != self._places.own

    def put_gradients(self, action: Action, grads: Sequence[Tensor]) -> None:
        """Pass on the gradients of a stage's inputs."""
        receiver = self._place_of[action.stage - 1]
        if receiver == self._places.own:
            self._own[action] = list(grads)
            return
        metas = self._metas_of_gradients(action)
        for route in self._routes(self._places.own, receiver):
            self._outboxes[route.peer].send_gradients(action, grads, metas)

    def take_gradients(self, stage: int, microbatch: int) -> list[Tensor]:
        """Return the gradients of a stage's outputs, of those that require them."""
        action = Action(stage + 1, "I", microbatch)
        sender = self._place_of[stage + 1]
        if sender == self._places.own:
            return self._own.pop(action)
        parts = self._take(sender, action)
        grads = self._assemble(sender, parts, self._metas_of_gradients(action))
        theirs, own = self._shares(sender, self._places.own)
        if theirs != own:  # a loss is larger by the data ranks over which its stage averages
            grads = [grad.mul_(own / theirs) for grad in grads]
        return grads

    def _metas_of_gradients(self, action: Action) -> Metas:
        signature = self._signatures[action.microbatch]
        # known here, since the activations went the other way
        return _requiring_gradients(self._table.metas[action.stage, signature])

    def _take(self, sender: int, action: Action) -> list[list[Tensor | None]]:
        """Receive a result, in the order of the routes, and free what that place had used.

        All ranks of a place run one row, so a message from one of them tells of all, also of those
        that send nothing to this rank.
        """
        positions = self._positions[sender]
        own = self._places.own
        parts = [self._inboxes[route.peer].take(action) for route in self._routes(sender, own)]
        for route in self._routes(own, sender):
            outbox = self._outboxes.get(route.peer)
            if outbox is not None:
                outbox.release(lambda sent: positions[_user_of(sent)] < positions[action])
        return parts

    def _assemble(
        self, sender: int, parts: list[list[Tensor | None]], metas: Metas
    ) -> list[Tensor]:
        """Return values from the parts that have come from several ranks."""
        routes = self._routes(sender, self._places.own)
        values: list[Tensor] = []
        for number, meta in enumerate(metas):
            own = [(route, of[number]) for route, of in zip(routes, parts, strict=True)]
            arrived = [(route, x) for route, x in own if x is not None]
            if len(arrived) == 1:
                values.append(arrived[0][1])
                continue
            value = meta.empty(self._mesh.device)
            for route, x in arrived:
                part = meta.take(value, route)
                if part is not None:
                    part.copy_(x)
            values.append(value)
        return values

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for outbox in self._outboxes.values():
            outbox.release(lambda _: True)


def _requiring_gradients(metas: Metas) -> Metas:
    return tuple(meta for meta in metas if meta.requires_grad)


def _positions(row: Row) -> dict[Action, int]:
    actions = [action for action in actions_in(row) if action.kind != "W"]
    return {action.result: position for position, action in enumerate(actions)}


def _user_of(result: Action) -> Action:
    """Return what another stage computes from a result, named as a result."""
    step = 1 if result.kind == "F" else -1
    return result._replace(stage=result.stage + step)
