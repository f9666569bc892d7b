"""What it costs to be watched: collectives, redistributions and a training step, with the watch on and off, beside torch's DETAIL.

    python benchmarks/watch.py                       4 gloo processes, and one alone; five minutes on an idle machine
    python benchmarks/watch.py --only step           one of: collectives, redistribute, step, host
    python benchmarks/watch.py --quick               2 processes, a tiny model, few rounds
    python benchmarks/watch.py --json figures.json --markdown tables.md

The contestants run in the same processes and take turns in random order (see measure.py); a round's time is that of its slowest rank:

    off       shardmesh, nothing noted down: `sm.monitor.collective_check("off")`
    on        as it is by default
    strict    each collective waits until all ranks have called the same
    torch     the raw collective, or DTensor
    DETAIL    the same over groups that torch itself checks, as TORCH_DISTRIBUTED_DEBUG=DETAIL makes them; a training step is
              shardmesh's over such groups, with the watch off

"host" is what Python does: one process takes itself for rank 0 of 4 (`sm.debug.null_world`), and nothing is communicated. Only in the first
row there are 4 processes, which look at each other's notes; the collective that they note down moves nothing.

Differences are taken between minima, ratios between medians unless it says minima. "CPU" is the time that all threads of a process
spent computing: it is no longer for what others did on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import statistics
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from dtensor import redistribution, renamed
from measure import Call, Times, interleaved, slowest
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.monitor.settings import collective_check
from shardmesh.mesh.monitor.torch_calls import hooks

OFF, ON, STRICT, TORCH, DETAIL = "off", "on", "strict", "torch", "DETAIL"
SECTIONS = ("collectives", "redistribute", "step", "host")


@dataclass(frozen=True)
class Effort:
    """How long to measure, and on what.

    Attributes:
        axes: of the mesh of the training example.
        size: of its model.
        rounds: batches of each contestant, by section.
        sides: rows of the square tensors that are redistributed.
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
        """For the command line of the training example."""
        return ["--no-jit", "--size", self.size, "--mesh", ",".join(f"{name}={size}" for name, size in self.axes.items())]


FULL = Effort({"fsdp": 2, "tp": 2}, "demo", {"collectives": 60, "redistribute": 40, "step": 50, "host": 300}, (64, 1024))
QUICK = Effort({"fsdp": 2, "tp": 1}, "tiny", dict.fromkeys(SECTIONS, 3), (64,))


# -- taking turns ------------------------------------------------------------------------------------------------------


class Turn:
    """Some calls in a row by one contestant, of which it also takes the CPU time.

    Attributes:
        cpu: seconds of CPU time per call of this process, one entry per turn.
        watchdog: the same of the watchdog's thread.
    """

    def __init__(self, prepare: Call, call: Call, count: int) -> None:
        self._prepare, self._call, self._count = prepare, call, count
        self.cpu: list[float] = []
        self.watchdog: list[float] = []

    def __call__(self) -> None:
        self._prepare()
        watchdog, cpu = watchdog_cpu_s(), time.process_time()  # the second is read last and first: reading the first takes a while
        for _ in repeat(None, self._count):
            self._call()
        self.cpu.append((time.process_time() - cpu) / self._count)
        self.watchdog.append((watchdog_cpu_s() - watchdog) / self._count)

    def cost(self, turns: Times) -> Cost:
        """What `interleaved` says of the turns, and what was taken here: it began with some to warm up."""
        cpu, watchdog = (Times(tuple(seconds[-len(turns.rounds) :])) for seconds in (self.cpu, self.watchdog))
        return Cost(Times(tuple(seconds / self._count for seconds in turns.rounds)), cpu, watchdog)


@dataclass(frozen=True)
class Cost:
    """Seconds per call of one contestant, one entry per round."""

    wall: Times
    cpu: Times
    watchdog: Times

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"wall": self.wall.as_dict(), "cpu": self.cpu.as_dict(), "watchdog": self.watchdog.as_dict()}


