"""Verdicts in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .board import Board, is_local, is_stopped
from .history import MESSAGES, left_the_order
from .page import H, Page, Record, State
from .settings import monotonic_ns
from .verdict import Seen, Verdict, ranks_text

if TYPE_CHECKING:
    from .judge import Member
    from .seat import Seat
    from .watch import Watch

# The fields of a record's call, in their order; "where" is the source of a broadcast or the reduction.
_FIELDS = ("operation", "reduction", "dtype", "shape", "layout")
_FROZEN_NS = 2_000_000_000  # a process whose watchdog thread has not moved for so long
_EACH_MESSAGE = "What a rank sends another must receive, and all must call the collectives of different groups in one order."
_RULE = "Every rank of a group must call the same collectives in the same order."


def fields_of(call: str) -> list[str]:
    """operation, reduction (or source), dtype, elements, layouts of a record's call."""
    return (call.split("\t") + [""] * 5)[:5]


def call_text(call: str) -> str:
    """`all_reduce(sum, float32, 4 elements) for f32[8] @ P('dp') -> P()`"""
    op, how, dtype, size, note = fields_of(call)
    inside = ", ".join(word for word in (how, dtype, f"{size} elements" if size else "") if word)
    return f"{op}({inside})" + (f" for {note}" if note else "")


def group_text(seat: Seat) -> str:
    """`dp (ranks 0, 2)`; the ranks alone where they are no axes of a mesh."""
    return _group_text(seat.page.group_text(seat.number))


def _group_text(text: str) -> str:
    axes, _, ranks = text.partition("\t")
    ranks = ranks_text([int(r) for r in ranks.split(",")])
    return ranks if axes.startswith("ranks ") else f"{axes} ({ranks})"


def mismatch(seat: Seat, sequence: int, found: Sequence[Member], odd: tuple[int, ...]) -> Verdict:
    here = [m for m in found if m.came]
    field = _field(here, odd)
    seen = _blamed_first([_seen(m.rank, m.record) for m in here], odd)
    rest = [m.rank for m in here if m.rank not in odd]
    said = (
        f"{ranks_text(odd)} called another collective than {ranks_text(rest)}"
        if odd
        else f"{ranks_text(rest)} called different collectives, none of them more often than the others"
    )
    late = [m.rank for m in found if m.came is False]
    lines = [f"{said}, as number {sequence} of the group {group_text(seat)}: the {_NAMED[field]} differs", *_table(seen, odd)]
    if late:
        lines.append(f"  {ranks_text(late)}: not there yet")
    if field == "lineage":
        lines.append("The calls look alike, but their values were made differently: one was skipped, repeated or swapped before.")
    return Verdict("mismatch", odd, field, tuple(seen), "\n".join([*lines, _RULE]))


_NAMED = {"operation": "operation", "reduction": "reduction", "source": "source", "dtype": "dtype", "shape": "shape",
          "layout": "layout", "purpose": "purpose", "lineage": "value", "route": "route"}  # fmt: skip


def _field(here: Sequence[Member], odd: Sequence[int]) -> str:
    """The first field in which a blamed rank (or, where none is, any) differs from the others."""
    usual = next((m for m in here if m.rank not in odd), here[0])
    for m in here:
        pair = [fields_of(x.record.call) for x in (usual, m) if x.record is not None]
        if len(pair) == 2:
            for name, one, other in zip(_FIELDS, *pair, strict=True):
                if one != other:
                    return _finer(name, pair[0][0], one, other)
    return "lineage"


def _finer(name: str, op: str, one: str, other: str) -> str:
    """The field, where the record keeps several in one."""
    if name == "reduction" and op == "broadcast":
        return "source"
    if name == "layout" and not all(" @ " in note for note in (one, other)):
        return "purpose"
    tensors = [note.partition(" @ ")[0] for note in (one, other)]  # f32[8, 4]
    if name != "layout" or tensors[0] == tensors[1] or "tensors (" in one + other:
        return name
    dtypes = [tensor.partition("[")[0] for tensor in tensors]
    return "dtype" if dtypes[0] != dtypes[1] else "shape"


def died(gone: Sequence[Member]) -> Verdict:
    """Ranks that are gone, where a collective that is not the library's has shown it."""
    ranks = tuple(m.rank for m in gone)
    return _absent("lost", ranks, [f"{ranks_text(ranks)} {_how_they_went(gone)}:"], [], gone)


def ended(gone: Sequence[Member], size: int) -> Verdict:
    """Ranks that ended the program, where a collective that is not the library's has shown it. The fewer are to blame."""
    from .judge import minority

    ranks = [m.rank for m in gone]
    others = [rank for rank in range(size) if rank not in ranks]
    lines = [f"{ranks_text(ranks)} ended the program while {ranks_text(others)} communicated with them:"]
    return _absent("left", minority([ranks, others]), lines, [], gone)


