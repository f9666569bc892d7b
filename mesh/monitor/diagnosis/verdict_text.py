"""Build verdicts: the kind of fault, the ranks at fault, and the message that every rank raises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...comm.recording.call_text import call_text, fields_of
from ...comm.recording.recorder import Recorder
from ...comm.recording.trace_buffer import Header, RankState, Record, TraceBuffer
from ...settings import monotonic_ns
from ...text import ranks_text
from ..job import Job
from ..recording.job_directory import JobDirectory, is_local, is_stopped
from ..verdict import INTERRUPTIONS, Observation, Verdict, compose_text
from .history import MESSAGES, left_the_order
from .members import Member, awaited_ranks
from .votes import minority, parties_by

# The fields of a record's call, in order; a broadcast has its source in place of the reduction.
_FIELDS = ("operation", "reduction", "dtype", "shape", "layout")
# a process whose watchdog thread has not run for so long counts as frozen
_FROZEN_NS = 2_000_000_000
RULE = "Call the same collectives in the same order on every rank of the group."
OTHER_VALUES = (
    "Look for a call before that was skipped, repeated or swapped: these look alike, but their "
    "values were made differently."
)
OTHER_STEPS = (
    "Let every rank end a step that fails on one of them: a rank that catches its error alone goes "
    "on to the next step, while the others are still in theirs."
)
_ONE_ORDER = "Call the collectives of different groups in one order on every rank."
_EACH_MESSAGE = (
    "Receive what another rank sends, and call the collectives of different groups in one order on "
    "every rank."
)
_MESSAGES = "Let each rank send what its receiver expects, in the same size."
_LOST = (
    "Look at the end of its own output and at its exit code; a SIGKILL is mostly the system's, "
    "short of memory."
)
_LEFT = (
    "Let every rank run as many steps as the others; sm.parallel.check_lengths and "
    "sm.parallel.uneven_inputs help where batches run out."
)


def group_text(recorder: Recorder) -> str:
    """Return `dp (ranks 0, 2)`; the ranks alone where they are not axes of a mesh."""
    return _group_text(recorder.buffer.group_text(recorder.number))


def _group_text(text: str) -> str:
    axes, _, ranks = text.partition("\t")
    ranks = ranks_text([int(r) for r in ranks.split(",")])
    return ranks if axes.startswith("ranks ") else f"{axes} ({ranks})"


def mismatch(
    recorder: Recorder, sequence: int, members: Sequence[Member], outliers: tuple[int, ...]
) -> Verdict:
    """Return the verdict on ranks that called different collectives."""
    callers = [m for m in members if m.came]
    steps = {m.rank: step for m in callers if (step := m.step) is not None}
    field = "step" if len(set(steps.values())) > 1 else _field(callers, outliers)
    seen = _blamed_first([_observation(m.rank, m.record) for m in callers], outliers)
    if field == "step":
        seen = [in_step(observation, steps.get(observation.rank)) for observation in seen]
    rest = [m.rank for m in callers if m.rank not in outliers]
    said = (
        f"{ranks_text(outliers)} called another collective than {ranks_text(rest)}"
        if outliers
        else f"{ranks_text(rest)} called different collectives, with equal votes,"
    )
    late = [m.rank for m in members if m.came is False]
    said = f"{said} as number {sequence} of {group_text(recorder)}: the {_NAMED[field]} differs."
    lines = _table(seen, outliers)
    if late:
        lines.append(f"  {ranks_text(late)}: not there yet")
    advice = RULE
    if field == "lineage":
        advice = on_values({m.rank: m.buffer for m in callers})
    if field == "step":
        advice = OTHER_STEPS
    return Verdict("mismatch", outliers, field, tuple(seen), compose_text(said, advice, lines))


def on_values(buffers: Mapping[int, TraceBuffer | None]) -> str:
    """Return advice on values that differ, by what else differs between these ranks."""
    numbers = _by_words(buffers, Header.SEED, Header.DRAWN)
    if len(numbers) > 1:
        states = [
            f"{ranks_text(ranks)}: seed {seed}, {count} tensors drawn"
            for (seed, count), ranks in numbers.items()
        ]
        return (
            "Seed every rank alike and draw the same tensors on every rank: their random numbers "
            f"differ ({'; '.join(states)})."
        )
    steps = _by_words(buffers, Header.OPTIMIZER_STEPS)
    if len(steps) > 1:
        counts = [f"{ranks_text(ranks)}: {count}" for (count,), ranks in steps.items()]
        return (
            "Call step() of the optimizers on every rank: the numbers of steps that they have made "
            f"differ ({'; '.join(counts)})."
        )
    return OTHER_VALUES


def _by_words(
    buffers: Mapping[int, TraceBuffer | None], *words: int
) -> dict[tuple[int, ...], list[int]]:
    """Return the ranks by the values of these words of their headers."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, buffer in buffers.items():
        if buffer is not None:
            ranks.setdefault(tuple(buffer.words[word] for word in words), []).append(rank)
    return ranks


