"""Robustness of checkpoints: saves killed at every call and at random times, full disks, damaged
files, random pairs of meshes.

    python benchmarks/checkpoint_faults.py                    everything, 16 minutes on two cores
    python benchmarks/checkpoint_faults.py --quick            a few of each
    python benchmarks/checkpoint_faults.py --only pairs       calls, moments, disks, damage or pairs
    python benchmarks/checkpoint_faults.py --json figures.json

    calls      SIGKILL of one rank and of all four, before and halfway through every call of rank 0
               and rank 1 that changes the disk: in a save of a new step, in async_save, and in a
               save that replaces a step
    moments    the same at 500 random times during a longer save
    disks      a file system of every size from one page to sufficient, if one can be mounted
    damage     2,000 flipped bits, truncated, missing and swapped files
    pairs      2,000 random trees, saved on one random mesh and loaded onto another, in simulation

After each, a load must return exactly the old or the new checkpoint, bitwise, or raise an error
that names a file; after a kill the next save must succeed. The programs are those of
tests/sharding/checkpoint/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the programs are tests

import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from tests.faults.runner import Runner
from tests.sharding.checkpoint.kills import FAULTS, VARIABLE, loaded_step
from tests.sharding.checkpoint.trees import pair

NEVER = 10**6  # a call number that no save reaches
LONGEST_S = 0.12  # about the duration of a longer save
X = torch.arange(600.0).reshape(60, 10)


def must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def calls() -> dict[tuple[str, int], int]:
    """Return how many calls of each rank change the disk, in a save of each kind without a kill."""
    counts: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory(prefix="shardmesh-kills-") as base:
        os.environ[VARIABLE] = base
        with Runner("tests.sharding.checkpoint.kills") as runner:
            for kind in ("save", "replace", "async"):
                for rank in (0, 1):
                    outcome = runner.run(FAULTS[f"{kind} one {rank} {NEVER} before"])
                    must(
                        [r.status for r in outcome.ranks] == [0] * 4,
                        f"{kind} without a kill: {outcome}",
                    )
                    counts[kind, rank] = int(outcome.ranks[rank].value)
    return counts


def call_names() -> Iterator[str]:
    for (kind, rank), count in calls().items():
        for who in ("one", "all"):
            yield from (
                f"{kind} {who} {rank} {call} {how}"
                for call in range(count)
                for how in ("before", "half")
            )


def moment_names(count: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(count):
        who, rank = rng.choice(("one", "all")), rng.randrange(4)
        yield (
            f"{rng.choice(('save', 'replace', 'async'))} {who} {rank} "
            f"{rng.uniform(0, LONGEST_S):.4f} after"
        )


def killed(names: Sequence[str], at_once: int) -> Counter[str]:
    """Count what is loaded after each kill, and the errors of the surviving ranks."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="shardmesh-kills-") as base:
        os.environ[VARIABLE] = base
        with (
            Runner("tests.sharding.checkpoint.kills") as runner,
            ThreadPoolExecutor(at_once) as pool,
        ):
            for name, outcome in zip(
                names, pool.map(lambda name: runner.run(FAULTS[name]), names), strict=True
            ):
                must(not outcome.killed, f"{name}: ranks {outcome.killed} hung")
                dead = sum(rank.status == -9 for rank in outcome.ranks)
                outcomes[f"{dead} ranks killed"] += 1
                outcomes.update(rank.error for rank in outcome.ranks if rank.error)
                outcomes[f"step {loaded_step(Path(base), name)} is loaded"] += 1
    return outcomes


# -- disks, damage and pairs -----------------------------------------------------------------------


def saved(folder: Path, step: int) -> None:
    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("a",))
        x = sm.distribute_tensor(X + step, mesh, P("a"), src_data_rank=None)
        save({"x": x, "whole": X * step, "step": step}, folder, step=step)

    sm.simulate(2)(program)()