def _how_they_went(gone: Sequence[Member]) -> str:
    pages = [m.page for m in gone if m.page is not None and m.page.words[H.STATE] == State.LOST]
    reasons = {page.read_text(page.words[H.DOING]) for page in pages}
    return f"cannot be reached ({'; '.join(sorted(reasons))})" if reasons else "died"


def lost(seat: Seat, sequence: int, found: Sequence[Member], gone: Sequence[Member]) -> Verdict:
    ranks, said = tuple(m.rank for m in gone), _how_they_went(gone)
    waiting = [rank for rank in _waiting(found) if rank not in ranks] or _waiting(found)
    lines = [f"{ranks_text(ranks)} {said}, while {_wait(waiting)} in number {sequence} of the group {group_text(seat)}:"]
    return _absent("lost", ranks, lines, found, gone)


def left(seat: Seat, sequence: int, found: Sequence[Member], gone: Sequence[Member], blamed: tuple[int, ...]) -> Verdict:
    ranks, waiting = [m.rank for m in gone], _waiting(found)
    said = f"{ranks_text(ranks)} ended the program while {_wait(waiting)} in number {sequence} of the group {group_text(seat)}"
    if blamed == tuple(waiting):
        said = f"{ranks_text(waiting)} called a collective that {ranks_text(ranks)} never called: the program has ended there"
    return _absent("left", blamed, [f"{said}:"], found, gone)