Costs = dict[str, Cost]


def take_turns(calls: Mapping[str, Call], prepare: Callable[[str], None], rounds: int, count: int, together: Call) -> Costs:
    """Times `count` calls in a row of each contestant, in each round.

    Args:
        prepare: makes ready for a contestant; not part of the CPU time, and short beside the calls.
        together: called before each turn.
    """
    turns = {name: Turn(partial(prepare, name), call, count) for name, call in calls.items()}
    wall = interleaved(turns, rounds=rounds, batch_s=0, together=together)
    return {name: turn.cost(wall[name]) for name, turn in turns.items()}


def watchdog_cpu_s() -> float:
    """CPU time that the watchdog's thread has used; 0 where there is none, or the system does not tell."""
    thread = next((t for t in threading.enumerate() if t.name == "shardmesh-watchdog"), None)
    try:
        return 0.0 if thread is None else int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Case:
    """What was timed.

    Attributes:
        collectives: how many of them a call makes on each rank.
    """

    section: str
    name: str
    collectives: int
    costs: Costs

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        costs = {who: cost.as_dict() for who, cost in self.costs.items()}
        return {"section": self.section, "case": self.name, "collectives": self.collectives, "costs": costs}

    def times(self) -> dict[str, Times]:
        """Of the contestants."""
        return {who: cost.wall for who, cost in self.costs.items()}


def of_all_ranks(ranks: Sequence[Case]) -> Case:
    """One case as several ranks saw it: the slowest of each round, and the means of CPU times."""
    costs = {who: _joined([case.costs[who] for case in ranks]) for who in ranks[0].costs}
    return Case(ranks[0].section, ranks[0].name, ranks[0].collectives, costs)


def _joined(costs: Sequence[Cost]) -> Cost:
    return Cost(slowest([c.wall for c in costs]), _mean([c.cpu for c in costs]), _mean([c.watchdog for c in costs]))


def _mean(times: Sequence[Times]) -> Times:
    return Times(tuple(sum(seconds) / len(times) for seconds in zip(*(t.rounds for t in times), strict=True)))


# -- the contestants ---------------------------------------------------------------------------------------------------


class Switch:
    """Makes a mesh's groups those of a contestant: with a seat or without one, over torch's plain groups or those that it checks."""

    def __init__(self, mesh: sm.DeviceMesh) -> None:
        every = (*mesh.axis_names, tuple(mesh.axis_names))
        found = {group.ranks: group for axes in every if (group := mesh.group(axes)).size > 1}
        self._groups = list(found.values())
        for group in self._groups:
            group.barrier()  # after which it has a seat
        self._seats = [group.recorder for group in self._groups]
        self._plain: list[Any] = [group.channel for group in self._groups]  # type: ignore[attr-defined]
        self._checked = [checked_group(group.ranks) for group in self._groups]

    def __call__(self, who: str) -> None:
        collective_check(who if who in (ON, STRICT) else OFF)
        handles = self._checked if who == DETAIL else self._plain
        for group, seat, handle in zip(self._groups, self._seats, handles, strict=True):
            group.recorder = seat if who in (ON, STRICT) else None  # as where the watch was off from the beginning
            group._channel = weakref.ref(handle)  # type: ignore[attr-defined]


