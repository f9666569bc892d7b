"""Closed forms for the communication of a step: calls and bytes that a rank receives.

`make_flat_layout` gives the split of a unit's buffer; the rest is arithmetic on the shapes of the
model and the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardmesh.sharding.parallel.data.storage.flat_layout import FlatLayout, make_flat_layout
from tests.sharding.parallel.compositions import Composition, S, Used
from tests.sharding.parallel.models import Config


@dataclass(frozen=True)
class Parameter:
    """A parameter as used by a rank of tensor parallelism.

    Attributes:
        shape: the most that a rank of tp holds; `own_shape` what this one does.
        copied: whether all ranks of tp hold all of it.
    """

    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    copied: bool

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        return math.prod(self.shape[1:])


SHAPE = 29  # bytes of a pickled tuple of the number of a call and one length, both below 256


def chunk(size: int, parts: int, part: int) -> int:
    """Return the length of a part from `torch.chunk`."""
    most = -(-size // parts)
    return max(0, min(most, size - part * most))


class StepCosts:
    """The costs of a composition on one rank."""

    def __init__(
        self,
        case: Composition,
        coordinate: dict[str, int],
        param_bytes: int = 8,
        sum_bytes: int = 8,
    ) -> None:
        self.case = case
        self.coordinate = coordinate
        self.param_bytes = param_bytes
        self.sum_bytes = sum_bytes
        self.tp = case.sizes.get("tp", 1)
        self.units = list(self._units(case.config))

    # -- shapes ------------------------------------------------------------------------------------

    def _units(self, c: Config) -> Iterator[list[Parameter]]:
        """Return the parameters of the outermost unit and of each block, in module order."""
        table = [self._split((c.vocabulary, c.d), 0)]
        yield [*table, self._copied(c.d), *([] if c.tied else table)]
        for _ in range(c.layers):
            yield list(self._block(c))

    def _block(self, c: Config) -> Iterator[Parameter]:
        yield self._copied(c.d)
        for heads in (c.heads, c.kv_heads or c.heads, c.kv_heads or c.heads):
            yield self._split((heads * c.head_dim, c.d), 0, c.head_dim)
            yield from [self._split((heads * c.head_dim,), 0, c.head_dim)] * c.bias
        yield self._split((c.d, c.heads * c.head_dim), 1, c.head_dim)
        yield from [self._copied(c.d)] * (1 + c.bias)
        for _ in range(2):
            yield self._split((c.f, c.d), 0)
            yield from [self._split((c.f,), 0)] * c.bias
        yield self._split((c.d, c.f), 1)
        yield from [self._copied(c.d)] * c.bias

    def _split(self, shape: tuple[int, ...], dim: int, piece: int = 1) -> Parameter:
        most, own_shape = list(shape), list(shape)
        most[dim] = piece * chunk(shape[dim] // piece, self.tp, 0)
        own_shape[dim] = piece * chunk(shape[dim] // piece, self.tp, self.coordinate.get("tp", 0))
        return Parameter(tuple(most), tuple(own_shape), False)

    def _copied(self, size: int) -> Parameter:
        return Parameter((size,), (size,), True)

    # -- axes --------------------------------------------------------------------------------------

    def size(self, *axes: str) -> int:
        return math.prod(self.case.sizes[axis] for axis in axes)

    @property
    def shards(self) -> tuple[str, ...]:
        """Return the axes over which the optimizer's state is sharded, major to minor."""
        data = self.case.data
        return {"ddp": (), "hsdp": data[-1:], "hybrid": (*data[-1:], *data[:-1])}.get(
            self.case.form, data
        )

    @property
    def part(self) -> int:
        place = 0
        for axis in self.shards:
            place = place * self.case.sizes[axis] + self.coordinate[axis]
        return place

    def layouts(self) -> list[FlatLayout]:
        """Return the split of each unit's buffer; less than a row is lost per boundary."""
        n, shapes = self.size(*self.shards), []
        for unit in self.units:
            lengths, rows = tuple(p.length for p in unit), tuple(p.row for p in unit)
            shapes.append(make_flat_layout(lengths, rows, n))
            assert sum(lengths) <= n * shapes[-1].piece < sum(lengths) + (n + 1) * max(rows)
        return shapes

    # -- data parallelism --------------------------------------------------------------------------

    def gathered(self, micro_batches: int = 1) -> list[int]:
        """Return the bytes of each all_gather of parameters: all once per step, or of blocks twice
        per microbatch.
        """
        n = self.size(*self.shards)
        pieces = [layout.piece * self.param_bytes for layout in self.layouts()]
        form, root, blocks = self.case.form, pieces[0], pieces[1:]
        if form in ("zero1", "zero2"):
            return [(n - 1) * piece for piece in pieces]
        if form == "ddp":
            return []
        # Over so many ranks parameters stay split between steps.
        parts = self.size(self.shards[0]) if form == "hybrid" else n
        once = [(n // parts - 1) * piece for piece in pieces]
        return once + micro_batches * [
            (parts - 1) * (n // parts) * piece for piece in (root, *blocks, *blocks)
        ]

    def summed(self, micro_batches: int = 1) -> list[int]:
        """Return the bytes of each reduce_scatter of gradients."""
        times = 1 if self.case.form == "zero1" else micro_batches
        n = self.size(*self.shards)
        return times * [(n - 1) * layout.piece * self.sum_bytes for layout in self.layouts()]

    def reduced(self) -> Iterator[tuple[int, int]]:
        """Return the bytes of the all_reduces of stored gradients, by unit: one per number of
        copies along other axes.

        With DDP the blocks, which are small, are summed together, where one number of copies is all
        that they have.
        """
        outermost, *blocks = self._held()
        if (
            self.case.form == "ddp"
            and len(kinds := {copies for block in blocks for copies in block}) == 1
        ):
            blocks = [{copies: sum(block[copies] for block in blocks) for copies in kinds}]
        for found in (outermost, *blocks):
            yield from (
                (copies, 2 * (copies - 1) * held // copies) for copies, held in found.items()
            )

    def _held(self) -> Iterator[dict[int, int]]:
        """Return the bytes of stored gradients per unit, by their number of copies if there are
        several.
        """
        others = self.size(*[axis for axis in self.case.data if axis not in self.shards])
        for unit, layout in zip(self.units, self.layouts(), strict=True):
            use = dict[int, int]()
            for i, p in enumerate(unit):
                copies = others * (self.tp if p.copied else 1)
                first, last = layout.rows_of(i, self.part, p.own_shape[0])
                use[copies] = use.get(copies, 0) + (last - first) * math.prod(p.own_shape[1:]) * 8
            yield {copies: held for copies, held in use.items() if copies > 1}

    # -- tensor parallelism, of sharded inputs -----------------------------------------------------

    def tokens_here(self) -> int:
        """Return the number of tokens in this rank's part of the batch."""
        b = self.case.b
        for axis in self.case.data:
            b = chunk(b, self.case.sizes[axis], self.coordinate[axis])
        return b * S

    def activations(self) -> Used:
        """Return sums: forward of the embedding, attention and the MLP; backward of the inputs of
        attention, the MLP and the head.
        """
        times, whole = 2 * self.case.config.layers + 1, self.tokens_here() * self.case.config.d * 8
        if self.case.tp == "tp":
            return {"all_reduce": (2 * times, 2 * times * 2 * (self.tp - 1) * whole // self.tp)}
        # Uneven: exchanges take the places of both collectives.
        own_whole = whole // S * chunk(S, self.tp, self.coordinate["tp"])
        return {
            "all_to_all": (4 * times, 2 * times * (whole - own_whole + (self.tp - 1) * own_whole))
        }

    def with_torch_styles(self, first: bool) -> Used:
        """Every module of the plan takes and returns plain tensors.

        tp: forward, sums of the embedding, o_proj and down_proj, and the logits gathered. Backward,
            sums for all that takes a whole input. In the first step, for each replicated output 19
            numbers to see that replicas agree.
        sp: the sums are scattered along the sequence, and gathered before attention, the MLP and
            the head, when ranks have told each other how long their parts are, which are uneven;
            backward the other way.
        """
        n = self.tp
        layers = self.case.config.layers
        whole = self.tokens_here() * self.case.config.d * 8
        sums = 2 * layers + 1
        outputs = sums + 1 if self.case.tp == "tp" else 1
        checks = {"all_reduce": (outputs, outputs * 19 * _scalar(n))} if first else {}
        if self.case.tp == "tp":
            times = sums + (5 * layers + 1)
            return plus(
                self._logits(), {"all_reduce": (times, times * 2 * (n - 1) * whole // n)}, checks
            )
        lengths = {"all_gather_object": (sums, sums * (n - 1) * SHAPE)}
        return plus(self._logits(), self.activations(), lengths, checks)

    def _logits(self) -> Used:
        """Return the cost of gathered logits, by an all_to_all for uneven parts; each rank has
        their full gradient.
        """
        n, tokens, size = self.tp, self.tokens_here() * 8, self.case.config.vocabulary
        if size % n == 0:
            return {"all_gather": (1, (n - 1) * tokens * size // n)}
        return {"all_to_all": (1, (size - chunk(size, n, self.coordinate["tp"])) * tokens)}

    def loss(self) -> Used:
        """Return the cost of the loss on sharded logits per token: a maximum and a sum, and a
        gradient backward; the rest are scalars.
        """
        used: Used = {}
        ranks = self.size(*self.case.data)
        if self.tp > 1:
            per_token = 2 * (self.tp - 1) * self.tokens_here() * 8 // self.tp
            scalars = 2 if ranks == 1 else 0  # else reduced with the sum over the data axes
            used = {"all_reduce": (3 + scalars, 3 * per_token + scalars * _scalar(self.tp))}
        return plus(used, {"all_reduce": (int(ranks > 1), _scalar(ranks))})


def _scalar(ranks: int) -> int:
    return 2 * (ranks - 1) * 8 // ranks


def plus(*all_used: Used) -> Used:
    """Return the sum; collectives that move nothing are not counted."""
    total: Used = {}
    for one in all_used:
        for op, (calls, received) in one.items():
            before = total.get(op, (0, 0))
            total[op] = before[0] + calls, before[1] + received
    return {op: both for op, both in total.items() if both[0]}


def collective(op: str, received: list[int]) -> Used:
    """Return calls that receive this many bytes each; over one rank there are none."""
    return {op: (sum(one > 0 for one in received), sum(received))}


def of_data(costs: StepCosts, micro_batches: int = 0) -> Used:
    """Return the communication of data parallelism in a step; the reduction at the end of
    `accumulate_grads` is one call.
    """
    copies: dict[int, list[int]] = {}
    for number, received in costs.reduced():
        copies.setdefault(number, []).append(received)
    reduced = (
        [sum(one) for one in copies.values()]
        if micro_batches
        else [x for one in copies.values() for x in one]
    )
    return plus(
        collective("all_gather", costs.gathered(micro_batches or 1)),
        collective("reduce_scatter", costs.summed(micro_batches or 1)),
        {"all_reduce": (len(reduced), sum(reduced))},
    )


def expected(costs: StepCosts) -> Used:
    """Return the communication of a step with sharded inputs."""
    return plus(of_data(costs), costs.activations() if costs.tp > 1 else {}, costs.loss())


def expected_of_plain(costs: StepCosts, first: bool = False) -> Used:
    """Return the communication of a step with plain inputs, where each rank has its own loss."""
    return plus(of_data(costs), costs.with_torch_styles(first) if costs.tp > 1 else {})
