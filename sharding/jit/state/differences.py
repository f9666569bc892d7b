"""Why a call is recorded again, in words: what differs between two signatures or tensors.

key    structure of the arguments | modes of torch | a key for each leaf | which leaves share memory
text   the shape of x is [3, 8] and was [4, 8]
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout.layout import Layout
from ...trees import paths_of, unflatten
from .slots import GradSlot

_log = logging.getLogger(__name__)
_MANY = 8  # recordings of one function before a warning
_MODES = (
    "grad mode",
    "inference mode",
    "the default dtype",
    "the use of deterministic algorithms",
    "autocast",
)
_OF_TENSORS = ("shape", "stride", "dtype", "device", "requires_grad")
_OF_LAYOUTS = ("shape", "dtype", "spec", "mesh")
_ADVICE = (
    ("the shape of ", "Pad tensors to a few shapes."),
    (
        "the value of ",
        "Pass a number that changes as a float or a tensor, of which a graph takes any value.",
    ),
    ("the object ", "Pass the same object in every call."),
)


class Reason(NamedTuple):
    """Why a call is recorded again.

    Attributes:
        what: the thing that differs, "the shape of x".
        text: with what it is and was.
    """

    what: str
    text: str


def _describe_change(what: str, now: Any, before: Any) -> Reason:
    return Reason(what, f"{what} is {now} and was {before}")


class Reasons:
    """The reasons for which one function was recorded again."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f, self._recordings = f, 0
        self._counts: dict[str, tuple[Reason, int]] = {}

    def find(self, change: str, key: Any, others: Sequence[Any]) -> list[Reason]:
        """Return why a signature is recorded; [] for the first recording.

        Args:
            change: what has changed since the newest graph of this signature; empty if it has none.
            others: other signatures that have graphs, the newest last.
        """
        return [_reason_of(change)] if change else nearest(self._f, key, others)

    def note(self, function: Any, reasons: Sequence[Reason]) -> None:
        """Count a recording, log what differs, and warn if there are many recordings.

        Each thing that differs is logged once; the warning is given once.
        """
        self._recordings += 1
        for reason in reasons:
            if reason.what not in self._counts:
                _log.info("%r is recorded again: %s", function, reason.text)
            self._counts[reason.what] = reason, self._counts.get(reason.what, (reason, 0))[1] + 1
        if self._recordings == _MANY:
            warnings.warn(f"{function!r} {self._summary()}", stacklevel=4)

    def _summary(self) -> str:
        reasons = sorted(self._counts.values(), key=lambda item: -item[1])
        texts = [f"{one.text} ({count} time{'s' * (count != 1)})" for one, count in reasons]
        what = "; ".join(texts)
        advice = [
            text
            for start, text in _ADVICE
            if any(reason.what.startswith(start) for reason, _ in reasons)
        ]
        return " ".join([f"was recorded {_MANY} times, each time eagerly: {what}.", *advice])


def texts_of(reasons: Sequence[Reason]) -> str:
    """Return reasons as one text."""
    return "; ".join(reason.text for reason in reasons)


def _reason_of(text: str) -> Reason:
    """Return a reason that is there as text: `f.depth was 2 and is 3`."""
    starts = (text.partition(word)[0] for word in (" was ", " is ", " had "))
    return Reason(min(starts, key=len), text)


# -- signatures ------------------------------------------------------------------------------------


def nearest(f: Callable[..., Any], key: Any, others: Sequence[Any]) -> list[Reason]:
    """Return what differs from the signature that differs least; [] if there are no others.

    Of several that differ in as many things, the newest is taken.
    """
    return min((differences(f, other, key) for other in reversed(others)), key=len, default=[])


def differences(f: Callable[..., Any], before: Any, now: Any) -> list[Reason]:
    """Return what differs between two signatures of a function."""
    modes = zip(_MODES, before[1], now[1], strict=True)
    reasons = [_describe_change(name, _word(y), _word(x)) for name, x, y in modes if x != y]
    names = leaf_names(f, now[0], len(now[2]))
    if before[0] != now[0]:
        structure = ", ".join(names) or "empty"
        old_structure = ", ".join(leaf_names(f, before[0], len(before[2]))) or "empty"
        return [
            *reasons,
            _describe_change("the structure of the arguments", structure, old_structure),
        ]
    for name, x, y in zip(names, before[2], now[2], strict=True):
        reasons += _leaf(name, x, y) if x != y else []
    if before[3] != now[3] and not reasons:
        text = "which arguments share memory, and how far apart they begin, has changed"
        reasons.append(Reason("shared memory", text))
    return reasons


