"""Four gloo ranks of which one is killed; a separate program, which forks the ranks after importing
torch.

python crash.py PORT     prints nothing; the ranks' trace buffers stay in SHARDMESH_WATCH_DIR
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import torch

import shardmesh as sm
from shardmesh.mesh.errors import RankLostError
from shardmesh.mesh.monitor.ledger.ledger import mark_step


def main() -> None:
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    x = sm.device_put(torch.arange(8.0), mesh, sm.P("dp"))
    for step in range(3):
        mark_step(step)
        x.redistribute(sm.P()).to_local()
        mesh.group("tp").all_reduce(torch.ones(3))
    if mesh.world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.group().all_reduce(torch.ones(5), "max")


def start(rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        code = 1
        try:
            main()
        except RankLostError:
            code = 7
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(
        WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1]
    )
    codes = [os.waitpid(pid, 0)[1] for pid in [start(rank) for rank in range(4)]]
    print([os.waitstatus_to_exitcode(code) for code in codes])