def _wait(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _waiting(found: Iterable[Member]) -> list[int]:
    return [m.rank for m in found if m.came]


def _absent(kind: str, blamed: tuple[int, ...], lines: list[str], found: Sequence[Member], gone: Sequence[Member]) -> Verdict:
    seen = [_seen(m.rank, m.record) for m in found if m.came] + [_last_seen(m.rank, m.page) for m in gone if m.page is not None]
    seen = _blamed_first(seen, blamed)
    return Verdict(kind, blamed, "", tuple(seen), "\n".join([*lines, *_table(seen, blamed)]))


def deadlock(board: Board, stuck: Sequence[tuple[int, Record]]) -> Verdict:
    """Ranks that wait for each other in different groups; those are to blame who are in another axis than most."""
    pages = {rank: page for rank in range(board.size) if (page := board.of(rank)) is not None}
    blamed = left_the_order(pages, {rank: record.number for rank, record in stuck})
    seen = [
        Seen(rank, f"{call_text(record.call)} over {_group_text(_page(board, rank).group_text(record.group))}", record.place)
        for rank, record in stuck
    ]
    seen = _blamed_first(seen, blamed)
    who = f"; {ranks_text(blamed)} left the order of the others" if blamed else ""
    lines = [f"ranks wait for each other in different groups, for ever{who}:", *_table(seen, blamed)]
    is_message = any(fields_of(record.call)[0] in MESSAGES for _, record in stuck)
    lines.append(_EACH_MESSAGE if is_message else "Ranks must call the collectives of different axes in one order.")
    return Verdict("deadlock", blamed, "order", tuple(seen), "\n".join(lines))


def wrong_route(seat: Seat, sequence: int, found: Sequence[Member], odd: tuple[int, ...]) -> Verdict:
    """Messages that do not find each other."""
    return _unfit("route", seat, sequence, odd, {m: _route_text(seat, m) for m in found if m.came})


def wrong_splits(
    seat: Seat, sequence: int, found: Sequence[Member], shown: Mapping[int, tuple[list[int], list[int]]], odd: tuple[int, ...]
) -> Verdict:
    """Of an all_to_all, parts of which the sender and the receiver have different sizes."""
    texts = {found[place]: f"which sends {sent} elements to the ranks and expects {expected}" for place, (sent, expected) in shown.items()}
    return _unfit("splits", seat, sequence, odd, texts)


def too_large(seat: Seat, sequence: int, found: Sequence[Member]) -> Verdict:
    """A message for which its receiver has too little room."""
    seen = [_seen(m.rank, m.record) for m in found]
    size = [f"{m.record.sent} bytes are sent" if m.record.sent else f"{m.record.received} expected" for m in found if m.record is not None]
    lines = [f"number {sequence} of the {group_text(seat)} does not fit: {', '.join(size)}", *_table(seen)]
    return Verdict("mismatch", (), "shape", tuple(seen), "\n".join([*lines, "A receiver must have room for what is sent."]))


def _unfit(field: str, seat: Seat, sequence: int, odd: tuple[int, ...], texts: Mapping[Member, str]) -> Verdict:
    seen = [_seen(m.rank, m.record) for m in texts]
    seen = _blamed_first([Seen(s.rank, f"{s.call} {text}", s.place) for s, text in zip(seen, texts.values(), strict=True)], odd)
    who = f": {ranks_text(odd)} differs from the others" if odd else ""
    lines = [f"messages between the ranks of the group {group_text(seat)}, number {sequence}, do not fit{who}", *_table(seen, odd)]
    lines.append("What a rank sends, its receiver must expect, in the same size.")
    return Verdict("mismatch", odd, field, tuple(seen), "\n".join(lines))


def _route_text(seat: Seat, m: Member) -> str:
    ranks, record = seat.group.ranks, m.record
    dst, src = (m.route >> 32) - 1, (m.route & 0xFFFF_FFFF) - 1
    sent, received = (0, 0) if record is None else (record.sent, record.received)
    to = f"{sent} bytes to rank {ranks[dst]}" if dst >= 0 else "nothing"
    return f"which sends {to} and expects {f'{received} bytes from rank {ranks[src]}' if src >= 0 else 'nothing'}"


def stall(watch: Watch, seat: Seat, sequence: int, found: Sequence[Member], waited: int) -> Verdict:
    """Names who keeps the others waiting: those at the end of the chain, who wait for nobody."""
    missing = tuple(m.rank for m in found if m.came is False)
    blamed = _roots(watch.board, missing)
    here = _waiting(found)
    have = "has" if len(here) == 1 else "have"
    text = f"{ranks_text(here)} {have} waited {waited / 1e9:.1f} s for {ranks_text(missing)} in number {sequence} of {group_text(seat)}:"
    seen = [_seen(m.rank, m.record) for m in found if m.came] + [_last_seen(r, watch.board.of(r)) for r in sorted({*missing, *blamed})]
    seen = _blamed_first(seen, blamed)
    lines = [text, *_table(seen, blamed)]
    for rank in blamed:
        lines += [f"rank {rank} is {how_it_is(watch.board.of(rank))}", *watch.stack_of(rank)]
    return Verdict("stall", blamed, "", tuple(seen), "\n".join(lines))


def _roots(board: Board, missing: Iterable[int]) -> tuple[int, ...]:
    from .judge import _awaited

    reached: set[int] = set()
    roots, ahead = set(), list(missing)
    while ahead:
        rank = ahead.pop()
        if rank in reached:
            continue
        reached.add(rank)
        awaited = _awaited(board, rank)
        ahead += awaited
        if not awaited:
            roots.add(rank)
    return tuple(sorted(roots or reached))


def how_it_is(page: Page | None) -> str:
    """What can be told of a process that does not come."""
    if page is None:
        return "not known yet: it has made no mesh"
    silent = monotonic_ns() - page.words[H.HEARTBEAT]
    if is_stopped(page):
        return "stopped by a signal (SIGSTOP, a debugger, Ctrl-Z)"
    if silent > _FROZEN_NS and is_local(page):
        why = "a call that holds the interpreter's lock, or no CPU time"
        return f"frozen: not even its watchdog thread has run for {silent / 1e9:.1f} s ({why})"
    return "alive and busy elsewhere"


def raised(rank: int, kind: str, message: str, traceback: str, page: Page) -> Verdict:
    seen = _last_seen(rank, page)
    lines = [f"rank {rank} raised {kind}: {message}", *(f"  | {line}" for line in traceback.rstrip().splitlines())]
    return Verdict("raised", (rank,), kind, (seen,), "\n".join(lines))


def _page(board: Board, rank: int) -> Page:
    found = board.of(rank)
    return board.page if found is None else found


def _seen(rank: int, record: Record | None) -> Seen:
    return Seen(rank, "?", "") if record is None else Seen(rank, call_text(record.call), record.place)


def _last_seen(rank: int, page: Page | None) -> Seen:
    record = None if page is None else page.last
    if record is None:
        return Seen(rank, "has called no collective", "")
    return Seen(rank, f"last {'called' if record.end else 'entered'} {call_text(record.call)}", record.place)


def _blamed_first(seen: Sequence[Seen], blamed: Sequence[int]) -> list[Seen]:
    return sorted(seen, key=lambda s: (s.rank not in blamed, s.rank))


def _table(seen: Sequence[Seen], blamed: Sequence[int] = ()) -> list[str]:
    """One line for all ranks that did the same, but for those to blame."""
    alike: dict[tuple[bool, str, str], list[int]] = {}
    for s in seen:
        alike.setdefault((s.rank in blamed, s.call, s.place), []).append(s.rank)
    return [f"  {ranks_text(ranks)}: {call}{f' at {place}' if place else ''}" for (_, call, place), ranks in alike.items()]
