"""What each rank of a job of a faulty program runs, forked by `tests/forked.py`."""

from __future__ import annotations

import faulthandler
import importlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.fault import RANKS
from tests.faults.rank_context import EventLog, RankContext, TorchRankContext


def run(
    table: str, fault: str, backend: str, outliers: list[int], folder: str, limit_s: float
) -> None:
    """Run a program on this rank, and log what happens.

    Args:
        table: module with a mapping `FAULTS` of programs by name.
        fault: name of the fault.
        backend: "ours", "torch", or "detail" for torch with TORCH_DISTRIBUTED_DEBUG=DETAIL.
        outliers: the ranks that diverge; none to get the expected results.
        folder: folder for the ranks' events.
        limit_s: seconds after which a rank that hangs is killed.
    """
    rank, program = int(os.environ["RANK"]), importlib.import_module(table).FAULTS[fault]
    events = EventLog(str(Path(folder, f"{rank}.events")))
    faulthandler.dump_traceback_later(limit_s - 1)  # of one that hangs
    context = RankContext if backend == "ours" else TorchRankContext
    ctx = context(rank, RANKS, rank in outliers, events)
    ctx.short_timeout = program.has_short_timeout
    try:
        ctx.start(program.mesh)
        value = program.program(ctx)
    except BaseException as error:
        events.add("error", **_described(error))
        raise
    events.add("done", value=value)


def _described(error: BaseException) -> dict[str, Any]:
    verdict = getattr(error, "verdict", None)
    return {
        "error": type(error).__name__,
        "text": str(error),
        "verdict": None if verdict is None else asdict(verdict),
    }


def environment(rank: int, port: int, backend: str, folder: str) -> dict[str, str]:
    """Return the variables that `launch` sets on a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"faults-{port}",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if backend == "detail" else "OFF",
        "SHARDMESH_WATCH_DIR": folder,
    }
