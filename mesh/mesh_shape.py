"""MeshShape: the shape of a mesh, a tuple of sizes that is also indexed by axis name."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any


class MeshShape(tuple[int, ...]):
    """The sizes of a mesh's axes, as a tuple and as a mapping from names to sizes.

    It compares, unpacks and iterates as a tuple, so iterating gives sizes, where JAX's gives names.

    Example:
        >>> shape = MeshShape((2, 4), ("dp", "tp"))
        >>> shape == (2, 4), shape["tp"], shape[0], dict(shape), "tp" in shape
        (True, 4, 2, {'dp': 2, 'tp': 4}, True)
    """

    _by_name: dict[str, int]

    def __new__(cls, sizes: tuple[int, ...], names: tuple[str, ...]) -> MeshShape:
        self = super().__new__(cls, sizes)
        self._by_name = dict(zip(names, sizes, strict=True))
        return self

    def __getitem__(self, axis: Any) -> Any:
        """Return the size of an axis, by name or position; for a slice, a tuple.

        Raises:
            KeyError: an unknown name. IndexError: a position out of range.
        """
        return self._by_name[axis] if isinstance(axis, str) else tuple.__getitem__(self, axis)

    def __contains__(self, item: object) -> bool:
        return item in self._by_name if isinstance(item, str) else tuple.__contains__(self, item)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the size of the axis of this name, or `default`."""
        return self._by_name.get(name, default)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._by_name.keys()

    def values(self) -> ValuesView[int]:
        """Return the sizes."""
        return self._by_name.values()

    def items(self) -> ItemsView[str, int]:
        """Return pairs of name and size."""
        return self._by_name.items()

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshShape, (tuple(self), tuple(self._by_name))