def outcome_of(folder: Path) -> str:
    """Return which step is loaded, or that an error names the file."""

    def program() -> int:
        mesh = sm.init_device_mesh("cpu", (3,), axis_names=("a",))
        loaded = load(
            folder,
            {"x": sm.Layout.of(mesh, P("a"), X.shape), "whole": torch.empty_like(X), "step": None},
        )
        must(
            torch.equal(loaded["x"].full_tensor(), X + loaded["step"])
            and torch.equal(loaded["whole"], X * loaded["step"]),
            "a mix",
        )
        return loaded["step"]

    try:
        return f"step {sm.simulate(3)(program)()[0]} is loaded"
    except CheckpointError as error:
        must(str(folder) in str(error), str(error))
        return "an error that names the file"


def disks(count: int) -> Counter[str]:
    """Save to file systems of 1 to `count` pages; the smallest are too small."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="shardmesh-disk-") as base:
        for pages in range(1, 1 + count):
            mount = ["mount", "-t", "tmpfs", "-o", f"size={4 * pages}k", "tmpfs", base]
            if subprocess.run(mount, capture_output=True).returncode:
                return Counter({"no file system can be mounted here": 1})
            try:
                outcomes.update(_on_small_disk(Path(base)))
            finally:
                subprocess.run(["umount", base], check=True)
    return outcomes


def _on_small_disk(folder: Path) -> list[str]:
    try:
        saved(folder, 1)
        saved(folder, 2)
        return [outcome_of(folder)]
    except CheckpointError as error:
        must("No space left on device" in str(error), str(error))
        must(
            all(".tmp-" not in path.name for path in folder.iterdir()),
            f"{folder} still has temporary files",
        )
        outcome = outcome_of(folder) if any(folder.iterdir()) else "nothing is there"
        return ["the save raised", outcome]


def damage(count: int) -> Counter[str]:
    """Damage one file of step 2 at a time, and load."""
    outcomes: Counter[str] = Counter()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="shardmesh-damage-") as base:
        folder = Path(base)
        saved(folder, 1)
        saved(folder, 2)
        newest, older = folder / "step-00000002", folder / "step-00000001"
        good = {path.name: path.read_bytes() for path in newest.iterdir()}
        for _ in range(count):
            what, name = rng.choice(CHANGES), rng.choice(sorted(good))
            what(newest / name, older, good, rng)
            outcomes[f"{what.__name__}: {outcome_of(folder)}"] += 1
            for each, data in good.items():
                (newest / each).write_bytes(data)
    return outcomes


def flipped(path: Path, older: Path, good: dict[str, bytes], rng: random.Random) -> None:
    data = bytearray(good[path.name])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut_short(path: Path, older: Path, good: dict[str, bytes], rng: random.Random) -> None:
    path.write_bytes(good[path.name][: rng.randrange(len(good[path.name]))])


def missing(path: Path, older: Path, good: dict[str, bytes], rng: random.Random) -> None:
    path.unlink()


def swapped(path: Path, older: Path, good: dict[str, bytes], rng: random.Random) -> None:
    other = rng.choice([name for name in good if name != path.name])
    path.write_bytes(good[other])
    path.with_name(other).write_bytes(good[path.name])


def of_older_step(path: Path, older: Path, good: dict[str, bytes], rng: random.Random) -> None:
    path.write_bytes((older / path.name).read_bytes())


CHANGES = [flipped, cut_short, missing, swapped, of_older_step]


def pairs(count: int) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="shardmesh-pairs-") as base:
        tensors = sum(pair(seed, Path(base, str(seed))) for seed in range(count))
    return Counter({"pairs, bit for bit": count, "tensors": tensors})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument(
        "--only", action="append", choices=["calls", "moments", "disks", "damage", "pairs"]
    )
    parser.add_argument(
        "--at-once", type=int, default=3, help="number of concurrent jobs of four processes"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    few = arguments.quick
    parts: dict[str, Callable[[], Counter[str]]] = {
        "pairs": lambda: pairs(20 if few else 2000),
        "damage": lambda: damage(20 if few else 2000),
        "disks": lambda: disks(3 if few else 24),
        "calls": lambda: killed(list(call_names())[:: 40 if few else 1], arguments.at_once),
        "moments": lambda: killed(list(moment_names(4 if few else 500)), arguments.at_once),
    }
    figures = {}
    for name in arguments.only or parts:
        start = time.perf_counter()
        figures[name] = {**parts[name](), "seconds": round(time.perf_counter() - start, 1)}
        print(f"{name:8} {figures[name]}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
