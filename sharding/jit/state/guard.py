"""Whether a snapshot still holds, in little time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import dict_version  # type: ignore[import-not-found]

from ...layout.layout import Layout
from .snapshot import Snapshot

_local_of, _layout_of = attrgetter("_local"), attrgetter("_layout")
_requires_grad = attrgetter("requires_grad")
_hooks_of, _after_accumulation = map(attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks"))
_after_reduction = attrgetter("_after_grad_hooks")


class Guard:
    """Whether a snapshot still holds, in little time.

    Attributes:
        sharded: the ShardedTensors that can be reached.
        storages: the memory of all tensors that can be reached.
        versions: how often each of them had been written.
    """

    def __init__(self, snapshot: Snapshot, dynamic: set[tuple[int, Any]]) -> None:
        self._snapshot, self._dynamic = snapshot, dynamic
        self._empty: list[Any] = []
        self._dicts, self._sources, self._others = [], [], []
        for holder in snapshot.holders:
            source: Any = holder.source
            if source is not None and not source:
                self._empty.append(source)
            elif isinstance(source, dict):
                self._dicts.append(holder)
                self._sources.append(source)
            elif holder.held:
                self._others.append((holder, holder.read, holder.held[1::2]))
        self._versions = list(map(dict_version, self._sources))
        self.sharded = [x for x, _ in snapshot.sharded]
        self._layouts: list[Layout] = [x._layout for x in self.sharded]
        self._parts: list[Tensor] = [x._local for x in self.sharded]
        self._tensors = [x for x, _ in snapshot.tensors] + self._parts
        # A dict of hooks, once there, is a holder of the snapshot.
        self._leaves = [x for x in self._tensors if x.requires_grad and x.is_leaf]
        self._hooks = [
            (read, tensors, list(map(read, tensors)))
            for read, tensors in (
                (_hooks_of, self._leaves),
                (_after_accumulation, self._leaves),
                (_after_reduction, self.sharded),
            )
        ]
        self._has_hooks = any(x is not None for *_, hooks in self._hooks[:2] for x in hooks)
        self.leave_out(())
        self.versions = self._versions_now()
        self.storages = {x.untyped_storage()._cdata for x in self._tensors if x.numel()}

    def _versions_now(self) -> list[int]:
        return [-1 if x.is_inference() else x._version for x in self._tensors] + [
            x._data_accesses for x in self.sharded
        ]

    def was_written(self) -> bool:
        """Return whether a tensor was written since the snapshot."""
        return self._versions_now() != self.versions

    def change(self) -> str | None:
        """Describe the changes since the snapshot, None if there are none."""
        if any(self._empty):
            return self._snapshot.change(self._dynamic) or "a list was filled and emptied"
        changed = self._snapshot.change_of
        versions = list(map(dict_version, self._sources))
        if versions != self._versions:
            for holder, now, before in zip(self._dicts, versions, self._versions, strict=True):
                if now != before and (change := changed(holder, self._dynamic)) is not None:
                    return change
            self._versions = versions
        for holder, read, held in self._others:
            values = read()[1::2]
            if (len(values) != len(held) or not all(map(is_, values, held))) and (
                change := changed(holder, set())
            ) is not None:
                return change
        change = self._snapshot.change_of_copies() if self._snapshot.has_copies else None
        return change or self._change_of_tensors()

    def _change_of_tensors(self) -> str | None:
        if not all(map(is_, map(_local_of, self.sharded), self._parts)) or not all(
            map(is_, map(_layout_of, self.sharded), self._layouts)
        ):
            known = zip(self._snapshot.sharded, self._parts, self._layouts, strict=True)
            path = next(
                path
                for (x, path), part, layout in known
                if x._local is not part or x._layout is not layout
            )
            return f"the local part or the layout of {path} was replaced"
        if self._same_leaves():
            return None
        needs = list(map(_requires_grad, self._compared))
        if needs != self._needs:
            i = list(map(is_, needs, self._needs)).index(False)
            path = self.names[id(self._compared[i])]
            return f"{path}.requires_grad was {self._needs[i]} and is {needs[i]}"
        for read, tensors, before in self._hooks:
            now = list(map(read, tensors))
            if now != before:
                i = list(map(is_, now, before)).index(False)
                local: Any = getattr(tensors[i], "_local", tensors[i])
                return f"{self.names[id(local)]} has hooks of its gradient and had none"
        return None

    def _same_leaves(self) -> bool:
        """Return True if `requires_grad` and the hooks of all tensors are those of the snapshot.

        False where this takes a comparison one by one. In one loop over the leaves without hooks:
        what takes the time is to read an attribute of a tensor.
        """
        if self._has_hooks:
            return False
        for x in self._compared_leaves:
            if (
                not x.requires_grad
                or x._backward_hooks is not None
                or x._post_accumulate_grad_hooks is not None  # type: ignore[attr-defined]
            ):
                return False
        for x in self._other_leaves:
            if x._backward_hooks is not None or x._post_accumulate_grad_hooks is not None:  # type: ignore[attr-defined]
                return False
        read, sharded, hooks = self._hooks[-1]
        needs = list(map(_requires_grad, self._compared_rest))
        return needs == self._needs_of_rest and list(map(read, sharded)) == hooks

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Compare `requires_grad` of these tensors no longer: the caller does."""
        left_out = set(map(id, tensors))
        self._compared = [x for x in self._tensors if id(x) not in left_out]
        self._needs = list(map(_requires_grad, self._compared))
        leaves = set(map(id, self._leaves))
        self._compared_leaves = [x for x in self._leaves if id(x) not in left_out]
        self._other_leaves = [x for x in self._leaves if id(x) in left_out]
        self._compared_rest = [x for x in self._compared if id(x) not in leaves]
        self._needs_of_rest = list(map(_requires_grad, self._compared_rest))

    @property
    def names(self) -> dict[int, str]:
        """The names of plain tensors, and of the local parts of sharded ones, by their ids."""
        paths = [path for _, path in (*self._snapshot.tensors, *self._snapshot.sharded)]
        return dict(zip(map(id, self._tensors), paths, strict=True))
