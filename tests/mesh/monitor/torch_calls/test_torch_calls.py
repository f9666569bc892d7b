"""The program's own calls of torch.distributed: recorded once, torch restored afterwards, and
torch.compile unaffected.
"""

from __future__ import annotations

import pytest

from shardmesh.mesh.comm.recording.trace_buffer import TraceBuffer, stable_hash
from shardmesh.mesh.errors import LaunchEnvironmentError
from shardmesh.mesh.monitor.diagnosis.history import left_the_order
from shardmesh.mesh.settings import from_environment
from tests.forked import Ended, Forked
from tests.mesh.monitor.torch_calls import torch_call_ranks as programs


def outputs(ended: list[Ended]) -> list[str]:
    assert [rank.status for rank in ended] == [0] * len(ended), ended[0].output
    return [rank.output for rank in ended]


def test_every_call_is_recorded(forked: Forked) -> None:
    for rank, output in enumerate(outputs(forked(programs.notes_everything_down, 2))):
        for text in (
            "0 all_reduce(max, float32, 4 elements) over torch's default group",
            "1 broadcast(src=1, float32, 4 elements) over torch's default group",
            "2 barrier() over torch's default group",
            # the functional one
            "3 all_reduce(sum, float32, 4 elements) over torch's default group",
            "all_reduce(sum, float32, 3 elements) over torch's default group",  # DDP's
            f"0 {'recv(from rank 0' if rank else 'send(to rank 1'}, float32, 4 elements) over "
            "messages from rank 0 to rank 1 in torch's",
            "under way True over True",
        ):
            assert text in output, output


def test_the_setting(forked: Forked) -> None:
    for output in outputs(forked(programs.is_put_back, 2, "off", SHARDMESH_MONITOR_TORCH="off")):
        assert "patched False as before True inner groups 0" in output
    with pytest.raises(
        LaunchEnvironmentError, match="SHARDMESH_MONITOR_TORCH='yes': write one of on, off"
    ):
        from_environment({"SHARDMESH_MONITOR_TORCH": "yes"})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["stopped", "destroyed"])
def test_torch_is_restored(forked: Forked, how: str) -> None:
    for output in outputs(forked(programs.is_put_back, 2, how)):
        assert "patched True as before True inner groups 0" in output


def test_shared_groups(forked: Forked) -> None:
    for output in outputs(forked(programs.shares_a_mesh_of_torchs, 2)):
        assert "library 3 torch 2" in output  # its new_group and its all_reduce


@pytest.mark.slow
def test_torch_compile(forked: Forked) -> None:
    for output in outputs(forked(programs.compiles, 2, limit_s=100.0)):
        assert "compiled [3.0, 3.0] calls 1" in output
        assert "torch_call_ranks.py" in output


def test_monitor_that_gives_up(forked: Forked) -> None:
    for output in outputs(forked(programs.goes_on_after_the_watch_has_given_up, 2)):
        assert "went on" in output


# -- who left the order ----------------------------------------------------------------------------


def buffers(*histories: str) -> dict[int, TraceBuffer]:
    """Return a trace buffer for each rank; a call is op:axes."""
    found = {}
    for rank, history in enumerate(histories):
        buffer = found[rank] = TraceBuffer.private(rank, len(histories))
        groups: dict[str, tuple[int, int]] = {}
        for number, call in enumerate(history.split()):
            op, _, axes = call.partition(":")
            if axes not in groups:
                ranks = (
                    "0,1" if axes.startswith("half") else ",".join(map(str, range(len(histories))))
                )
                label = f"torch's group {axes}" if axes.startswith("half") else axes
                row = buffer.add_group(stable_hash(axes), f"{label}\t{ranks}")
                assert row is not None
                groups[axes] = row, 0
            row, sequence = groups[axes]
            groups[axes] = row, sequence + 1
            buffer.write_record(number, (row << 48 | sequence, buffer.text(op), 0, 1, 0, 0, 0, 0))
    return found


@pytest.mark.parametrize(
    ("histories", "stuck", "outlier"),
    [
        (["ar:x ar:x", "ar:x b:d", "ar:x b:d", "ar:x b:d"], (1, 1, 1, 1), (0,)),
        (["ar:x ar:x", "ar:x ar:x", "ar:x b:d", "ar:x b:d"], (1, 1, 1, 1), ()),
        # Messages are left out.
        (["send:m ar:x ar:x", "recv:m ar:x b:d", "ar:x b:d", "ar:x b:d"], (2, 2, 1, 1), (0,)),
        # As are groups of some ranks.
        (["ar:half1 ar:x ar:x", "ar:half1 ar:x b:d", "ar:x b:d", "ar:x b:d"], (2, 2, 1, 1), (0,)),
        # Who sends, who receives: nobody can tell.
        (["ar:x recv:m", "ar:x b:d", "ar:x b:d", "ar:x b:d"], (1, 1, 1, 1), ()),
        # All but one do.
        (["send:a recv:a", "send:a recv:a", "b:d", "send:a recv:a"], (1, 1, 0, 1), (2,)),
        # Too long ago.
        (
            ["b:d ar:x b:d ar:x", "ar:x b:d ar:x", "ar:x b:d ar:x", "ar:x b:d ar:x"],
            (3, 2, 2, 2),
            (),
        ),
    ],
)
def test_rank_that_left_the_order(
    histories: list[str], stuck: tuple[int, ...], outlier: tuple[int, ...]
) -> None:
    assert left_the_order(buffers(*histories), dict(enumerate(stuck))) == outlier