_NAMED = {
    "operation": "operation",
    "reduction": "reduction",
    "source": "source",
    "dtype": "dtype",
    "shape": "shape",
    "layout": "layout",
    "purpose": "purpose",
    "lineage": "value",
    "route": "route",
    "step": "step",
}


def _field(callers: Sequence[Member], outliers: Sequence[int]) -> str:
    """Return the first field in which a blamed rank differs from the others.

    Any rank, where none is blamed.
    """
    usual = next((m for m in callers if m.rank not in outliers), callers[0])
    for m in callers:
        pair = [fields_of(x.record.call) for x in (usual, m) if x.record is not None]
        if len(pair) == 2:
            for name, one, other in zip(_FIELDS, *pair, strict=True):
                if one != other:
                    return _finer(name, pair[0][0], one, other)
    return "lineage"


def _finer(name: str, op: str, one: str, other: str) -> str:
    """Return which field differs where the record keeps several in one."""
    if name == "reduction" and op == "broadcast":
        return "source"
    if name == "layout" and not all(" @ " in tag for tag in (one, other)):
        return "purpose"
    tensors = [tag.partition(" @ ")[0] for tag in (one, other)]  # f32[8, 4]
    if name != "layout" or tensors[0] == tensors[1] or "tensors (" in one + other:
        return name
    dtypes = [tensor.partition("[")[0] for tensor in tensors]
    return "dtype" if dtypes[0] != dtypes[1] else "shape"


def in_step(observation: Observation, step: int | None) -> Observation:
    """Return what was seen of a rank, with the step in which it called, if known."""
    if step is None:
        return observation
    return replace(observation, call=f"{observation.call} in step {step}")


def died(gone: Sequence[Member]) -> Verdict:
    """Return the verdict on ranks that are gone, noticed in a collective of the program."""
    ranks = tuple(m.rank for m in gone)
    return _verdict_on_absent(
        "lost", ranks, f"{ranks_text(ranks)} {_how_they_went(gone)}.", _LOST, [], gone
    )


def ended(gone: Sequence[Member], size: int) -> Verdict:
    """Return the verdict on ranks that ended, noticed in a collective of the program."""
    ranks = [m.rank for m in gone]
    others = [rank for rank in range(size) if rank not in ranks]
    said = (
        f"{ranks_text(ranks)} ended the program while {ranks_text(others)} communicated with them."
    )
    return _verdict_on_absent("left", minority([ranks, others]), said, _LEFT, [], gone)


def _how_they_went(gone: Sequence[Member]) -> str:
    buffers = [
        m.buffer
        for m in gone
        if m.buffer is not None and m.buffer.words[Header.STATE] == RankState.LOST
    ]
    reasons = {buffer.read_text(buffer.words[Header.DOING]) for buffer in buffers}
    return f"cannot be reached ({'; '.join(sorted(reasons))})" if reasons else "died"


