"""Find a name for a default process group's job in its store, without waiting for others.

shardmesh/job/0           the name, chosen by the first rank
shardmesh/job/0/rank2     the rank info of the process that is rank 2
shardmesh/job/0/stale     set by a rank that finds another process, or a dead one, there: an earlier
                          attempt of a restarted job left them, since torchrun keeps one store for
                          all attempts
shardmesh/job/1           the next name, this attempt's
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import Counter
from typing import Any

from ..store_keys import StoreKeys
from ..store_values import StoreValueError, job_name
from .rank_info import RankInfo, machine, own_rank_info

_joined: Counter[str] = Counter()


def find_name(store: Any, rank: int) -> tuple[str, str] | None:
    """Return the name, and the key that is set if it turns out to be an earlier attempt's.

    None if the store keeps nothing.

    Raises: StoreValueError for values that no rank of the job has written.

    Communication: a few questions to the store; waits for no rank.
    """
    info, jobs = own_rank_info(rank, {}, 0, os.environ), StoreKeys(store, "shardmesh/job")
    try:
        for number in itertools.count():
            name = jobs.claim(str(number), secrets.token_hex(8), job_name)
            record = jobs.below(str(number))
            if not record.has("stale") and _is_ours(store, record, info):
                # a store that is used for several default groups keeps the name, but not the trace
                # buffers
                _joined[name] += 1
                own_name = name if _joined[name] == 1 else f"{name}-{_joined[name]}"
                return own_name, f"shardmesh/job/{number}/stale"
    except StoreValueError:
        raise
    except (RuntimeError, AttributeError):  # the "fake" backend's store; no store at all under MPI
        pass
    return None


def _is_ours(store: Any, record: StoreKeys, info: RankInfo) -> bool:
    holder = record.claim(f"rank{info.rank}", info.to_json(), RankInfo.from_json)
    if holder.is_same_process(info) and not _others_are_gone(store, record, info):
        return True
    record.set("stale")
    return False


def _others_are_gone(store: Any, record: StoreKeys, info: RankInfo) -> bool:
    """Return whether a process of this host that used the name has ended.

    Only torchrun uses a store again.
    """
    if "TORCHELASTIC_MAX_RESTARTS" not in os.environ or not store.has_extended_api():
        return False
    record.sign(machine(), info.rank)
    ranks = record.signed(machine()) - {info.rank}
    names = [f"rank{rank}" for rank in sorted(ranks)]
    if names and not record.has(*names):
        raise record.bad_value(
            machine(), record.read(machine(), str), "it names ranks that have not come"
        )
    return any(holder.is_gone() for holder in record.read_all(names, RankInfo.from_json))