def checked_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of these ranks whose collectives torch checks. Only members call it.

    Raises: RuntimeError where torch makes an ordinary one instead.
    """
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        made: Any = dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        dist.set_debug_level(before)
    backend = type(made._get_backend(torch.device("cpu"))).__name__
    if "Wrapper" not in backend:
        raise RuntimeError(f"with DebugLevel.DETAIL torch {torch.__version__} made a group with {backend}, which checks nothing")
    return made


def measure_ranks(sections: Sequence[str], effort: Effort) -> list[Case]:
    """Run in every process."""
    # After DTensor, gloo's threads outlive destroy_process_group, and now and then abort a process that takes its interpreter down.
    atexit.register(os._exit, 0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # DTensor tells how it does without all_to_all
    return [case for section in sections for case in IN_PROCESSES[section](effort)]


def _line_of_ranks(effort: Effort) -> tuple[sm.DeviceMesh, Switch]:
    mesh = sm.init_device_mesh("cpu", (effort.ranks,), axis_names=("x",))
    return mesh, Switch(mesh)


# -- raw collectives ---------------------------------------------------------------------------------------------------


def time_collectives(effort: Effort) -> list[Case]:
    """An all_reduce of our `Group` beside torch's own."""
    mesh, switch = _line_of_ranks(effort)
    group: Any = mesh.group("x")

    def case(name: str, elements: int) -> Case:
        x = torch.zeros(elements)
        ours, theirs = lambda: group.all_reduce(x), lambda: dist.all_reduce(x, group=group.channel)  # of the contestant
        calls: dict[str, Call] = {OFF: ours, ON: ours, STRICT: ours, TORCH: theirs, DETAIL: theirs}
        costs = take_turns(calls, switch, effort.rounds["collectives"], 10, dist.barrier)
        return Case("collectives", f"all_reduce of {name}", 1, costs)

    return [case("1 KB", 256), case("1 MB", 1 << 18)]


def time_nothing(effort: Effort) -> list[Case]:
    """What is done for a collective before it moves anything and afterwards, where the others of the group do the same."""
    mesh, switch = _line_of_ranks(effort)
    nothing: Call = partial(mesh.group("x").direct, "nothing", 0, 0, torch.float32, lambda: None)
    costs = take_turns({OFF: nothing, ON: nothing}, switch, effort.rounds["host"], 100, dist.barrier)
    return [Case("host", f"a collective, {effort.ranks} processes", 1, costs), _time_torch_call(effort, mesh, switch)]


def _time_torch_call(effort: Effort, mesh: sm.DeviceMesh, switch: Callable[[str], None]) -> Case:
    """The same for a call of torch.distributed: torch's part of it is replaced by nothing."""
    group, x = dist.new_group(), torch.zeros(4)
    work: Any = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    hooks.stop()
    theirs = vars(dist.ProcessGroup)["allreduce"]
    dist.ProcessGroup.allreduce = lambda *_: work  # type: ignore[method-assign]
    switch(ON)
    hooks.monitor_calls(mesh.world.monitor)
    call: Call = partial(dist.all_reduce, x, group=group)
    costs = take_turns({OFF: call, ON: call}, switch, effort.rounds["host"], 100, dist.barrier)
    hooks.stop()
    dist.ProcessGroup.allreduce = theirs
    hooks.monitor_calls(mesh.world.monitor)
    return Case("host", f"a call of torch.distributed, {effort.ranks} processes", 1, costs)


# -- redistributions ---------------------------------------------------------------------------------------------------


