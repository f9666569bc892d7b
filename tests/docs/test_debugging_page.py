"""docs/debugging.md: its programs fail, on four processes, with the texts that stand below them;
its commands print what it says.

Times, and which ranks had come when an error was raised, differ from run to run: see `normal`.
Where the page has `...` may stand anything.
"""

from __future__ import annotations

import io
import linecache
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import shardmesh as sm
from shardmesh.__main__ import main
from shardmesh.mesh.comm.recording.trace_buffer import BUFFER_BYTES, GROUPS, RECORDS, Header
from shardmesh.mesh.doctor.checks import CHECKS
from shardmesh.mesh.errors import LaunchEnvironmentError
from shardmesh.mesh.launch import job_store
from shardmesh.mesh.launch.environment import launch_environment
from shardmesh.mesh.launch.progress import Progress
from shardmesh.mesh.launch.rendezvous import StoreRendezvous
from shardmesh.mesh.monitor.diagnosis import verdict_text
from shardmesh.mesh.monitor.job import _DEAF_S
from shardmesh.mesh.monitor.recording.job_directory import born, open_buffer
from shardmesh.mesh.monitor.startup.rank_info import (
    RankInfo,
    disagreement,
    file_store_fault,
    own_rank_info,
    shared_device,
)
from shardmesh.mesh.monitor.termination import _SHARE
from shardmesh.mesh.monitor.watchdog import _POLITE_S
from shardmesh.mesh.settings import Settings
from tests.docs.pages import DOCS, blocks, check_python_examples
from tests.faults.fault import Fault
from tests.faults.runner import Outcome, Runner
from tests.tiers import parameters

pytestmark = pytest.mark.xdist_group("faults")  # one worker of `pytest -n` has the processes

PAGE = (DOCS / "debugging.md").read_text()
# messages as they are raised: the literals that one is written in are joined
SOURCES = "".join(
    re.sub(r'"\n *f?"', "", path.read_text())
    for part in ("mesh", "sharding")
    for path in sorted((DOCS.parent / part).rglob("*.py"))
)
AT_ONCE = 3  # programs; some mostly wait
LIMIT_S = 60.0  # of a program that hangs
HANGS = "time.sleep(600)"  # in the program that is looked at while it waits


# -- programs --------------------------------------------------------------------------------------


class PageProgram(NamedTuple):
    """A program of the page, and what it shows below it: "text", a "console", or nothing ("")."""

    source: str
    kind: str
    shown: str


def programs() -> Iterator[PageProgram]:
    first, *others = re.findall(
        r"```python\n((?:(?!>>>|```).)*?)```\n(?:\n```(text|console)\n(.*?)```)?", PAGE, re.DOTALL
    )
    for source, kind, shown in others:
        yield PageProgram(f"{first[0]}\n{source}", kind, shown)


def as_fault(name: str, program: PageProgram) -> Fault:
    """Return the program as a `Fault`, for the runner of `tests/faults`."""

    def run(_: Any) -> None:
        run_as_train_py(program.source)

    run.__name__ = name
    return Fault(run, mesh={})


def run_as_train_py(source: str) -> None:
    linecache.cache["train.py"] = (len(source), None, source.splitlines(keepends=True), "train.py")
    exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})


PROGRAMS = {f"program_{number}": program for number, program in enumerate(programs(), 1)}
DEBUGGED = [
    name for name, program in PROGRAMS.items() if "sm.monitor.breakpoint(" in program.source
]
FAULTS = {
    name: as_fault(name, program) for name, program in PROGRAMS.items() if name not in DEBUGGED
}
(HANGING,) = [name for name, program in PROGRAMS.items() if HANGS in program.source]
FAILING = [name for name in FAULTS if PROGRAMS[name].kind == "text"]
HEALTHY = [name for name in FAULTS if not PROGRAMS[name].kind and name != HANGING]


