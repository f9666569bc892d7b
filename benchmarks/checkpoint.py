"""Time of saving and loading one state: shardmesh compared with torch.distributed.checkpoint.

    python benchmarks/checkpoint.py                          4 gloo processes, 201 MB, two minutes
    python benchmarks/checkpoint.py --dir /mnt/scratch       on another disk
    python benchmarks/checkpoint.py --quick                  2 processes, 2 MB, seconds
    python benchmarks/checkpoint.py --json figures.json --markdown tables.md

The state is that of a transformer and its AdamW: parameters and two moments, sharded along dim 0
over all ranks. Both implementations have the same values in the same layouts, as ShardedTensors and
DTensors, interleaved in random order; a round starts with a barrier and its time is that of the
slowest rank. Both sync files before a save returns (torch's default), each save replaces the files
of the last one, and loads read new files from the page cache.

    save             the whole state
    load             onto the layouts of the save
    load replicated  every rank gets the whole state
    load other cut   sharded along dim 1

Every loaded state is compared bitwise with the saved one, and each implementation loads the other's
files. Ours write and verify a CRC-32 of every piece; torch's have no checksum.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as dt
from measure import Times, slowest
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

import shardmesh as sm
from shardmesh import P

OURS, THEIRS = "shardmesh", "torch.distributed.checkpoint"
# The sharded dim; None for replicated.
CUTS = {"load": 0, "load replicated": None, "load other cut": 1}
AXIS = "x"

Call = Callable[[], Any]


def shapes(width: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a transformer's parameters."""
    layer = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "norm": (width,),
    }
    shape_of = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    return {"embedding": (vocabulary, width), **shape_of}


