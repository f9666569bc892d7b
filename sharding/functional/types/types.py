"""Types of values inside a mapped function.

Along each manual axis a value varies, is replicated, or is pending.

    x: S over dp, R over tp    w: R     x @ w: S over dp (an operator with a varying operand varies)

A type lists the axes over which a value varies and those over which it is pending; over all others
it is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ....mesh.comm.call_site import user_line


@dataclass(frozen=True, eq=False)
class Type:
    """The axes over which a value varies or is pending.

    Types are interned: equal ones are one object.

    Attributes:
        varying: the axes along which ranks have different data (S).
        pending: the axes along which the value is the sum over the ranks (U).
    """

    varying: frozenset[str]
    pending: frozenset[str]
    _joins: dict[Type, Type] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(varying: frozenset[str], pending: frozenset[str] = frozenset()) -> Type:
        """Return the type that varies over `varying` and is pending over `pending`."""
        key = (varying, pending)
        interned = _types.get(key)
        return interned if interned is not None else _types.setdefault(key, Type(*key))

    def join(self, other: Type) -> Type:
        """Return the type of a value computed from both.

        Pending axes need a check of the operator as well (`pending.py`).
        """
        joined = self._joins.get(other)
        if joined is None:
            joined = self._joins[other] = Type.of(
                self.varying | other.varying, self.pending | other.pending
            )
        return joined

    def dual_over(self, names: frozenset[str]) -> Type:
        """Return the type of the gradient: S <-> S, R <-> U."""
        return Type.of(self.varying, names - self.varying - self.pending)

    def __str__(self) -> str:
        words = [f"varies over {_names(self.varying)}"] if self.varying else []
        words += [f"is pending over {_names(self.pending)}"] if self.pending else []
        return " and ".join(words) or "is replicated"


_types: dict[tuple[frozenset[str], frozenset[str]], Type] = {}
REPLICATED = Type.of(frozenset())


def _names(axes: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(axes)))


class TypeOrigin(NamedTuple):
    """Why and where a value varies or is pending.

    Attributes:
        cause: the argument or the operator.
        location: "file:line"; empty for an argument.
        since: the origin of the operand, if it was an argument.
    """

    cause: str
    location: str = ""
    since: str = ""

    def __str__(self) -> str:
        return (
            self.cause
            + (f" at {self.location}" if self.location else "")
            + (f", of {self.since}" if self.since else "")
        )


class Tag:
    """The type of a value and its origins.

    Attributes:
        type: its type.
        origins: for each axis over which it is not replicated, why.
        owner: an object that identifies the checker that set the tag.
        is_final: whether the result of any operator on this value alone has the same tag: nothing
            is pending, and no origin is an argument, which the location of the first operator would
            replace.
        original: of a provisional tag: the tag itself. A result made without gradients may turn out
            to be that of a custom function.
    """

    __slots__ = ("_provisional", "is_final", "original", "origins", "owner", "type")

    def __init__(self, type_: Type, origins: dict[str, TypeOrigin], owner: object) -> None:
        self.type, self.origins, self.owner = type_, origins, owner
        self.is_final = not type_.pending and all(origin.location for origin in origins.values())
        self.original: Tag | None = None
        self._provisional: Tag | None = None

    @property
    def provisional(self) -> Tag:
        """The same tag without an owner, so that the checker examines the tensor again."""
        if self._provisional is None:
            self._provisional = Tag(self.type, self.origins, None)
            self._provisional.original = self
        return self._provisional

    def since(self, axes: Iterable[str]) -> str:
        """Return where the value became varying or pending over the first of these axes.

        For a message.
        """
        with_origin = [axis for axis in sorted(axes) if axis in self.origins]
        return f" since {self.origins[with_origin[0]]}" if with_origin else ""

    def with_type(self, type_: Type) -> Tag:
        """Return the tag with another type, with the origins of the axes that it still has."""
        axes = type_.varying | type_.pending
        return Tag(
            type_,
            {axis: origin for axis, origin in self.origins.items() if axis in axes},
            self.owner,
        )


class ShardingTypeError(RuntimeError):
    """A value varies where it must be the same on every rank, or is pending where it must be whole.

    Not a `TypeError`, which Python's `*` and `@` would turn into "unsupported operand".
    """


def user_location() -> str:
    """Return the user's file and line."""
    return "{}:{}".format(*user_line())