def leaf_names(f: Callable[..., Any], tree: Any, count: int) -> list[str]:
    """Return the name of each leaf of the arguments: `batch['x'][0]`."""
    try:
        all_parameters = inspect.signature(f).parameters.values()
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [p.name for p in all_parameters if p.kind in kinds]
    except (TypeError, ValueError):
        parameters = []
    args, kwargs = unflatten(tree, list(range(count)))
    parameters += [f"args[{i}]" for i in range(len(parameters), len(args))]
    named = [*zip(parameters, args, strict=False), *kwargs.items()]
    return [name + path for name, x in named for path in paths_of(x)]


def _leaf(name: str, before: Any, now: Any) -> list[Reason]:
    kinds = _kind(before), _kind(now)
    if kinds[0] != kinds[1]:
        return [_describe_change(f"the type of {name}", kinds[1], kinds[0])]
    if kinds[0] == "a static argument":
        return [_describe_change(name, repr(now[0])[:80], repr(before[0])[:80])]
    if kinds[0] == "a ShardedTensor":
        parts = [(part, getattr(before[0], part), getattr(now[0], part)) for part in _OF_LAYOUTS]
        parts += [("stride", before[1], now[1]), ("requires_grad", before[2], now[2])]
    elif kinds[0] == "a tensor":
        parts = [*zip(_OF_TENSORS, before, now, strict=True)]
    elif isinstance(now[1], now[0]):
        return [_describe_change(f"the value of {name}", repr(now[1])[:80], repr(before[1])[:80])]
    else:
        text = f"the object {name} is another {now[0].__name__} than before"
        return [Reason(f"the object {name}", text)]
    differing = [one for one in parts if one[1] != one[2]]
    if len(differing) > 1 and differing[0][0] == "shape":  # the stride follows from it
        differing = [one for one in differing if one[0] != "stride"]
    return [
        _describe_change(_part_text(part, name), _word(y), _word(x)) for part, x, y in differing
    ]


def _part_text(part: str, name: str) -> str:
    return f"{name}.requires_grad" if part == "requires_grad" else f"the {part} of {name}"


def _kind(key: Any) -> str:
    if key is float:
        return "float"
    if getattr(key, "_fields", ()) == ("value", "kind"):
        return "a static argument"
    if isinstance(key[0], Layout):
        return "a ShardedTensor"
    return "a tensor" if isinstance(key[0], torch.Size) else key[0].__name__


def _word(x: Any) -> str:
    if isinstance(x, bool):
        return "on" if x else "off"
    if isinstance(x, tuple):
        return (
            str(list(x)) if all(type(n) is int for n in x) else ", ".join(_word(one) for one in x)
        )
    return str(x).removeprefix("torch.")


# -- what a function reaches -----------------------------------------------------------------------


def facts_of(x: Tensor) -> tuple[Any, ...]:
    """Return what of a tensor a graph depends on, besides where its memory is."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def changed_tensor(name: str, before: tuple[Any, ...], x: Tensor) -> str:
    """Return what has changed of a tensor that a graph takes by reference."""
    differences = _leaf(name, before, facts_of(x))
    return differences[0].text if differences else f"the memory of {name} was replaced"


def changed_gradient(slots: Sequence[GradSlot], before: Sequence[Any], now: Sequence[Any]) -> str:
    """Return the first slot of a gradient whose value is of another kind, and of which."""
    slot, x, y = next(one for one in zip(slots, before, now, strict=True) if one[1] != one[2])
    if x is None or y is None:
        words = ("None" if value is None else "set" for value in (x, y))
        return "{} was {} and is {}".format(slot.path, *words)
    return f"{slot.path} was of another shape, layout or dtype"
