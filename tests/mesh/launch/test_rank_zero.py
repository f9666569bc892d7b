"""rank_zero and main_process_first: order of ranks, propagation of errors, and warnings for
collectives that cannot finish.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest
import torch

from shardmesh.mesh import CollectiveMismatchError, DeadlockError, current_world, simulate
from shardmesh.mesh.errors import LaunchEnvironmentError, PeerError
from shardmesh.mesh.launch.rank_zero import main_process_first, rank_zero
from tests.pool import Pool


def everyone():
    return current_world().group(range(current_world().size))


@rank_zero
def greet(name: str, *, loud: bool = False) -> str:
    """Return a greeting."""
    return name.upper() if loud else name


@rank_zero(local=True)
def on_each_host() -> int:
    return current_world().rank


def test_only_rank_0_runs() -> None:
    assert simulate(3)(greet)("ann", loud=True) == ["ANN", None, None]
    assert simulate(3)(rank_zero(lambda: 7, local=True))() == [7, None, None]
    assert greet("alone") == "alone"
    assert (greet.__name__, greet.__doc__) == ("greet", "Return a greeting.")


def set_hosts(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: str | None, local_size: str = "2"
) -> None:
    values = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    values |= (
        {} if local_rank is None else {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    )
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", range(4))
def test_before_init_the_rank_comes_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    set_hosts(monkeypatch, rank, str(rank % 2))
    assert greet("ann") == ("ann" if rank == 0 else None)
    assert (on_each_host() is None) == (rank % 2 == 1)
    text = "before the default process group of the 4 processes is started"
    with pytest.raises(LaunchEnvironmentError, match=text), main_process_first():
        pytest.fail("the block must not run")


def test_unset_local_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    set_hosts(monkeypatch, 1, None)
    with pytest.raises(LaunchEnvironmentError, match=r"LOCAL_RANK=''.*are not both set"):
        on_each_host()


# ------------------------------------------------------------------------------- main_process_first


def order(local: bool) -> list[int]:
    seen = ORDER if current_world().monitor is None else []
    with main_process_first(local=local):
        seen.append(current_world().rank)
    everyone().barrier()
    return seen


ORDER: list[int] = []


@pytest.mark.parametrize("local", [False, True])
def test_rank_0_runs_the_block_before_the_others(local: bool) -> None:
    ORDER.clear()
    simulate(4)(order)(local)
    assert ORDER[0] == 0
    assert sorted(ORDER) == [0, 1, 2, 3]


def download(folder: str, local: bool) -> bool:
    """Let rank 0 take a while; return whether this rank found its result."""
    path = Path(folder) / "file"
    with main_process_first(local=local):
        found = path.exists()
        if not found:
            time.sleep(0.2)
            path.touch()
    everyone().barrier()
    return found


def fail_first() -> tuple[str, float]:
    """Raise on rank 0 inside; return this rank's error, and a sum over all ranks afterwards."""
    try:
        with main_process_first():
            if current_world().rank != 0:
                return "ran", 0.0
            raise ValueError("disk full")
    except (ValueError, PeerError) as error:
        said = f"{type(error).__name__}: {error}"
    x = torch.ones(1)
    everyone().all_reduce(x)
    return said, x.item()


@pytest.mark.parametrize("local", [False, True])
def test_processes_see_the_results_of_rank_0(world4: Pool, tmp_path: Path, local: bool) -> None:
    assert world4(download, str(tmp_path), local) == [False, True, True, True]


def test_errors_of_rank_0_are_raised_on_all_ranks(world4: Pool) -> None:
    first, *others = world4(fail_first)
    assert first == ("ValueError: disk full", 4.0)  # and the job can go on
    for said, total in others:
        assert said.startswith(
            f"PeerError: rank 0 raised ValueError in main_process_first at {__file__}:"
        )
        assert "disk full" in said
        assert "in fail_first" in said  # the traceback
        assert total == 4.0


def test_simulated_world_raises_the_original_error() -> None:
    with pytest.raises(ValueError, match="disk full") as caught:
        simulate(3)(fail_uncaught)()
    assert any("rank 0" in note for note in caught.value.__notes__)


def fail_uncaught() -> None:
    with main_process_first():
        raise ValueError("disk full")


# ----------------------------------------------------------------------------------------- warnings


@rank_zero
def reduce_alone() -> None:
    for _ in range(2):
        everyone().all_reduce(torch.ones(1))


def reduce_first() -> None:
    with main_process_first():
        everyone().all_reduce(torch.ones(1))


def line_of(text: str) -> int:
    return next(
        n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line
    )


@pytest.mark.parametrize(
    ("program", "name", "line"),
    [
        (reduce_alone, "rank_zero(reduce_alone): ranks 1, 2", line_of("for _ in range(2)") + 1),
        (reduce_first, f"main_process_first() at {__file__}:", line_of("def reduce_first") + 2),
    ],
)
def test_collective_that_cannot_finish_warns_once(
    program, name: str, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmesh.mesh.launch.rank_zero._warned", set())
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises((DeadlockError, CollectiveMismatchError)):
                simulate(3)(program)()
        assert len(caught) == times
        for warning in caught:
            assert f"all_reduce over ranks 0,1,2 inside {name}" in str(warning.message)
            assert (warning.filename, warning.lineno) == (__file__, line)


def harmless() -> float:
    """Run collectives inside regions in which they can finish."""
    rank = current_world().rank
    inner = rank_zero(lambda: simulate(2)(sum_of_ranks)())()
    rank_zero(lambda: current_world().group([0]).all_reduce(torch.ones(1)))()
    with main_process_first():
        if rank:
            # These two run the block together.
            current_world().group([1, 2]).all_reduce(torch.ones(1))
    return 0.0 if inner is None else inner[0]


def sum_of_ranks() -> float:
    x = torch.tensor([float(current_world().rank)])
    everyone().all_reduce(x)
    return x.item()


def test_collectives_that_can_finish_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert simulate(3)(harmless)() == [1.0, 0.0, 0.0]


def test_regions_restore_all_state() -> None:
    def observers() -> list[int]:
        before = len(current_world().observers)
        rank_zero(lambda: None)()
        with main_process_first():
            inside = len(current_world().observers)
        return [inside - before, len(current_world().observers) - before]

    assert simulate(2)(observers)() == [[1, 0], [1, 0]]
