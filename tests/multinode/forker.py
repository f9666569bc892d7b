"""A process on a host that has imported everything and forks the host's ranks, since importing torch takes seconds.

    python -m tests.multinode.forker FIFO        then one `Job` as JSON a line

A job is what `torchrun --nnodes 2 --nproc-per-node 2` does, with a function in place of a script: an agent, in a process group of
its own (so that a test can kill or stop a host's part of the job at once), and two ranks that it forks.
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
class Job:
    """Attributes:
    program: name of a function of `tests.multinode.programs`, which is given `folder`.
    folder: for what ranks and agents write.
    torchrun: arguments of its command line.
    """

    program: str
    folder: str
    torchrun: list[str]

    def file(self, what: str) -> Path:
        """Where this host's agent writes its process group, its status when it is over, and what it prints."""
        return Path(self.folder) / f"{os.uname().nodename}.{what}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def serve(fifo: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with open(fifo) as lines:
        for line in lines:
            if os.fork() == 0:
                status = _run(job := Job(**json.loads(line)))
                programs.write(job.file("status"), str(status))
                os._exit(status)


def _run(job: Job) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(job.file("log"), os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    programs.write(job.file("pid"), str(os.getpid()))
    logging.disable()  # torch's formatter imports its compiler to write down that a rank has failed, which takes seconds
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
