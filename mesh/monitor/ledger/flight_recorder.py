"""Export the ledger in the format of torch's Flight Recorder.

`torchfrtrace` and other tools read it: a pickle per rank.

trace_rank_0  trace_rank_1 ...      what `torch.distributed.flight_recorder.fr_trace` reads
rank_0.json   rank_1.json  ...      the same as JSON, under a name that it ignores
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...settings import settings
from ...text import whole_number
from .entries import LedgerEntry, RankLedger

_VERSION = "2.10"
# Operations that torch has, too. Others are exported as an all_to_all of the bytes that move, as
# far as torchfrtrace can compare that.
_KNOWN = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier"}
)


def save(ranks: Mapping[int, RankLedger], folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps(ranks).items():
        (Path(folder) / f"trace_rank_{rank}").write_bytes(pickle.dumps(dump))
        (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(dump, indent=1))


def dumps(ranks: Mapping[int, RankLedger]) -> dict[int, dict[str, Any]]:
    """Return by rank what torch would have dumped there.

    The backend is always called gloo, since the ledger does not record it.
    """
    names = _names(ranks)
    return {rank: _dump(ledger.entries, names) for rank, ledger in ranks.items()}


def _names(ranks: Mapping[int, RankLedger]) -> dict[int, str]:
    """Return the names of groups, the same for all ranks.

    A mesh may have been made on only some of them before the first call.
    """
    names: dict[int, str] = {}
    for ledger in ranks.values():
        for entry in ledger.entries:
            names.setdefault(entry.group_key, entry.group)
    return names


def _dump(entries: Sequence[LedgerEntry], names: Mapping[int, str]) -> dict[str, Any]:
    groups = {entry.group_key: entry.ranks for entry in entries}
    places = {key: place for place, key in enumerate(groups)}
    return {
        "version": _VERSION,
        "comm_lib_version": "",
        "pg_config": {
            _uid(key): {"name": _uid(key), "desc": names[key], "ranks": str(list(r))}
            for key, r in groups.items()
        },
        "pg_status": {
            _uid(key): _status(e for e in entries if e.group_key == key) for key in groups
        },
        "entries": [
            _entry(entry, places[entry.group_key], names[entry.group_key]) for entry in entries
        ],
    }


def _uid(key: int) -> str:
    return f"{key:016x}"


def _status(entries: Iterable[LedgerEntry]) -> dict[str, int]:
    called = list(entries)
    done = [entry.sequence + 1 for entry in called if not entry.is_under_way]
    last = called[-1].sequence + 1
    return {
        "last_enqueued_collective": last,
        "last_started_collective": last,
        "last_completed_collective": max(done, default=-1),
    }


def _entry(entry: LedgerEntry, group: int, name: str) -> dict[str, Any]:
    sizes = _sizes(entry)
    dtypes = [_dtype(entry.dtype)]
    start = int(entry.start * 1e9)
    end = None if entry.end is None else int(entry.end * 1e9)
    return {
        "record_id": entry.record,
        "pg_id": group,
        "process_group": (_uid(entry.group_key), name),
        "collective_seq_id": entry.sequence + 1,
        "p2p_seq_id": 0,
        "op_id": entry.sequence + 1,
        "profiling_name": "gloo:" + (entry.op if _is_known(entry) else f"all_to_all ({entry.op})"),
        "time_created_ns": start,
        "input_sizes": [sizes[0]],
        "output_sizes": [sizes[1]],
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "started" if end is None else "completed",
        "time_discovered_started_ns": start,
        "time_discovered_completed_ns": end,
        "retired": end is not None,
        "timeout_ms": int(settings().timeout * 1000),
        "is_p2p": False,
        "frames": [_frame(entry)],
    }


def _is_known(entry: LedgerEntry) -> bool:
    return entry.op in _KNOWN and (entry.elements is not None or entry.op == "all_to_all")


def _sizes(entry: LedgerEntry) -> tuple[list[int], list[int]]:
    """Return the flat sizes of input and output.

    Of an all_to_all without the part that stays, so that sums over ranks agree.
    """
    size = entry.elements or 0
    n = len(entry.ranks)
    if not _is_known(entry) or entry.elements is None:
        item = _empty(entry.dtype).element_size()
        return [entry.bytes_sent // item], [entry.bytes_received // item]
    if entry.op == "all_gather":
        return [size], [size * n]
    if entry.op == "reduce_scatter":
        return [size], [size // n]
    return [size], [size]


def _frame(entry: LedgerEntry) -> dict[str, Any]:
    """Return the user's line. Its function holds what the format lacks: reduction and layouts."""
    file, _, line = entry.place.rpartition(":")
    return {"name": entry.text, "filename": file, "line": whole_number(line) or 0}


@lru_cache
def _empty(dtype: str) -> torch.Tensor:
    return torch.empty(0, dtype=getattr(torch, dtype))


def _dtype(dtype: str) -> str:
    """Return the dtype's name in torch's C++ code: "Float" for "float32"."""
    return _empty(dtype).type().removeprefix("torch.").removesuffix("Tensor")