def time_redistribute(effort: Effort) -> list[Case]:
    """A square tensor from split rows to split columns and back."""
    mesh, switch = _line_of_ranks(effort)
    switch(DETAIL)
    meshes = {DETAIL: renamed(mesh, "detail")}
    switch(OFF)
    meshes[TORCH] = renamed(mesh, "plain")

    def case(side: int) -> Case:
        local = torch.zeros(side // effort.ranks, side)
        x = sm.from_local(local, mesh, P("x"), shape=(side, side))
        ours = dict.fromkeys((OFF, ON, STRICT), lambda: x.redistribute(P(None, "x")).redistribute(P("x")))
        theirs = {who: _their_loop(local, torch_mesh) for who, torch_mesh in meshes.items()}
        costs = take_turns(ours | theirs, switch, effort.rounds["redistribute"], 5, dist.barrier)
        return Case("redistribute", f"f32[{side}, {side}] rows -> columns -> rows", 2, costs)

    return [case(side) for side in effort.sides]


def _their_loop(local: Tensor, mesh: Any) -> Call:
    rows, columns, side = [dt.Shard(0)], [dt.Shard(1)], local.shape[1]
    there = redistribution(local, mesh, rows, columns, (side, side))
    back = redistribution(local.view(side, -1), mesh, columns, rows, (side, side))
    return lambda: (there(), back())


# -- the training example ----------------------------------------------------------------------------------------------


def time_step(effort: Effort) -> list[Case]:
    """A step of examples/train_lm.py."""
    mesh = sm.init_device_mesh("cpu", tuple(effort.axes.values()), axis_names=tuple(effort.axes))
    switch, step = Switch(mesh), trainer(effort, mesh).step
    costs = take_turns(dict.fromkeys((OFF, ON, STRICT, DETAIL), step), switch, effort.rounds["step"], 1, dist.barrier)
    return [Case("step", f"a training step, {effort.size}", collectives_of(step), costs)]


def trainer(effort: Effort, mesh: sm.DeviceMesh) -> Any:
    """The example's."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import train_lm

    return train_lm.Trainer(train_lm.parse(effort.example_arguments), mesh)


def collectives_of(call: Call) -> int:
    """How many this rank makes."""
    with sm.debug.comm_budget() as used:
        call()
    return used.launches


# -- one process alone -------------------------------------------------------------------------------------------------


def time_host(effort: Effort) -> list[Case]:
    """What Python does, without any communication."""
    torch.set_num_threads(1)
    with sm.debug.null_world(effort.ranks):
        line = sm.init_device_mesh("cpu", (effort.ranks,), axis_names=("x",))
        cases = [_host_case(name, call, 100, effort.rounds["host"]) for name, call in _host_calls(line).items()]
        mesh = sm.init_device_mesh("cpu", tuple(effort.axes.values()), axis_names=tuple(effort.axes))
        return [*cases, _host_case(f"a training step, {effort.size}", trainer(effort, mesh).step, 1, effort.rounds["step"])]


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


def _host_case(name: str, call: Call, count: int, rounds: int) -> Case:
    costs = take_turns(dict.fromkeys((OFF, ON), call), collective_check, rounds, count, lambda: None)
    collective_check(ON)
    return Case("host", name, collectives_of(call), costs)


# -- figures -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "microseconds, medians", OFF, ON, STRICT, TORCH, DETAIL,
    "on / off", "on / off, minima", "on - off, a collective", "DETAIL - without, a collective",
)  # fmt: skip
STEP_COLUMNS = ("milliseconds, medians", *COLUMNS[1:4], DETAIL, "on / off", "on / off, minima", "DETAIL / off", "on - off, us a collective")
HOST_COLUMNS = ("microseconds, minima", OFF, ON, "on - off", "collectives", "on / off")


def row(case: Case) -> list[str]:
    """One line of the table of what is communicated."""
    walls = case.times()
    return [
        case.name,
        *(f"{walls[who].median * 1e6:.1f}" for who in COLUMNS[1:6]),
        *_ratios(walls),
        f"{_per_collective_us(case, walls, ON, OFF):.1f}",
        f"{_per_collective_us(case, walls, DETAIL, TORCH):.1f}",
    ]


def step_rows(case: Case) -> list[list[str]]:
    """The lines of the training step: its time, and its CPU time, of which a busy machine does not change so much."""
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


def kinds(case: Case) -> list[tuple[str, dict[str, Times]]]:
    """The times of the contestants and their CPU times, by what they are called."""
    return [("time", case.times()), ("CPU of a rank", {who: c.cpu for who, c in case.costs.items()})]


def host_row(case: Case) -> list[str]:
    """One line of the table of host times."""
    off, on = case.costs[OFF].wall.best * 1e6, case.costs[ON].wall.best * 1e6
    return [case.name, f"{off:.2f}", f"{on:.2f}", f"{on - off:.2f}", str(case.collectives), f"{on / off:.4f}"]


def _ratios(times: Mapping[str, Times]) -> list[str]:
    return [f"{times[ON].median / times[OFF].median:.3f}", f"{times[ON].best / times[OFF].best:.3f}"]


def _per_collective_us(case: Case, times: Mapping[str, Times], one: str, other: str) -> float:
    return (times[one].best - times[other].best) / max(1, case.collectives) * 1e6


def summary(cases: Sequence[Case]) -> list[str]:
    """What the tables say about the aims: 2 us a collective, 1 % of a training step."""
    lines = [_collective_line(case) for case in cases if case.section == "host" and case.collectives == 1]
    lines += [_step_line(case) for case in cases if "training step" in case.name]
    return [*lines, *(_watchdog_line(case) for case in cases if case.section == "step")]


def _collective_line(case: Case) -> str:
    return f"{case.name}: {_per_collective_us(case, case.times(), ON, OFF):.2f} us more when watched."


def _step_line(case: Case) -> str:
    where = "alone, without communication" if case.section == "host" else "of communicating processes"
    shares = "; ".join(f"{what} {_shares(times)}" for what, times in kinds(case))
    return f"{case.name} {where} ({case.collectives} collectives), on against off: {shares}."


def _shares(times: Mapping[str, Times]) -> str:
    """How much more it takes to be watched."""
    minima, rounds = times[ON].best / times[OFF].best, [a / b for a, b in zip(times[ON].rounds, times[OFF].rounds, strict=True)]
    return f"{minima - 1:+.2%} by minima, {statistics.median(rounds) - 1:+.2%} in the middle round"


def _watchdog_line(case: Case) -> str:
    on = case.costs[ON]
    share = sum(on.watchdog.rounds) / sum(on.wall.rounds)
    return f"The watchdog's thread used {share:.2%} of a core during {case.name}."


def tables(cases: Sequence[Case]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, columns and rows of each table that has any."""
    moved = [row(case) for case in cases if case.section in ("collectives", "redistribute")]
    steps = [line for case in cases if case.section == "step" for line in step_rows(case)]
    host = [host_row(case) for case in cases if case.section == "host"]
    found = (("communicating, gloo", COLUMNS, moved), ("the training example", STEP_COLUMNS, steps), ("host time", HOST_COLUMNS, host))
    return [table for table in found if table[2]]


# -- the whole ---------------------------------------------------------------------------------------------------------

IN_PROCESSES: dict[str, Callable[[Effort], list[Case]]] = {
    "collectives": time_collectives,
    "redistribute": time_redistribute,
    "step": time_step,
    "host": time_nothing,
}


def run(sections: Sequence[str], effort: Effort) -> list[Case]:
    """All cases of these sections."""
    ranks = sm.launch(measure_ranks, effort.ranks, (sections, effort), env={"OMP_NUM_THREADS": "1", "SHARDMESH_MONITOR": "on"})
    cases = [of_all_ranks(case) for case in zip(*ranks, strict=True)]
    return cases + (time_host(effort) if "host" in sections else [])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen sections, print the tables and write the files asked for."""
    options = _options(arguments)
    effort = QUICK if options.quick else FULL
    cases = run(options.only or SECTIONS, effort)
    found = tables(cases)
    for table in found:
        show(*table)
    env, lines = environment(), summary(cases)
    print("\n".join([*lines, environment_line(env)]))
    write_json(options.json, {"environment": env, "cases": [case.as_dict() for case in cases]})
    text = [f"## {title}\n\n{markdown(columns, rows)}" for title, columns, rows in found]
    write_markdown(options.markdown, "\n\n".join(["\n".join(f"- {line}" for line in lines), *text, environment_line(env)]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section to run; may be given several times")
    parser.add_argument("--quick", action="store_true", help="2 processes, a tiny model, few rounds")
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