class CheckpointSetup:
    """The states of both implementations over one process group."""

    def __init__(self, sizes: tuple[int, int, int], folder: Path) -> None:
        world = int(os.environ["WORLD_SIZE"])
        self.ours = sm.init_device_mesh("cpu", (world,), axis_names=(AXIS,))
        self.theirs = init_torch_mesh("cpu", (world,), mesh_dim_names=(AXIS,))
        self.folders = {OURS: folder / "ours", THEIRS: folder / "theirs"}
        generator = torch.Generator().manual_seed(0)
        self.whole = {
            f"{kind}.{name}": torch.randn(shape, generator=generator)
            for kind in ("model", "exp_avg", "exp_avg_sq")
            for name, shape in shapes(*sizes).items()
        }
        self.nbytes = sum(x.nbytes for x in self.whole.values())

    def our(self, dim: int | None, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state as ShardedTensors sharded along `dim`; tensors without this dim are
        replicated.
        """
        specs = {
            name: P() if dim is None or dim >= x.dim() else P(*[None] * dim, AXIS)
            for name, x in whole.items()
        }
        return {
            name: sm.distribute_tensor(x, self.ours, specs[name], src_data_rank=None)
            for name, x in whole.items()
        }

    def their(self, dim: int | None, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the same as DTensors."""
        kinds = {
            name: dt.Replicate() if dim is None or dim >= x.dim() else dt.Shard(dim)
            for name, x in whole.items()
        }
        return {
            name: dt.distribute_tensor(x, self.theirs, [kinds[name]], src_data_rank=None)
            for name, x in whole.items()
        }

    def saves(self) -> dict[str, Call]:
        """Return a save by each implementation."""
        ours, theirs = self.our(0, self.whole), self.their(0, self.whole)
        return {
            OURS: lambda: sm.checkpoint.save(ours, self.folders[OURS], step=0),
            THEIRS: lambda: dcp.save(
                theirs, storage_writer=dcp.FileSystemWriter(self.folders[THEIRS], overwrite=True)
            ),
        }

    def loads(self, dim: int | None) -> dict[str, Call]:
        """Return a load by each implementation; it returns the local parts."""
        zeros = {name: torch.zeros_like(x) for name, x in self.whole.items()}
        like, theirs = self.our(dim, zeros), self.their(dim, zeros)

        def theirs_loaded() -> dict[str, Any]:
            dcp.load(theirs, checkpoint_id=self.folders[THEIRS])
            return {name: x._local_tensor for name, x in theirs.items()}

        return {
            OURS: lambda: {
                name: x.to_local()
                for name, x in sm.checkpoint.load(self.folders[OURS], like=like).items()
            },
            THEIRS: theirs_loaded,
        }

    def check(self, loads: dict[str, Call], dim: int | None) -> None:
        """Check that both load bitwise what was saved."""
        expected = {name: x._local_tensor for name, x in self.their(dim, self.whole).items()}
        for who, load in loads.items():
            wrong = [
                name
                for name, x in load().items()
                if not torch.equal(x.view(torch.int32), expected[name].view(torch.int32))
            ]
            if wrong:
                raise RuntimeError(
                    f"{who}: the loaded values of {wrong[:3]} differ from the saved ones"
                )

    def check_each_other(self) -> None:
        """Check that each implementation loads what the other saved."""
        expected = self.their(0, self.whole)
        zeros = {name: torch.zeros_like(x) for name, x in self.whole.items()}
        theirs = self.their(0, zeros)
        dcp.load(theirs, checkpoint_id=self.folders[OURS] / "step-00000000")
        ours = sm.checkpoint.load(self.folders[THEIRS], like=self.our(0, zeros))
        for name, x in expected.items():
            if not torch.equal(theirs[name]._local_tensor, x._local_tensor) or not torch.equal(
                ours[name].to_local(), x._local_tensor
            ):
                raise RuntimeError(f"{name} differs from what the other implementation saved")


def timed(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call per round on this rank, after a warm-up round."""
    order, seconds_of = random.Random(0), {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name in order.sample(list(calls), len(calls)):
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            seconds_of[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in seconds_of.items()}


def measured(
    sizes: tuple[int, int, int], folder: Path, rounds: int
) -> tuple[int, dict[str, dict[str, list[float]]]]:
    """Return the bytes of the state, and this rank's seconds per round by operation and
    implementation.
    """
    setup = CheckpointSetup(sizes, folder)
    times = {"save": timed(setup.saves(), rounds)}
    for what, dim in CUTS.items():
        loads = setup.loads(dim)
        setup.check(loads, dim)
        times[what] = timed(loads, rounds)
    setup.check_each_other()
    dist.barrier()
    return setup.nbytes, times


def main() -> None:
    """Measure, print the table and write the files asked for."""
    parser = argparse.ArgumentParser(
        description="Save and load: shardmesh compared with torch.distributed.checkpoint"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="of each implementation")
    parser.add_argument("--dir", help="where to write; a temporary folder by default")
    parser.add_argument("--quick", action="store_true", help="2 ranks, 2 MB, 2 rounds")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--markdown", metavar="FILE", help="write the table to this file")
    options = parser.parse_args()
    ranks, rounds = (2, 2) if options.quick else (options.ranks, options.rounds)
    sizes = (64, 2, 1024) if options.quick else (512, 4, 8192)
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        results = sm.launch(measured, ranks, (sizes, folder, rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(results, options)


def report(
    results: list[tuple[int, dict[str, dict[str, list[float]]]]], options: argparse.Namespace
) -> None:
    """Print the table, and write the files asked for."""
    nbytes, first = results[0]
    times = {
        what: {
            who: slowest([Times(tuple(times_of[what][who])) for _, times_of in results])
            for who in (OURS, THEIRS)
        }
        for what in first
    }
    columns = ("", f"{THEIRS}, ms", f"{OURS}, ms", "ratio of medians", "of minima")
    rows = [
        (
            what,
            *(
                f"{times[what][who].median * 1e3:.0f} (min {times[what][who].best * 1e3:.0f})"
                for who in (THEIRS, OURS)
            ),
            f"{times[what][OURS].median / times[what][THEIRS].median:.2f}x",
            f"{times[what][OURS].best / times[what][THEIRS].best:.2f}x",
        )
        for what in times
    ]
    title = f"{nbytes / 1e6:.0f} MB, {len(results)} ranks"
    show(title, columns, rows)
    env = environment()
    print(f"\n{environment_line(env)}")
    figures = {
        what: {who: times_of.as_dict() for who, times_of in by.items()}
        for what, by in times.items()
    }
    write_json(options.json, {"environment": env, "times": figures})
    write_markdown(
        options.markdown,
        f"# Checkpoints: {title}\n\n{markdown(columns, rows)}\n\n{environment_line(env)}",
    )


if __name__ == "__main__":
    main()
