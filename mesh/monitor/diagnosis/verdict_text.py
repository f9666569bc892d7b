"""Verdicts in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..recording.job_directory import Board, is_local, is_stopped
from ..recording.trace_buffer import H, Page, Record, State
from ..settings import monotonic_ns
from ..thread_errors import raised_in_thread
from ..verdict import Seen, Verdict, composed, ranks_text
from .history import MESSAGES, left_the_order

if TYPE_CHECKING:
    from ..monitor import Watch
    from ..recording.recorder import Seat
    from .diagnose import Member

# The fields of a record's call, in their order; "where" is the source of a broadcast or the reduction.
_FIELDS = ("operation", "reduction", "dtype", "shape", "layout")
_FROZEN_NS = 2_000_000_000  # a process whose watchdog thread has not moved for so long
RULE = "Call the same collectives in the same order on every rank of the group."
OTHER_VALUES = "Look for a call before that was skipped, repeated or swapped: these look alike, but their values were made differently."
_ONE_ORDER = "Call the collectives of different groups in one order on every rank."
_EACH_MESSAGE = "Receive what another rank sends, and call the collectives of different groups in one order on every rank."
_MESSAGES = "Let each rank send what its receiver expects, in the same size."
_LOST = "Look at the end of its own output and at its exit code; a SIGKILL is mostly the system's, short of memory."
_LEFT = "Let every rank run as many steps as the others; sm.check_lengths and sm.join help where batches run out."


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
        else f"{ranks_text(rest)} called different collectives, with equal votes,"
    )
    late = [m.rank for m in found if m.came is False]
    said = f"{said} as number {sequence} of {group_text(seat)}: the {_NAMED[field]} differs."
    lines = _table(seen, odd)
    if late:
        lines.append(f"  {ranks_text(late)}: not there yet")
    advice = RULE
    if field == "lineage":
        advice = numbers_drawn({m.rank: m.page for m in here}) or OTHER_VALUES
    return Verdict("mismatch", odd, field, tuple(seen), composed(said, advice, lines))


def numbers_drawn(pages: Mapping[int, Page | None]) -> str:
    """What to do about values that differ where the ranks' random numbers differ too; "" where they do not."""
    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, page in pages.items():
        if page is not None:
            ranks.setdefault((page.words[H.SEED], page.words[H.DRAWN]), []).append(rank)
    if len(ranks) < 2:
        return ""
    told = [f"{ranks_text(members)}: seed {seed}, {count} tensors drawn" for (seed, count), members in ranks.items()]
    return f"Seed every rank alike and draw the same tensors on every rank: their random numbers differ ({'; '.join(told)})."


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
    return _absent("lost", ranks, f"{ranks_text(ranks)} {_how_they_went(gone)}.", _LOST, [], gone)


def ended(gone: Sequence[Member], size: int) -> Verdict:
    """Ranks that ended the program, where a collective that is not the library's has shown it. The fewer are to blame."""
    from .diagnose import minority

    ranks = [m.rank for m in gone]
    others = [rank for rank in range(size) if rank not in ranks]
    said = f"{ranks_text(ranks)} ended the program while {ranks_text(others)} communicated with them."
    return _absent("left", minority([ranks, others]), said, _LEFT, [], gone)


def _how_they_went(gone: Sequence[Member]) -> str:
    pages = [m.page for m in gone if m.page is not None and m.page.words[H.STATE] == State.LOST]
    reasons = {page.read_text(page.words[H.DOING]) for page in pages}
    return f"cannot be reached ({'; '.join(sorted(reasons))})" if reasons else "died"


def lost(seat: Seat, sequence: int, found: Sequence[Member], gone: Sequence[Member]) -> Verdict:
    ranks, said = tuple(m.rank for m in gone), _how_they_went(gone)
    waiting = [rank for rank in _waiting(found) if rank not in ranks] or _waiting(found)
    said = f"{ranks_text(ranks)} {said}, while {_wait(waiting)} in number {sequence} of {group_text(seat)}."
    return _absent("lost", ranks, said, _LOST, found, gone)


def left(seat: Seat, sequence: int, found: Sequence[Member], gone: Sequence[Member], blamed: tuple[int, ...]) -> Verdict:
    ranks, waiting = [m.rank for m in gone], _waiting(found)
    said = f"{ranks_text(ranks)} ended the program while {_wait(waiting)} in number {sequence} of {group_text(seat)}"
    if blamed == tuple(waiting):
        said = f"{ranks_text(waiting)} called a collective that {ranks_text(ranks)} never called: the program has ended there"
    return _absent("left", blamed, f"{said}.", _LEFT, found, gone)


