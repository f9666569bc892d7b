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

from ..store_values import StoreValueError, bad_value, job_name, parsed, rank_list
from .rank_info import RankInfo, machine, own_rank_info

_joined: Counter[str] = Counter()


def find_name(store: Any, rank: int) -> tuple[str, str] | None:
    """Return the name, and the key that is set if the name turns out to be an earlier attempt's;
    None if the store keeps nothing.

    Raises: StoreValueError for values that no rank of the job has written.
    Communication: a few questions to the store; waits for no rank.
    """
    info = own_rank_info(rank, {}, 0, os.environ)
    try:
        for number in itertools.count():
            record = f"shardmesh/job/{number}"
            name = parsed(record, store.compare_set(record, "", secrets.token_hex(8)), job_name)
            if not store.check([f"{record}/stale"]) and _is_ours(store, record, info):
                _joined[name] += (
                    # a store that is used for several default groups keeps the name, but not the
                    # trace buffers
                    1
                )
                return (
                    name if _joined[name] == 1 else f"{name}-{_joined[name]}"
                ), f"{record}/stale"
    except StoreValueError:
        raise
    except (RuntimeError, AttributeError):  # the "fake" backend's store; no store at all under MPI
        pass
    return None


def _is_ours(store: Any, record: str, info: RankInfo) -> bool:
    key = f"{record}/rank{info.rank}"
    holder = parsed(key, store.compare_set(key, "", info.to_json()), RankInfo.from_json)
    if holder.is_same_process(info) and not _others_are_gone(store, record, info):
        return True
    store.set(f"{record}/stale", "1")
    return False


def _others_are_gone(store: Any, record: str, info: RankInfo) -> bool:
    """Return whether a process of this host that used the name has ended, as under torchrun."""
    if "TORCHELASTIC_MAX_RESTARTS" not in os.environ or not store.has_extended_api():
        return False
    here = f"{record}/{machine()}"
    store.append(here, f"{info.rank} ")
    ranks = parsed(here, store.get(here), rank_list) - {info.rank}
    keys = [f"{record}/rank{rank}" for rank in sorted(ranks)]
    if keys and not store.check(keys):
        raise bad_value(here, store.get(here), "it names ranks that have not come")
    infos = store.multi_get(keys) if keys else []
    return any(
        parsed(key, text, RankInfo.from_json).is_gone()
        for key, text in zip(keys, infos, strict=True)
    )
