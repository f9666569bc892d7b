"""Overhead of the monitor: collectives, redistributions and a training step with the monitor on and
off, and with torch's DETAIL checks.

    python benchmarks/monitor.py                     4 gloo processes, then one alone; five minutes
    python benchmarks/monitor.py --only step         one of: collectives, redistribute, step, host
    python benchmarks/monitor.py --quick             2 processes, a tiny model, few rounds
    python benchmarks/monitor.py --json figures.json --markdown tables.md

These modes run in the same processes, interleaved in random order (see measure.py); a round's time
is that of its slowest rank:

    off       shardmesh without the monitor: `sm.monitor.collective_check("off")`
    on        the default
    strict    each collective waits until all ranks have called the same one
    torch     the raw collective, or DTensor
    DETAIL    the same over process groups with TORCH_DISTRIBUTED_DEBUG=DETAIL checks; a training
              step is shardmesh's over such groups, with the monitor off

"host" is the time spent in Python: one process is rank 0 of 4 (`sm.debug.null_world`) and nothing
is communicated. Its first rows run on 4 processes, which compare each other's records; the recorded
collective moves no data.

Differences are between minima. Ratios are between medians, unless they say minima. "CPU" is the CPU
time of all threads of a process; other load on the machine does not add to it.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import statistics
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from dtensor import redistribution, renamed
from measure import Call, Times
from rank_times import TimedCase, merge_ranks, time_interleaved
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.monitor.torch_calls import hooks
from shardmesh.mesh.settings import collective_check

OFF, ON, STRICT, TORCH, DETAIL = "off", "on", "strict", "torch", "DETAIL"
SECTIONS = ("collectives", "redistribute", "step", "host")


@dataclass(frozen=True)
class MonitorConfig:
    """What to measure, and for how many rounds.

    Attributes:
        axes: sizes of the mesh axes of the training example.
        size: size of its model.
        rounds: batches of each mode, by section.
        sides: number of rows of the square tensors to redistribute.
    """

    axes: dict[str, int]
    size: str
    rounds: dict[str, int]
    sides: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return self.axes["fsdp"] * self.axes["tp"]

    @property
    def example_arguments(self) -> list[str]:
        """Command-line arguments of the training example."""
        return [
            "--no-jit",
            "--size",
            self.size,
            "--mesh",
            ",".join(f"{name}={size}" for name, size in self.axes.items()),
        ]


FULL = MonitorConfig(
    {"fsdp": 2, "tp": 2},
    "demo",
    {"collectives": 60, "redistribute": 40, "step": 50, "host": 300},
    (64, 1024),
)
QUICK = MonitorConfig({"fsdp": 2, "tp": 1}, "tiny", dict.fromkeys(SECTIONS, 3), (64,))


# -- the modes -------------------------------------------------------------------------------------


class Switch:
    """Switch a mesh's groups to a mode: with or without a recorder, over plain process groups or
    groups with DETAIL checks.
    """

    def __init__(self, mesh: sm.DeviceMesh) -> None:
        every = (*mesh.axis_names, tuple(mesh.axis_names))
        groups = {group.ranks: group for axes in every if (group := mesh.group(axes)).size > 1}
        self._groups = list(groups.values())
        for group in self._groups:
            group.barrier()  # creates the recorder
        self._recorders = [group.recorder for group in self._groups]
        self._plain: list[Any] = [group.channel for group in self._groups]  # type: ignore[attr-defined]
        self._checked = [checked_group(group.ranks) for group in self._groups]

    def __call__(self, who: str) -> None:
        collective_check(who if who in (ON, STRICT) else OFF)
        handles = self._checked if who == DETAIL else self._plain
        for group, recorder, handle in zip(self._groups, self._recorders, handles, strict=True):
            # As in a job that started without the monitor.
            group.recorder = recorder if who in (ON, STRICT) else None
            group._channel = weakref.ref(handle)  # type: ignore[attr-defined]


def checked_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group with DETAIL checks. Only members call it.

    Raises:
        RuntimeError: if torch creates a group without checks.
    """
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        handle: Any = dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        dist.set_debug_level(before)
    backend = type(handle._get_backend(torch.device("cpu"))).__name__
    if "Wrapper" not in backend:
        raise RuntimeError(
            f"with DebugLevel.DETAIL torch {torch.__version__} created a group with {backend}, "
            "which checks nothing"
        )
    return handle