def lost(
    recorder: Recorder, sequence: int, members: Sequence[Member], gone: Sequence[Member]
) -> Verdict:
    """Return the verdict on ranks that died or cannot be reached while others wait."""
    ranks = tuple(m.rank for m in gone)
    said = _how_they_went(gone)
    waiting = [rank for rank in _waiting(members) if rank not in ranks] or _waiting(members)
    said = (
        f"{ranks_text(ranks)} {said}, while {_wait(waiting)} in number {sequence} of "
        f"{group_text(recorder)}."
    )
    return _verdict_on_absent("lost", ranks, said, _LOST, members, gone)


def left(
    recorder: Recorder,
    sequence: int,
    members: Sequence[Member],
    gone: Sequence[Member],
    blamed: tuple[int, ...],
) -> Verdict:
    """Return the verdict on ranks that ended the program while others wait in a collective."""
    ranks = [m.rank for m in gone]
    waiting = _waiting(members)
    said = (
        f"{ranks_text(ranks)} ended the program while {_wait(waiting)} in number {sequence} of "
        f"{group_text(recorder)}"
    )
    if blamed == tuple(waiting):
        said = (
            f"{ranks_text(waiting)} called a collective that {ranks_text(ranks)} never called: the "
            "program has ended there"
        )
    return _verdict_on_absent("left", blamed, f"{said}.", _LEFT, members, gone)


