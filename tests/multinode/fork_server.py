"""A fork server on a host, which forks the host's ranks without importing torch again.

    python -m tests.multinode.fork_server FIFO        then one `TorchrunJob` as JSON per line

A job is what `torchrun --nnodes 2 --nproc-per-node 2` runs, with a function instead of a script: an
agent in a separate process group (so that a test can kill or stop the host's part of the job at
once), and two ranks that it forks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.launcher.api import elastic_launch

from tests.multinode import programs


@dataclass(frozen=True)
class TorchrunJob:
    """The part of a job on one host.

    Attributes:
        program: name of a function of `tests.multinode.programs`, called with `folder`.
        folder: folder for files of ranks and agents.
        torchrun: command-line arguments of torchrun.
    """

    program: str
    folder: str
    torchrun: list[str]

    def file(self, what: str) -> Path:
        """Return a file of this host's agent: "pid" with its process group, "status" with its exit
        status, or "log".
        """
        return Path(self.folder) / f"{os.uname().nodename}.{what}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def serve(fifo: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with open(fifo) as lines:
        for line in lines:
            if os.fork() == 0:
                status = _run(job := TorchrunJob(**json.loads(line)))
                programs.write(job.file("status"), str(status))
                os._exit(status)


def _run(job: TorchrunJob) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(job.file("log"), os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    programs.write(job.file("pid"), str(os.getpid()))
    # torch's formatter imports its compiler to log a failed rank, which takes seconds
    logging.disable()
    try:
        config, *_ = torchrun.config_from_args(torchrun.parse_args([*job.torchrun, "unused.py"]))
        config.start_method = "fork"
        elastic_launch(config, getattr(programs, job.program))(job.folder)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
