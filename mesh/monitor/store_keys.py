"""StoreKeys: how the ranks of a job agree through its store.

Where there is no process group yet or none may be waited for.

    claim    the value of the first rank stands, and every rank takes it
    replace  the same for a value that was read before
    sign     each rank adds itself to a list; `signed` says who is on it
    set      what one rank says; `read` waits for it, `has` asks whether it is there

Every value that is read is checked, since everybody who reaches the store's port can write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .store_values import StoreValueError, bad_value, number, parsed, rank_list

T = TypeVar("T")
Parse = Callable[[str], T]


class StoreKeys:
    """The keys of a store below a prefix.

    Args:
        store: of torch.
        prefix: without a slash at the end.
        shown: the prefix in errors, where its parts are of no use to a reader.
    """

    def __init__(self, store: Any, prefix: str, shown: str = "") -> None:
        self._store, self._prefix, self._display_name = store, prefix, shown or prefix

    def over(self, store: Any) -> StoreKeys:
        """Return the same keys over another connection."""
        return StoreKeys(store, self._prefix, self._display_name)

    def clone(self) -> StoreKeys:
        """Return the same keys over a connection of their own."""
        return self.over(self._store.clone())

    def below(self, name: str, shown: str = "") -> StoreKeys:
        """Return the keys that begin with this name, which errors show as `shown`."""
        return StoreKeys(self._store, self._key(name), f"{self._display_name}/{shown or name}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _parse(self, name: str, value: bytes, parse: Parse[T]) -> T:
        return parsed(f"{self._display_name}/{name}", value, parse)

    def bad_value(self, name: str, value: object, why: str) -> StoreValueError:
        """Return the error for a value that no rank of this job has written."""
        return bad_value(f"{self._display_name}/{name}", value, why)

    def claim(self, name: str, value: str, parse: Parse[T]) -> T:
        """Write a value unless there is one; return the one that stands."""
        stands = self._store.compare_set(self._key(name), "", value)
        return self._parse(name, stands, parse)

    def replace(self, name: str, before: str, value: str) -> None:
        """Write a value in place of another one, "" for none; no-op if it is not there any more."""
        self._store.compare_set(self._key(name), before, value)

    def has(self, *names: str) -> bool:
        """Return whether all of these keys are there."""
        return self._store.check([self._key(name) for name in names])

    def set(self, name: str, value: str = "1") -> None:
        self._store.set(self._key(name), value)

    def append(self, name: str, text: str) -> None:
        self._store.append(self._key(name), text)

    def read(self, name: str, parse: Parse[T]) -> T:
        """Return the value of a key; wait for it if it is not there."""
        return self._parse(name, self._store.get(self._key(name)), parse)

    def read_lines(self, name: str, parse: Parse[T]) -> list[T]:
        """Return the lines that ranks have appended to a key."""
        lines = self._store.get(self._key(name)).splitlines()
        return [self._parse(name, line, parse) for line in lines]

    def read_all(self, names: Sequence[str], parse: Parse[T]) -> list[T]:
        """Return the values of several keys, in one message."""
        values = self._store.multi_get([self._key(name) for name in names]) if names else []
        return [self._parse(name, value, parse) for name, value in zip(names, values, strict=True)]

    def add(self, name: str, amount: int) -> int:
        """Add to a counter and return it.

        torch's store drops the connection if there is something else than a number, so look first.
        """
        if self.has(name):
            self.read(name, number)
        return self._store.add(self._key(name), amount)

    def sign(self, name: str, rank: int) -> None:
        """Add a rank to a list."""
        self.append(name, f"{rank} ")

    def signed(self, name: str) -> set[int]:
        """Return the ranks on a list."""
        return self.read(name, rank_list) if self.has(name) else set()