def _wait(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _waiting(members: Iterable[Member]) -> list[int]:
    return [m.rank for m in members if m.came]


def _verdict_on_absent(
    kind: str,
    blamed: tuple[int, ...],
    said: str,
    advice: str,
    members: Sequence[Member],
    gone: Sequence[Member],
) -> Verdict:
    seen = [_observation(m.rank, m.record) for m in members if m.came] + [
        _last_seen(m.rank, m.buffer) for m in gone if m.buffer is not None
    ]
    seen = _blamed_first(seen, blamed)
    return Verdict(kind, blamed, "", tuple(seen), compose_text(said, advice, _table(seen, blamed)))


def deadlock(directory: JobDirectory, stuck: Sequence[tuple[int, Record]]) -> Verdict:
    """Return the verdict on ranks that wait for each other in different groups.

    At fault are the first ranks to leave the common order of calls, or else those that wait over
    another axis than most.
    """
    buffers = {
        rank: buffer
        for rank in range(directory.size)
        if (buffer := directory.buffer_of(rank)) is not None
    }
    axes = {
        rank: _buffer(directory, rank).group_text(record.group).partition("\t")[0]
        for rank, record in stuck
    }
    with_messages = any(fields_of(record.call)[0] in MESSAGES for _, record in stuck)
    blamed = left_the_order(buffers, {rank: record.number for rank, record in stuck})
    if not blamed and not with_messages:
        blamed = minority(parties_by(axes, axes.__getitem__))
    seen: list[Observation] = []
    for rank, record in stuck:
        buffer = _buffer(directory, rank)
        over = _group_text(buffer.group_text(record.group))
        text = f"{_doing(buffer)}{call_text(record.call)} over {over}"
        seen.append(Observation(rank, text, record.place))
    seen = _blamed_first(seen, blamed)
    who = f"; {ranks_text(blamed)} left the order of the others" if blamed else ""
    said = f"ranks are blocked on each other in different groups{who}."
    advice = _EACH_MESSAGE if with_messages else _ONE_ORDER
    return Verdict(
        "deadlock", blamed, "order", tuple(seen), compose_text(said, advice, _table(seen, blamed))
    )


def wrong_route(
    recorder: Recorder, sequence: int, members: Sequence[Member], outliers: tuple[int, ...]
) -> Verdict:
    """Return the verdict on messages without a matching receive or send."""
    return _unfit(
        "route",
        recorder,
        sequence,
        outliers,
        {m: _route_text(recorder, m) for m in members if m.came},
    )


def wrong_splits(
    recorder: Recorder,
    sequence: int,
    members: Sequence[Member],
    shown: Mapping[int, tuple[list[int], list[int]]],
    outliers: tuple[int, ...],
) -> Verdict:
    """Return the verdict on an all_to_all in which sender and receiver expect different sizes."""
    texts = {
        members[place]: f"which sends {sent} elements to the ranks and expects {expected}"
        for place, (sent, expected) in shown.items()
    }
    return _unfit("splits", recorder, sequence, outliers, texts)


def too_large(recorder: Recorder, sequence: int, members: Sequence[Member]) -> Verdict:
    """Return the verdict on a message that is larger than the receiver's tensor."""
    seen = [_observation(m.rank, m.record) for m in members]
    size = [
        f"{m.record.sent} bytes are sent" if m.record.sent else f"{m.record.received} expected"
        for m in members
        if m.record is not None
    ]
    said = f"number {sequence} of the {group_text(recorder)} does not fit: {', '.join(size)}."
    return Verdict(
        "mismatch",
        (),
        "shape",
        tuple(seen),
        compose_text(said, "Receive into a tensor of the size that is sent.", _table(seen)),
    )


def _unfit(
    field: str,
    recorder: Recorder,
    sequence: int,
    outliers: tuple[int, ...],
    texts: Mapping[Member, str],
) -> Verdict:
    seen = [_observation(m.rank, m.record) for m in texts]
    seen = _blamed_first(
        [
            Observation(s.rank, f"{s.call} {text}", s.place)
            for s, text in zip(seen, texts.values(), strict=True)
        ],
        outliers,
    )
    who = f": {ranks_text(outliers)} differs from the others" if outliers else ""
    said = (
        f"messages between the ranks of {group_text(recorder)}, number {sequence}, do not fit{who}."
    )
    return Verdict(
        "mismatch",
        outliers,
        field,
        tuple(seen),
        compose_text(said, _MESSAGES, _table(seen, outliers)),
    )


def _route_text(recorder: Recorder, m: Member) -> str:
    ranks = recorder.group.ranks
    record = m.record
    dst, src = (m.route >> 32) - 1, (m.route & 0xFFFF_FFFF) - 1
    sent, received = (0, 0) if record is None else (record.sent, record.received)
    to = f"{sent} bytes to rank {ranks[dst]}" if dst >= 0 else "nothing"
    return (
        f"which sends {to} and expects "
        f"{f'{received} bytes from rank {ranks[src]}' if src >= 0 else 'nothing'}"
    )


def stall(
    job: Job, recorder: Recorder, sequence: int, members: Sequence[Member], waited: int
) -> Verdict:
    """Return the verdict on ranks that keep the others waiting.

    Those at the end of the chain, which do not wait.
    """
    missing = tuple(m.rank for m in members if m.came is False)
    blamed = _roots(job.directory, missing)
    waiting = _waiting(members)
    have = "has" if len(waiting) == 1 else "have"
    call = f"number {sequence} of {group_text(recorder)}"
    said = (
        f"{ranks_text(waiting)} {have} waited {waited / 1e9:.1f} s for {ranks_text(missing)} in "
        f"{call}."
    )
    where = f"where {ranks_text(blamed)} {'is' if len(blamed) == 1 else 'are'}"
    advice = f"See below {where}; sm.monitor.watchdog(timeout=) sets how long ranks wait."
    seen = [_observation(m.rank, m.record) for m in members if m.came]
    seen += [
        _last_seen(rank, job.directory.buffer_of(rank)) for rank in sorted({*missing, *blamed})
    ]
    seen = _blamed_first(seen, blamed)
    lines = _table(seen, blamed)
    for rank in blamed:
        lines += [
            f"rank {rank} is {how_it_is(job.directory.buffer_of(rank))}",
            *job.stack_of(rank),
        ]
    return Verdict("stall", blamed, "", tuple(seen), compose_text(said, advice, lines))


def _roots(directory: JobDirectory, missing: Iterable[int]) -> tuple[int, ...]:
    reached: set[int] = set()
    roots = set()
    ahead = list(missing)
    while ahead:
        rank = ahead.pop()
        if rank in reached:
            continue
        reached.add(rank)
        awaited = awaited_ranks(directory, rank)
        ahead += awaited
        if not awaited:
            roots.add(rank)
    return tuple(sorted(roots or reached))


def how_it_is(buffer: TraceBuffer | None) -> str:
    """Describe a process that others wait for."""
    if buffer is None:
        return "not known yet: it has made no mesh"
    silent = monotonic_ns() - buffer.words[Header.HEARTBEAT]
    if is_stopped(buffer):
        return "stopped by a signal (SIGSTOP, a debugger, Ctrl-Z)"
    if silent > _FROZEN_NS and is_local(buffer):
        why = "a call that holds the interpreter's lock, or no CPU time"
        return f"frozen: not even its watchdog thread has run for {silent / 1e9:.1f} s ({why})"
    at = buffer.words[Header.THREAD_ERROR]
    error = f"; {buffer.read_text(at)}" if at else ""
    return f"alive and busy elsewhere{error}"


def interrupted(rank: int, by: str, buffer: TraceBuffer) -> Verdict:
    """Return the verdict on a rank that a person or a scheduler has ended.

    Args:
        by: a key of `INTERRUPTIONS`.
    """
    return Verdict(
        "raised", (rank,), by, (_last_seen(rank, buffer),), f"rank {rank} was {INTERRUPTIONS[by]}"
    )


def raised(rank: int, kind: str, message: str, traceback: str, buffer: TraceBuffer) -> Verdict:
    """Return the verdict on a rank whose program raised an error."""
    seen = _last_seen(rank, buffer)
    said = f"rank {rank} raised {kind}: {message.partition(chr(10))[0]}"
    advice = f"Fix that; the other ranks end because they would wait for rank {rank}."
    lines = [f"  | {line}" for line in traceback.rstrip().splitlines()]
    return Verdict("raised", (rank,), kind, (seen,), compose_text(said, advice, lines))


def _buffer(directory: JobDirectory, rank: int) -> TraceBuffer:
    buffer = directory.buffer_of(rank)
    return directory.buffer if buffer is None else buffer


def _observation(rank: int, record: Record | None) -> Observation:
    return (
        Observation(rank, "?", "")
        if record is None
        else Observation(rank, call_text(record.call), record.place)
    )


def _last_seen(rank: int, buffer: TraceBuffer | None) -> Observation:
    record = None if buffer is None else buffer.last
    doing = _doing(buffer)
    if record is None:
        return Observation(rank, f"{doing}has called no collective", "")
    last = f"last {'called' if record.end else 'entered'} {call_text(record.call)}"
    return Observation(rank, doing + last, record.place)


def _doing(buffer: TraceBuffer | None) -> str:
    """Return what a rank has published to be in the middle of, as the begin of a line."""
    if buffer is None or buffer.words[Header.STATE] == RankState.LOST:  # then it is why
        return ""
    doing = buffer.read_text(buffer.words[Header.DOING])
    return f"{doing}; " if doing else ""


def _blamed_first(seen: Sequence[Observation], blamed: Sequence[int]) -> list[Observation]:
    return sorted(seen, key=lambda s: (s.rank not in blamed, s.rank))


def _table(seen: Sequence[Observation], blamed: Sequence[int] = ()) -> list[str]:
    """Return a line for each set of ranks that did the same; blamed ranks have separate lines."""
    alike: dict[tuple[bool, str, str], list[int]] = {}
    for s in seen:
        alike.setdefault((s.rank in blamed, s.call, s.place), []).append(s.rank)
    return [
        f"  {ranks_text(ranks)}: {call}{f' at {place}' if place else ''}"
        for (_, call, place), ranks in alike.items()
    ]