def _wait(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _waiting(found: Iterable[Member]) -> list[int]:
    return [m.rank for m in found if m.came]


def _absent(kind: str, blamed: tuple[int, ...], said: str, advice: str, found: Sequence[Member], gone: Sequence[Member]) -> Verdict:
    seen = [_seen(m.rank, m.record) for m in found if m.came] + [_last_seen(m.rank, m.page) for m in gone if m.page is not None]
    seen = _blamed_first(seen, blamed)
    return Verdict(kind, blamed, "", tuple(seen), composed(said, advice, _table(seen, blamed)))


def deadlock(board: Board, stuck: Sequence[tuple[int, Record]]) -> Verdict:
    """Ranks that wait for each other in different groups; those are to blame who left the order first, or are in another axis than most."""
    from .diagnose import minority, parties_by

    pages = {rank: page for rank in range(board.size) if (page := board.of(rank)) is not None}
    axes = {rank: _page(board, rank).group_text(record.group).partition("\t")[0] for rank, record in stuck}
    with_messages = any(fields_of(record.call)[0] in MESSAGES for _, record in stuck)
    blamed = left_the_order(pages, {rank: record.number for rank, record in stuck})
    if not blamed and not with_messages:
        blamed = minority(parties_by(axes, axes.__getitem__))
    seen = [
        Seen(rank, f"{call_text(record.call)} over {_group_text(_page(board, rank).group_text(record.group))}", record.place)
        for rank, record in stuck
    ]
    seen = _blamed_first(seen, blamed)
    who = f"; {ranks_text(blamed)} left the order of the others" if blamed else ""
    said = f"ranks are blocked on each other in different groups{who}."
    advice = _EACH_MESSAGE if with_messages else _ONE_ORDER
    return Verdict("deadlock", blamed, "order", tuple(seen), composed(said, advice, _table(seen, blamed)))


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
    said = f"number {sequence} of the {group_text(seat)} does not fit: {', '.join(size)}."
    return Verdict("mismatch", (), "shape", tuple(seen), composed(said, "Receive into a tensor of the size that is sent.", _table(seen)))


def _unfit(field: str, seat: Seat, sequence: int, odd: tuple[int, ...], texts: Mapping[Member, str]) -> Verdict:
    seen = [_seen(m.rank, m.record) for m in texts]
    seen = _blamed_first([Seen(s.rank, f"{s.call} {text}", s.place) for s, text in zip(seen, texts.values(), strict=True)], odd)
    who = f": {ranks_text(odd)} differs from the others" if odd else ""
    said = f"messages between the ranks of {group_text(seat)}, number {sequence}, do not fit{who}."
    return Verdict("mismatch", odd, field, tuple(seen), composed(said, _MESSAGES, _table(seen, odd)))


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
    said = f"{ranks_text(here)} {have} waited {waited / 1e9:.1f} s for {ranks_text(missing)} in number {sequence} of {group_text(seat)}."
    advice = f"See below where {ranks_text(blamed)} {'is' if len(blamed) == 1 else 'are'}; sm.watchdog(timeout=) sets how long ranks wait."
    seen = [_seen(m.rank, m.record) for m in found if m.came] + [_last_seen(r, watch.board.of(r)) for r in sorted({*missing, *blamed})]
    seen = _blamed_first(seen, blamed)
    lines = _table(seen, blamed)
    for rank in blamed:
        lines += [f"rank {rank} is {how_it_is(watch.board.of(rank))}", *watch.stack_of(rank)]
    return Verdict("stall", blamed, "", tuple(seen), composed(said, advice, lines))


def _roots(board: Board, missing: Iterable[int]) -> tuple[int, ...]:
    from .diagnose import _awaited

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
    return f"alive and busy elsewhere{raised_in_thread(page)}"


def raised(rank: int, kind: str, message: str, traceback: str, page: Page) -> Verdict:
    seen = _last_seen(rank, page)
    said = f"rank {rank} raised {kind}: {message.partition(chr(10))[0]}"
    advice = f"Mend that; the other ranks end because they would wait for rank {rank}."
    lines = [f"  | {line}" for line in traceback.rstrip().splitlines()]
    return Verdict("raised", (rank,), kind, (seen,), composed(said, advice, lines))


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
