"""Everything that one GPU can tell in twenty minutes, on one page: `make gpu-test`, or
`python -m tests.gpu.run`.

    python -m tests.gpu.run                     writes benchmarks/results/<date>-gpu.md
    python -m tests.gpu.run --minutes 9 --only probes --only "kernels' share"
    python -m tests.gpu.run --whole             all tests, with more examples, and whole benchmarks;
                                                takes hours
    python -m tests.gpu.run --stand-in          the same command on a machine without a GPU, which
                                                proves the command alone

What matters most comes first. A step that fails or hangs does not end the run: each has a limit,
and the page is written after each. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from glob import glob
from pathlib import Path

from shardmesh.mesh.doctor.facts import collect_facts
from tests.gpu.page import document
from tests.gpu.probes import PROBES
from tests.gpu.steps import Outcome, Step, run, run_probes

_ROOT = Path(__file__).parents[2]
_PROBES = "probes"
_PROBES_S = 180.0
_LIBRARY = (
    "tests/sharding/optim",
    "tests/sharding/redistribute",
    "tests/sharding/tensor/test_random.py",
    "tests/sharding/parallel/data",
    "tests/sharding/parallel/context",
    "tests/sharding/ops/test_recomputation.py",
)
_WITH_GPU_TESTS = ("tests/gpu", "tests/kernels", "tests/sharding/parallel/context")
_HOURS = 24 * 3600.0


def quick_steps(tables: Path) -> list[Step]:
    """Return the steps of twenty minutes; their limits and that of the probes add up to that."""
    python = sys.executable
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "4", "--dist", "loadgroup"]
    kernels, training = tables / "kernels.md", tables / "one_device.md"
    return [
        Step(
            "tests that need a GPU",
            [python, "-m", "pytest", "-q", "-m", "gpu", *_WITH_GPU_TESTS],
            120,
        ),
        Step("tests of the kernels", [*pytest, "-m", "not gpu and not slow", "tests/kernels"], 210),
        Step(
            "tests of the library on the GPU",
            [*pytest, "-m", "not gpu and not slow", "--device", "cuda", *_LIBRARY],
            240,
        ),
        Step(
            "kernels' share of the copy rate",
            [python, "benchmarks/kernels.py", "--quick", "--markdown", str(kernels)],
            120,
            kernels,
        ),
        Step(
            "training steps on one device",
            [python, "benchmarks/one_device.py", "--markdown", str(training)],
            180,
            training,
        ),
        _sanitizer("memcheck", ["tests/kernels/test_strided_kernels.py"], 150),
    ]


def whole_steps(tables: Path) -> list[Step]:
    """Return the steps without limits."""
    python = sys.executable
    pytest = [sys.executable, "-m", "pytest", "--hypothesis-profile", "thorough", "-m"]
    kernels, training = tables / "kernels.md", tables / "one_device.md"
    on_gpu = ["--device", "cuda", "-n", "4", "--dist", "loadgroup", "tests/mesh", "tests/sharding"]
    return [
        Step("tests that need a GPU", [*pytest, "gpu"], _HOURS),
        Step("tests of the kernels", [*pytest, "not gpu", "tests/kernels"], _HOURS),
        Step("tests of the library on the GPU", [*pytest, "not gpu", *on_gpu], _HOURS),
        Step(
            "kernels' share of the copy rate",
            [python, "benchmarks/kernels.py", "--markdown", str(kernels)],
            _HOURS,
            kernels,
        ),
        Step(
            "training steps on one device",
            [python, "benchmarks/one_device.py", "--markdown", str(training)],
            _HOURS,
            training,
        ),
        *(_sanitizer(tool, ["tests/kernels"], _HOURS) for tool in ("memcheck", "racecheck")),
    ]


def stand_in_steps(tables: Path) -> list[Step]:
    """Return short steps for the CPU."""
    python = sys.executable
    pytest = [sys.executable, "-m", "pytest", "-q"]
    training = tables / "one_device.md"
    on_cpu = ["--device", "cpu", "--quick", "--no-inductor"]
    return [
        Step("tests that need a GPU", [*pytest, "-m", "gpu", "tests/gpu"], 120),
        Step("tests of the kernels", [*pytest, "tests/kernels/test_box.py"], 120),
        Step(
            "tests of the library",
            [*pytest, "-m", "fast", "tests/sharding/optim/test_owners.py"],
            120,
        ),
        Step("kernels' share of the copy rate", [python, "benchmarks/kernels.py", "--quick"], 120),
        Step(
            "training steps on one device",
            [python, "benchmarks/one_device.py", *on_cpu, "--markdown", str(training)],
            180,
            training,
        ),
        _sanitizer("memcheck", ["tests/kernels/test_box.py"], 120),
    ]


def _sanitizer(tool: str, tests: Sequence[str], limit: float) -> Step:
    """Return a step under compute-sanitizer: no caching allocator, so that accesses beyond a tensor
    are detected; few examples.
    """
    path = shutil.which("compute-sanitizer") or max(
        glob("/usr/local/cuda*/bin/compute-sanitizer"), default=""
    )
    missing = "" if path else "compute-sanitizer not found; it comes with the CUDA toolkit"
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--hypothesis-profile",
        "few",
        "--timeout",
        "1800",
        *tests,
    ]
    command = [path or "compute-sanitizer", "--tool", tool, "--error-exitcode", "99", *pytest]
    return Step(tool, command, limit, None, missing, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="for all; what has not started by then is skipped",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="steps whose names contain this"
    )
    parser.add_argument("--whole", action="store_true", help="without limits")
    parser.add_argument("--stand-in", action="store_true", help="on the CPU, to prove the command")
    parser.add_argument(
        "--page",
        type=Path,
        help="where to write (default: benchmarks/results, by date; printed alone with --stand-in)",
    )
    options = parser.parse_args(arguments)
    default = (
        None
        if options.stand_in
        else _ROOT / "benchmarks" / "results" / f"{date.today().isoformat()}-gpu.md"
    )
    with tempfile.TemporaryDirectory() as folder:
        make = stand_in_steps if options.stand_in else whole_steps if options.whole else quick_steps
        chosen = [
            step
            for step in make(Path(folder))
            if not options.only or any(text in step.name for text in options.only)
        ]
        asks = not options.only or any(text in _PROBES for text in options.only)
        seconds = _HOURS if options.whole else options.minutes * 60
        command = " ".join(
            ["python -m tests.gpu.run", *(sys.argv[1:] if arguments is None else arguments)]
        )
        return carry_out(
            chosen,
            asks,
            "cpu" if options.stand_in else "cuda",
            seconds,
            options.page or default,
            command,
        )


def carry_out(
    steps: Sequence[Step], asks: bool, device: str, seconds: float, page: Path | None, command: str
) -> int:
    """Ask the probes and run the steps, as far as the time goes; write the page after each. Return
    the exit status.
    """
    start, known = time.monotonic(), collect_facts()
    probes: list[Outcome] = []
    done: list[tuple[Step, Outcome]] = []

    def write() -> str:
        text = document(known, probes, done, (time.monotonic() - start) / 60, command)
        if page is not None:
            page.write_text(text)
        return text

    def left() -> float:
        return seconds - (time.monotonic() - start)

    if asks:
        limits = {name: probe.limit for name, probe in PROBES.items()}
        probes = run_probes(
            [sys.executable, "-m", "tests.gpu.probes", device], limits, min(_PROBES_S, left())
        )
        write()
    for step in steps:
        done.append((step, run(step, left())))
        write()
    print(f"\n{write()}\n{'' if page is None else f'written to {page}'}", flush=True)
    return int(any(one.is_bad for one in (*probes, *(outcome for _, outcome in done))))


if __name__ == "__main__":
    sys.exit(main())