def measure_ranks(sections: Sequence[str], config: MonitorConfig) -> list[TimedCase]:
    """Return the cases of these sections; runs in every process."""
    # After DTensor, gloo's threads outlive destroy_process_group, and sometimes abort a process at
    # interpreter shutdown.
    atexit.register(os._exit, 0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    # DTensor logs how it works without all_to_all.
    logging.getLogger("torch").setLevel(logging.ERROR)
    return [case for section in sections for case in IN_PROCESSES[section](config)]


def _mesh_1d(config: MonitorConfig) -> tuple[sm.DeviceMesh, Switch]:
    mesh = sm.init_device_mesh("cpu", (config.ranks,), axis_names=("x",))
    return mesh, Switch(mesh)


# -- raw collectives -------------------------------------------------------------------------------


def time_collectives(config: MonitorConfig) -> list[TimedCase]:
    """Time all_reduce of our `Group` and of torch.distributed."""
    mesh, switch = _mesh_1d(config)
    group: Any = mesh.group("x")

    def case(name: str, elements: int) -> TimedCase:
        x = torch.zeros(elements)

        def ours() -> Any:
            return group.all_reduce(x)

        def theirs() -> Any:
            return dist.all_reduce(x, group=group.channel)  # the channel changes with the mode

        calls: dict[str, Call] = {OFF: ours, ON: ours, STRICT: ours, TORCH: theirs, DETAIL: theirs}
        costs = time_interleaved(calls, switch, config.rounds["collectives"], 10, dist.barrier)
        return TimedCase("collectives", f"all_reduce of {name}", 1, costs)

    return [case("1 KB", 256), case("1 MB", 1 << 18)]


def time_monitor_alone(config: MonitorConfig) -> list[TimedCase]:
    """Time what the monitor does before and after a collective; the collective itself moves no
    data.
    """
    mesh, switch = _mesh_1d(config)
    nothing: Call = partial(mesh.group("x").direct, "nothing", 0, 0, torch.float32, lambda: None)
    costs = time_interleaved(
        {OFF: nothing, ON: nothing}, switch, config.rounds["host"], 100, dist.barrier
    )
    return [
        TimedCase("host", f"a collective, {config.ranks} processes", 1, costs),
        _time_torch_call(config, mesh, switch),
    ]


def _time_torch_call(
    config: MonitorConfig, mesh: sm.DeviceMesh, switch: Callable[[str], None]
) -> TimedCase:
    """Time the same for a call of torch.distributed, with torch's collective replaced by one that
    moves no data.
    """
    group, x = dist.new_group(), torch.zeros(4)
    monitor: Any = mesh.world.monitor
    work: Any = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    hooks.stop()
    theirs = vars(dist.ProcessGroup)["allreduce"]
    dist.ProcessGroup.allreduce = lambda *_: work  # type: ignore[method-assign]
    switch(ON)
    hooks.monitor_calls(monitor)
    call: Call = partial(dist.all_reduce, x, group=group)
    costs = time_interleaved(
        {OFF: call, ON: call}, switch, config.rounds["host"], 100, dist.barrier
    )
    hooks.stop()
    dist.ProcessGroup.allreduce = theirs
    hooks.monitor_calls(monitor)
    return TimedCase("host", f"a call of torch.distributed, {config.ranks} processes", 1, costs)


# -- redistributions -------------------------------------------------------------------------------


def time_redistribute(config: MonitorConfig) -> list[TimedCase]:
    """Time a square tensor from sharded rows to sharded columns and back."""
    mesh, switch = _mesh_1d(config)
    switch(DETAIL)
    meshes = {DETAIL: renamed(mesh, "detail")}
    switch(OFF)
    meshes[TORCH] = renamed(mesh, "plain")

    def case(side: int) -> TimedCase:
        local = torch.zeros(side // config.ranks, side)
        x = sm.from_local(local, mesh, P("x"), shape=(side, side))
        ours = dict.fromkeys(
            (OFF, ON, STRICT), lambda: x.redistribute(P(None, "x")).redistribute(P("x"))
        )
        theirs = {who: _dtensor_round_trip(local, torch_mesh) for who, torch_mesh in meshes.items()}
        costs = time_interleaved(
            ours | theirs, switch, config.rounds["redistribute"], 5, dist.barrier
        )
        return TimedCase("redistribute", f"f32[{side}, {side}] rows -> columns -> rows", 2, costs)

    return [case(side) for side in config.sides]


def _dtensor_round_trip(local: Tensor, mesh: Any) -> Call:
    rows, columns, side = [dt.Shard(0)], [dt.Shard(1)], local.shape[1]
    to_columns = redistribution(local, mesh, rows, columns, (side, side))
    to_rows = redistribution(local.view(side, -1), mesh, columns, rows, (side, side))
    return lambda: (to_columns(), to_rows())


# -- the training example --------------------------------------------------------------------------


def time_step(config: MonitorConfig) -> list[TimedCase]:
    """Time a step of examples/train_lm.py."""
    mesh = sm.init_device_mesh("cpu", tuple(config.axes.values()), axis_names=tuple(config.axes))
    switch, step = Switch(mesh), trainer(config, mesh).step
    costs = time_interleaved(
        dict.fromkeys((OFF, ON, STRICT, DETAIL), step),
        switch,
        config.rounds["step"],
        1,
        dist.barrier,
    )
    return [TimedCase("step", f"a training step, {config.size}", collectives_of(step), costs)]


def trainer(config: MonitorConfig, mesh: sm.DeviceMesh) -> Any:
    """Return the trainer of examples/train_lm.py."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import train_lm

    return train_lm.Trainer(train_lm.parse(config.example_arguments), mesh)


def collectives_of(call: Call) -> int:
    """Return the number of collectives that this rank calls."""
    with sm.debug.comm_budget() as used:
        call()
    return used.launches


# -- one process alone -----------------------------------------------------------------------------


def time_host(config: MonitorConfig) -> list[TimedCase]:
    """Time what runs in Python, without communication."""
    torch.set_num_threads(1)
    with sm.debug.null_world(config.ranks):
        line = sm.init_device_mesh("cpu", (config.ranks,), axis_names=("x",))
        cases = [
            _host_case(name, call, 100, config.rounds["host"])
            for name, call in _host_calls(line).items()
        ]
        mesh = sm.init_device_mesh(
            "cpu", tuple(config.axes.values()), axis_names=tuple(config.axes)
        )
        return [
            *cases,
            _host_case(
                f"a training step, {config.size}",
                trainer(config, mesh).step,
                1,
                config.rounds["step"],
            ),
        ]


def _host_calls(mesh: sm.DeviceMesh) -> dict[str, Call]:
    local, group = torch.zeros(4, 8), mesh.group("x")
    shape = (4 * mesh.size(), 8)
    x = sm.from_local(local, mesh, P("x"), shape=shape)
    w = sm.from_local(torch.zeros(8, 8), mesh, P(), shape=(8, 8))
    return {
        "group.all_reduce": lambda: group.all_reduce(local),
        "x.redistribute": lambda: x.redistribute(P()),
        "sm.from_local": lambda: sm.from_local(local, mesh, P("x"), shape=shape),
        "x + x": lambda: x + x,
        "linear(x, w)": lambda: F.linear(x, w),
    }


def _host_case(name: str, call: Call, count: int, rounds: int) -> TimedCase:
    costs = time_interleaved(
        dict.fromkeys((OFF, ON), call), collective_check, rounds, count, lambda: None
    )
    collective_check(ON)
    return TimedCase("host", name, collectives_of(call), costs)


# -- figures ---------------------------------------------------------------------------------------

COLUMNS = (
    "microseconds, medians",
    OFF,
    ON,
    STRICT,
    TORCH,
    DETAIL,
    "on / off",
    "on / off, minima",
    "on - off, a collective",
    "DETAIL - without, a collective",
)
STEP_COLUMNS = (
    "milliseconds, medians",
    *COLUMNS[1:4],
    DETAIL,
    "on / off",
    "on / off, minima",
    "DETAIL / off",
    "on - off, us a collective",
)
HOST_COLUMNS = ("microseconds, minima", OFF, ON, "on - off", "collectives", "on / off")


def row(case: TimedCase) -> list[str]:
    """Return a row of the table of collectives and redistributions."""
    walls = case.times()
    return [
        case.name,
        *(f"{walls[who].median * 1e6:.1f}" for who in COLUMNS[1:6]),
        *_ratios(walls),
        f"{_per_collective_us(case, walls, ON, OFF):.1f}",
        f"{_per_collective_us(case, walls, DETAIL, TORCH):.1f}",
    ]


def step_rows(case: TimedCase) -> list[list[str]]:
    """Return the rows of the training step: wall time, and CPU time, which varies less on a busy
    machine.
    """
    return [
        [
            f"{case.name}, {what}",
            *(f"{times[who].median * 1e3:.2f}" for who in STEP_COLUMNS[1:5]),
            *_ratios(times),
            f"{times[DETAIL].median / times[OFF].median:.3f}",
            f"{_per_collective_us(case, times, ON, OFF):.1f}",
        ]
        for what, times in kinds(case)
    ]


def kinds(case: TimedCase) -> list[tuple[str, dict[str, Times]]]:
    """Return (label, times by mode) for wall time and CPU time."""
    return [
        ("time", case.times()),
        ("CPU of a rank", {who: c.cpu for who, c in case.costs.items()}),
    ]


def host_row(case: TimedCase) -> list[str]:
    """Return a row of the table of host times."""
    off, on = case.costs[OFF].wall.best * 1e6, case.costs[ON].wall.best * 1e6
    return [
        case.name,
        f"{off:.2f}",
        f"{on:.2f}",
        f"{on - off:.2f}",
        str(case.collectives),
        f"{on / off:.4f}",
    ]


def _ratios(times: Mapping[str, Times]) -> list[str]:
    return [
        f"{times[ON].median / times[OFF].median:.3f}",
        f"{times[ON].best / times[OFF].best:.3f}",
    ]


def _per_collective_us(case: TimedCase, times: Mapping[str, Times], one: str, other: str) -> float:
    return (times[one].best - times[other].best) / max(1, case.collectives) * 1e6


def summary(cases: Sequence[TimedCase]) -> list[str]:
    """Compare the figures with the targets: 2 us per collective, 1 % of a training step."""
    lines = [
        _collective_line(case) for case in cases if case.section == "host" and case.collectives == 1
    ]
    lines += [_step_line(case) for case in cases if "training step" in case.name]
    return [*lines, *(_watchdog_line(case) for case in cases if case.section == "step")]


def _collective_line(case: TimedCase) -> str:
    return (
        f"{case.name}: {_per_collective_us(case, case.times(), ON, OFF):.2f} us more with the "
        "monitor on."
    )


def _step_line(case: TimedCase) -> str:
    where = (
        "alone, without communication" if case.section == "host" else "of communicating processes"
    )
    shares = "; ".join(f"{what} {_shares(times)}" for what, times in kinds(case))
    return f"{case.name} {where} ({case.collectives} collectives), on against off: {shares}."


def _shares(times: Mapping[str, Times]) -> str:
    """Return the overhead as percentages: between minima, and of the median round."""
    minima = times[ON].best / times[OFF].best
    rounds = [a / b for a, b in zip(times[ON].rounds, times[OFF].rounds, strict=True)]
    return f"{minima - 1:+.2%} by minima, {statistics.median(rounds) - 1:+.2%} in the median round"


def _watchdog_line(case: TimedCase) -> str:
    on = case.costs[ON]
    share = sum(on.watchdog.rounds) / sum(on.wall.rounds)
    return f"The watchdog's thread used {share:.2%} of a core during {case.name}."


def tables(cases: Sequence[TimedCase]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Return (title, columns, rows) of each table that has rows."""
    moved = [row(case) for case in cases if case.section in ("collectives", "redistribute")]
    steps = [line for case in cases if case.section == "step" for line in step_rows(case)]
    host = [host_row(case) for case in cases if case.section == "host"]
    figures = (
        ("communicating, gloo", COLUMNS, moved),
        ("the training example", STEP_COLUMNS, steps),
        ("host time", HOST_COLUMNS, host),
    )
    return [table for table in figures if table[2]]


# -- command line ----------------------------------------------------------------------------------

IN_PROCESSES: dict[str, Callable[[MonitorConfig], list[TimedCase]]] = {
    "collectives": time_collectives,
    "redistribute": time_redistribute,
    "step": time_step,
    "host": time_monitor_alone,
}


def run(sections: Sequence[str], config: MonitorConfig) -> list[TimedCase]:
    """Return the cases of these sections."""
    ranks = sm.launch(
        measure_ranks,
        config.ranks,
        (sections, config),
        env={"OMP_NUM_THREADS": "1", "SHARDMESH_MONITOR": "on"},
    )
    cases = [merge_ranks(case) for case in zip(*ranks, strict=True)]
    return cases + (time_host(config) if "host" in sections else [])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen sections, print the tables and write the files asked for."""
    options = _options(arguments)
    config = QUICK if options.quick else FULL
    cases = run(options.only or SECTIONS, config)
    texts = tables(cases)
    for table in texts:
        show(*table)
    env, lines = environment(), summary(cases)
    print("\n".join([*lines, environment_line(env)]))
    write_json(options.json, {"environment": env, "cases": [case.as_dict() for case in cases]})
    text = [f"## {title}\n\n{markdown(columns, rows)}" for title, columns, rows in texts]
    write_markdown(
        options.markdown,
        "\n\n".join(["\n".join(f"- {line}" for line in lines), *text, environment_line(env)]),
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=SECTIONS,
        action="append",
        help="a section to run; may be given several times",
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 processes, a tiny model, few rounds"
    )
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
