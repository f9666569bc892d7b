"""Host time of a launch of Triton kernels, through Triton and by `kernels/launcher.py`, on a device
that is not there.

    python benchmarks/launch_time.py                needs triton, no GPU
    python benchmarks/launch_time.py --rounds 1     of 200 calls (default 20)

The launcher of the driver is a function that does nothing, so what is timed is Python: of Triton,
of the launcher, and of the call of the library. The driver's own launch, 2 to 3 us, comes on top of
both. Processor time, the least of all rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.kernels import compiled
from tests.kernels.launched import device

CALLS = 200


def cases() -> dict[str, Callable[[], object]]:
    from shardmesh.kernels import random, symmetric
    from shardmesh.kernels.copy import compile_pack, pack_many
    from shardmesh.kernels.symmetric import one_shot_all_reduce

    pack = compile_pack((512, 2048), compiled.chunks((512, 2048), 1))
    x, flat = compiled.meta(512, 2048), compiled.meta(512 * 2048)
    peers, y, out = compiled.peers(), compiled.meta(512, 128), compiled.meta(512, 1024)
    drawn = {"seed": 1, "stream": 2, "device": "meta", "dtype": torch.bfloat16}
    box = compiled.chunks((1024, 1024), 1)[1]
    return {
        "pack": lambda: pack(x, flat),
        "pack of 8": lambda: pack_many([pack] * 8, [x] * 8, flat),
        "uniform": lambda: random.uniform((1024, 1024), box, **drawn),
        "one-shot all_reduce": lambda: one_shot_all_reduce(peers, out, out),
        "symmetric all_gather (4 launches)": lambda: symmetric.all_gather(peers, y, out, 1),
    }


def always() -> bool:
    """Stand in for a profiler that wants to be told of launches, so that each goes through
    Triton.
    """
    return True


def microseconds(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - start) / CALLS * 1e6)
    return min(times)


def main() -> None:
    from shardmesh.kernels import launcher

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(f"{'us of host time per call':<36}{'by Triton':>12}{'kept':>12}{'ratio':>8}")
    for name, call in cases().items():
        with device(lambda *args: None):
            connected = microseconds(call, rounds)
            with mock.patch.object(launcher, "_has_hooks", always):
                plain = microseconds(call, rounds)
        print(f"{name:<36}{plain:>12.1f}{connected:>12.1f}{plain / connected:>8.1f}")


if __name__ == "__main__":
    main()