class Runs(NamedTuple):
    """The programs, which run in the background, and where they leave what they print and write.

    Attributes:
        outcomes: of the programs that have been started.
        pid: of a process that lives, and is none of the ranks.
        start: runs a program.
    """

    outcomes: dict[str, Future[Outcome]]
    folder: Path
    pid: int
    start: Callable[[str], Future[Outcome]]

    def outcome(self, name: str) -> Outcome:
        """Return the outcome of a program, which runs once."""
        if name not in self.outcomes:
            self.outcomes[name] = self.start(name)
        return self.outcomes[name].result()

    def of(self, name: str) -> list[list[str]]:
        """Return the lines printed by each rank."""
        return [output_of(rank.output) for rank in self.outcome(name).ranks]


def output_of(text: str) -> list[str]:
    return [re.sub(r"^\[rank\d\]: ?", "", line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Start the programs of the selected tests."""
    selected = parameters(request.session, "name")
    with Runner("tests.docs.test_debugging_page") as runner, ThreadPoolExecutor(AT_ONCE) as pool:

        def start(name: str) -> Future[Outcome]:
            return pool.submit(runner.run, FAULTS[name], limit_s=LIMIT_S)

        outcomes = {name: start(name) for name in [*FAILING, *HEALTHY] if name in selected}
        yield Runs(outcomes, Path(runner._forked.folder.name), runner._forked._server.pid, start)
        pool.shutdown(cancel_futures=True)


def not_in(shown: str, printed: list[str]) -> list[str]:
    """Return the lines of the page that are missing in the output, in order."""
    ahead = iter(printed)
    return [
        line
        for line in shown.splitlines()
        if line.strip() and not any(like(line).fullmatch(normal(other)) for other in ahead)
    ]


def like(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(piece) for piece in normal(line).split("...")))


def normal(line: str) -> str:
    """Remove what differs between runs: times, numbers of arrived ranks, paths, and column widths
    that depend on them.
    """
    line = re.sub(r"\d\d:\d\d:\d\d\.\d{6}", "TIME", line)
    line = re.sub(r" on \S+, process \d+", " on HOST", line)
    line = re.sub(r"^/.*/shardmesh-\w+-\w+$", "FOLDER", line)
    line = re.sub(r"ranks \d(, \d)+(?! of)(?!\))", "RANKS", line)
    line = re.sub(r"\d+\.\d s\b", "SECONDS", line)
    line = re.sub(r"\b\d+\.\d{3}\b", "MS", line)
    line = re.sub(r"\b\d+%", "SHARE", line)
    line = " ".join(line.split())
    return re.sub(r"^(barrier over dp )?rank \d (?=SHARE)", r"\1LAST ", line)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FAILING)
def test_shown_text_is_the_output_of_a_rank(name: str, runs: Runs) -> None:
    missing = [not_in(PROGRAMS[name].shown, printed) for printed in runs.of(name)]
    assert [] in missing, "\n".join(
        line for printed in runs.of(name) for line in ["--- a rank:", *printed[-12:]]
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_programs_without_a_text_succeed(name: str, runs: Runs) -> None:
    assert [rank.status for rank in runs.outcome(name).ranks] == [0] * 4, runs.of(name)


def test_programs() -> None:
    assert len(FAILING) > 10
    assert HEALTHY


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_line_numbers(program: PageProgram) -> None:
    for number, line in enumerate(program.source.splitlines(), 1):
        said = re.findall(r"# line (\d+)", line)
        assert said in ([], [str(number)]), line
    assert "# line" in program.source or " at train.py:" not in program.shown


def test_python_examples() -> None:
    check_python_examples(PAGE)


@pytest.mark.parametrize("name", DEBUGGED)
def test_debugger(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, _, shown = PROGRAMS[name]
    commands = re.findall(r"^\(Pdb, .*?\) (.*)$", shown, re.MULTILINE)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{command}\n" for command in commands)))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source)
    sm.simulate(4)(run_as_train_py)(source)
    # By the terminal, which is not there.
    echoed = re.sub(r"^(\(Pdb, .*?\)) .*\n", r"\1 ", shown, flags=re.MULTILINE)
    assert capsys.readouterr().out.replace(str(tmp_path), "/home/me").split() == echoed.split()


# -- commands --------------------------------------------------------------------------------------


CONSOLES = [block.removeprefix("$ ").split("\n", 1) for block in blocks(PAGE, "console")]


def printed_by(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    main(command.partition("-m shardmesh ")[2].split())
    return capsys.readouterr().out.splitlines()


def shown_by(command: str) -> tuple[str, str]:
    """Return the output block of a command on the page."""
    (found,) = [(line, shown) for line, shown in CONSOLES if command in line]
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def buffers_in(folder: Path) -> dict[int, Any]:
    found = [
        buffer
        for path in folder.glob("shardmesh-*/rank*.trace")
        if (buffer := open_buffer(path)) is not None
    ]
    return {buffer.words[Header.RANK]: buffer for buffer in found}


def test_the_ledger_of_a_job_that_hangs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, shown = shown_by("ledger --last 1")
    hanging = runs.start(HANGING)
    assert eventually(
        lambda: (
            [
                buffers_in(folder)[3]
                for folder in runs.folder.glob(f"*-{HANGING}")
                if is_waiting(folder)
            ]
            != []
        )
    )
    (folder,) = runs.folder.glob(f"*-{HANGING}")
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(folder))
    try:
        printed = printed_by(command, capsys)
    finally:
        os.kill(buffers_in(folder)[3].words[Header.PID], signal.SIGKILL)
    assert not_in(shown, printed) == [], "\n".join(printed)
    assert [rank.error for rank in hanging.result().ranks] == ["RankLostError"] * 3 + [""]


def is_waiting(folder: Path) -> bool:
    """Return whether all ranks wait in their second collective, except the last one, which has
    called one.
    """
    words = [buffer.words for _, buffer in sorted(buffers_in(folder).items())]
    return [(w[Header.RECORDS], bool(w[Header.BLOCKED])) for w in words] == [(2, True)] * 3 + [
        (1, False)
    ]


def test_the_ledger_of_a_job_that_has_died(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, shown = shown_by("ledger --last 2")
    (name,) = [name for name in FAILING if "SIGKILL" in PROGRAMS[name].source]
    runs.outcome(name)
    (folder,) = runs.folder.glob(f"*-{name}")
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(folder))
    printed = printed_by(command, capsys)
    assert not_in(shown, printed) == [], "\n".join(printed)


def test_the_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = shown_by("doctor")
    name, value = command.split()[0].split("=")
    monkeypatch.setenv(name, value)
    printed = printed_by(command, capsys)
    assert not_in(shown, printed) == [], "\n".join(printed)


def test_options_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    used = re.findall(r"-m shardmesh (\w+)((?: --?[\w-]+(?: [\w.=,]+)?)*)", PAGE)
    for command in {command for command, _ in used}:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        offered = capsys.readouterr().out
        options = {
            option
            for of, options in used
            if of == command
            for option in re.findall(r"--[\w-]+", options)
        }
        assert [option for option in options if option not in offered] == []
    assert {command for command, _ in used} == {"doctor", "ledger"}


# -- start-up --------------------------------------------------------------------------------------


ADDRESS = job_store.Address("10.0.0.1", 29500, False)


def table(heading: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    rows = PAGE.split(heading, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def card(rank: int, size: int = 4, pid: int | None = None, job: str = "") -> RankInfo:
    own = own_rank_info(rank, {"WORLD_SIZE": str(size)}, 0, {"TORCHELASTIC_RUN_ID": job})
    return own if pid is None else replace(own, pid=pid, born=born(pid))


def waited(seconds: float, timeout: float = 600.0) -> Progress:
    progress = Progress(0, timeout)
    progress._since -= seconds
    return progress


def raised(act: Callable[[], Any]) -> str:
    with pytest.raises(LaunchEnvironmentError) as error:
        act()
    return str(error.value)


def roll_call(
    store: Any, its: RankInfo, progress: Progress | None = None, fault: str = ""
) -> StoreRendezvous:
    return StoreRendezvous(store, its, progress or Progress(its.rank, 600.0), ADDRESS, False, fault)


def of_missing_ranks() -> Iterator[str]:
    call = roll_call(dist.HashStore(), card(0), waited(12))
    for rank in range(2):
        call.info = card(rank)
        call._sign(call.store, "came")
    call._report_progress(call.store)
    yield call._too_late(call.store)


def of_a_missing_rank_0() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield raised(
        lambda: job_store._reach_store(
            job_store.Address("127.0.0.1", port, False), 1, 4, waited(32, 32.1)
        )
    )


def of_an_unknown_name() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_store, "addresses", lambda name: ())
        yield raised(
            lambda: job_store._reach_store(
                job_store.Address("host0", 1, False), 1, 4, waited(3, 3.1)
            )
        )


def of_a_silent_resolver() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as server:
        patch.setattr(job_store, "within", lambda seconds, probe, otherwise: otherwise)
        address = job_store.Address("127.0.0.1", server.getsockname()[1], False)
        yield raised(lambda: job_store._reach_store(address, 1, 4, waited(32, 32.1)))


def of_a_stranger() -> Iterator[str]:
    twin = roll_call(dist.HashStore(), card(1))
    keys = twin.store.below("0", "*")
    keys.set("rank1", "hello")
    yield raised(lambda: twin._claim(keys))


def of_two_processes(other: int) -> Iterator[str]:
    store = dist.HashStore()
    assert roll_call(store, card(1))._claim(roll_call(store, card(1)).store)
    twin = roll_call(store, card(1, pid=other))
    yield raised(lambda: twin._claim(twin.store))


def of_a_rank_that_cannot_start() -> Iterator[str]:
    env = {"RANK": "5", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    yield f"rank 5 ({card(5).place}) cannot start: {raised(lambda: launch_environment(env))}"
    assert "cannot start: {error}" in SOURCES


def of_another_size() -> Iterator[str]:
    yield disagreement([card(rank, 8 if rank == 2 else 4) for rank in range(4)])
    yield disagreement([card(0, 2), card(1, 4)])


def of_a_shared_device() -> Iterator[str]:
    yield shared_device([replace(card(rank), device="GPU-a") for rank in range(2)])


def of_another_job() -> Iterator[str]:
    store = dist.HashStore()
    roll_call(store, card(0, job="a"))._check_job()
    yield raised(lambda: roll_call(store, card(1, job="b"))._check_job())


def of_a_job_that_has_started() -> Iterator[str]:
    store = dist.HashStore()
    late = roll_call(store, card(3))
    late.store.claim("first", card(0, 2).to_json(), str)
    late.store.set("verdict", "go")
    yield raised(lambda: late._claim(late.store))


def of_a_port_in_use() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(
            job_store._port_in_use(job_store.Address("127.0.0.1", server.getsockname()[1], False))
        )
        yield str(
            job_store._no_store(job_store.Address("127.0.0.1", server.getsockname()[1], False))
        )


def of_an_address_elsewhere() -> Iterator[str]:
    yield str(job_store._does_not_lead_here(ADDRESS, "timed out"))


def of_a_file_store(folder: Path) -> Iterator[str]:
    store = dist.FileStore(str(folder / "store"), 2)
    store.set("shardmesh/file/0", card(0, pid=2**22 + 5).to_json())
    yield file_store_fault(store, 0)


def test_messages_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: Runs) -> None:
    makers = [
        of_missing_ranks(),
        of_a_missing_rank_0(),
        of_two_processes(runs.pid),
        of_a_rank_that_cannot_start(),
        of_another_size(),
    ]
    makers += [
        of_another_job(),
        of_a_job_that_has_started(),
        of_a_port_in_use(),
        of_an_address_elsewhere(),
        of_a_file_store(tmp_path),
    ]
    makers += [of_a_shared_device(), of_an_unknown_name(), of_a_silent_resolver(), of_a_stranger()]
    said = [" ".join(text.split()) for maker in makers for text in maker]
    said += capsys.readouterr().err.splitlines()
    (meshes,) = [name for name in FAILING if "MeshMismatchError" in PROGRAMS[name].shown]
    said += [line.partition(": ")[2] for line in runs.of(meshes)[0]]
    rows = table("| message | what it means |")
    messages = [
        message
        for row in rows
        for cell in row[:2]
        for message in re.findall(r"`([^`]+)`", cell)
        if message.count(" ") > 1
    ]
    assert len(rows) == 16
    unknown = [
        message for message in messages if not any(begins(message).match(text) for text in said)
    ]
    assert unknown == [], "\n".join(said)


def begins(message: str) -> re.Pattern[str]:
    pieces = [
        re.sub(r"python\\ \\\(process\\ 4711\\\)", ".*", re.escape(piece))
        for piece in message.split("...")
    ]
    return re.compile(".*".join(pieces))


# -- what the page says of the code ----------------------------------------------------------------


def test_variables() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("| variable | default |")}
    of_programs = {"SHARDMESH_MESH"}
    assert set(rows) | of_programs == set(re.findall(r"\bSHARDMESH_[A-Z_]+[A-Z]\b", SOURCES))
    assert all(f"`{name}` is no setting of the monitor" in PAGE for name in of_programs)
    defaults = Settings()
    assert rows["SHARDMESH_MONITOR"] == defaults.mode
    assert float(rows["SHARDMESH_STALL_WARN_S"]) == defaults.warn
    assert float(rows["SHARDMESH_STALL_TIMEOUT_S"]) == defaults.timeout
    assert float(rows["SHARDMESH_EXIT_S"]) == defaults.exit_s
    assert f"_LOST_S = {float(rows['SHARDMESH_HOST_LOST_S'])}" in SOURCES
    assert f"sm.monitor.watchdog(warn={defaults.warn:.0f}, timeout={defaults.timeout:.0f})" in PAGE


def test_fields_of_a_mismatch() -> None:
    rows = [
        name for row in table("| the ... differs | usual cause |") for name in row[0].split(", ")
    ]
    assert set(rows) == set(verdict_text._NAMED.values())


def test_numbers() -> None:
    said = {
        f"{BUFFER_BYTES / 2**20:.1f} MiB of shared memory for each rank",
        f"beyond the first {GROUPS} of a process",
        f"the last {RECORDS} collectives",
    }
    assert {text for text in said if text not in PAGE} == set()


def test_quoted_messages_are_in_the_code() -> None:
    phrases = [
        phrase
        for row in table("| what the doctor says | what to do |")
        for phrase in re.findall(r"`([^`]+)`", row[0])
    ]
    names = [phrase for phrase in phrases if phrase in CHECKS or f'"{phrase}"' in SOURCES]
    assert len(names) > 6
    phrases += [
        "alive and busy elsewhere",
        "stopped by a signal",
        "frozen",
        "this job is not monitored",
        "cannot be reached",
    ]
    phrases += ["is down, frozen or cut off: silent since", "has no answer from"]
    assert [phrase for phrase in phrases if phrase not in names and phrase not in SOURCES] == []
    assert all(f"`{phrase}`" in PAGE or phrase in PAGE for phrase in phrases)


def test_end_times_of_a_failed_job() -> None:
    times = [_POLITE_S, _DEAF_S, _SHARE * Settings().exit_s, Settings().exit_s]
    assert [row[0] for row in table("| after the error | |")] == [
        f"{seconds:g} s" for seconds in times
    ]


def test_links() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert [link for link in re.findall(r"\]\(#([\w-]+)\)", PAGE) if link not in headings] == []
    assert [
        file for file in re.findall(r"\]\((\w+\.md)\)", PAGE) if not (DOCS / file).exists()
    ] == []
