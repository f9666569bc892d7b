"""Types of values inside a mapped function: along each manual axis a value varies, is replicated, or is pending.

    x: S over dp, R over tp        w: R        x @ w: S over dp (whoever meets a varying value varies)

A type says over which axes a value varies and over which it is pending; over all others it is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ....mesh.comm.call_site import user_line


@dataclass(frozen=True, eq=False)
class Type:
    """Interned: equal types are one object.

    Attributes:
        varying: the axes along which ranks have data of their own (S).
        pending: the axes along which the value is the sum over the ranks (U).
    """

    varying: frozenset[str]
    pending: frozenset[str]
    _joins: dict[Type, Type] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(varying: frozenset[str], pending: frozenset[str] = frozenset()) -> Type:
        """The type that varies over these axes and is pending over those."""
        key = (varying, pending)
        found = _types.get(key)
        return found if found is not None else _types.setdefault(key, Type(*key))

    def join(self, other: Type) -> Type:
        """The type of what is made of both; pending axes are not joined, but looked at one by one (`pending.py`)."""
        found = self._joins.get(other)
        if found is None:
            found = self._joins[other] = Type.of(self.varying | other.varying, self.pending | other.pending)
        return found

    def dual_over(self, names: frozenset[str]) -> Type:
        """The type of the gradient: S <-> S, R <-> U."""
        return Type.of(self.varying, names - self.varying - self.pending)

    def __str__(self) -> str:
        words = [f"varies over {_names(self.varying)}"] if self.varying else []
        words += [f"is pending over {_names(self.pending)}"] if self.pending else []
        return " and ".join(words) or "is replicated"


_types: dict[tuple[frozenset[str], frozenset[str]], Type] = {}
REPLICATED = Type.of(frozenset())


def _names(axes: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(axes)))


class Origin(NamedTuple):
    """Where a value began to vary, or to be pending.

    Attributes:
        what: the argument or the operator.
        place: "file:line"; empty for an argument.
        since: what varied before, where it did.
    """

    what: str
    place: str = ""
    since: str = ""

    def __str__(self) -> str:
        return self.what + (f" at {self.place}" if self.place else "") + (f", of {self.since}" if self.since else "")


class Tag:
    """What is known of a value.

    Attributes:
        type: its type.
        origins: by axis, where it began not to be replicated.
        owner: who knows it.
        settled: whether what any operator makes of it alone is known by the same tag: nothing is pending, and no origin is an
            argument, whose place will be the first operator that takes it.
        kept: of a tag without owner: the tag itself. What is made without gradients may turn out to be the result of a custom function.
    """

    __slots__ = ("_loose", "kept", "origins", "owner", "settled", "type")

    def __init__(self, type_: Type, origins: dict[str, Origin], owner: object) -> None:
        self.type, self.origins, self.owner = type_, origins, owner
        self.settled = not type_.pending and all(origin.place for origin in origins.values())
        self.kept: Tag | None = None
        self._loose: Tag | None = None

    @property
    def loose(self) -> Tag:
        """The same without an owner, so that whoever meets it looks again."""
        if self._loose is None:
            self._loose = Tag(self.type, self.origins, None)
            self._loose.kept = self
        return self._loose

    def since(self, axes: Iterable[str]) -> str:
        """Where it began not to be replicated over the first of these axes over which it is not, for a message."""
        found = [axis for axis in sorted(axes) if axis in self.origins]
        return f" since {self.origins[found[0]]}" if found else ""

    def retyped(self, type_: Type) -> Tag:
        """The same of a value of another type, which is not replicated over no more axes."""
        kept = type_.varying | type_.pending
        return Tag(type_, {axis: origin for axis, origin in self.origins.items() if axis in kept}, self.owner)


class ShardingTypeError(RuntimeError):
    """A value varies where it must be the same on every rank, or is pending where it must be whole.

    Not a `TypeError`, which Python's `*` and `@` would turn into "unsupported operand".
    """


def place() -> str:
    """The user's file and line."""
    return "{}:{}".format(*user_line())
