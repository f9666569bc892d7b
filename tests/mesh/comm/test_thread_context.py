"""The state of a thread: its defaults, and what a function that runs again gets back.

No other module keeps state by thread.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.mesh import null_world, simulate
from shardmesh.mesh.comm.thread_context import FunctionState, ThreadContext, thread_context

FIELDS = tuple(ThreadContext.__annotations__)
# What a thread is in the middle of. Recomputation must not get it back: it is recorded, mapped and
# transformed where backward is called.
OF_THE_CALL = {
    "recorder",
    "axis_env",
    "batch",
    "level_count",
    "vmap_randomness",
    "forward_mode_depth",
    "grad_depth",
    "in_joined_function",
    "grad_is_nested",
    "starts_async",
    "schedule",
    "elementwise_step",
    "runs_opaque",
    "segment_calls",
    "last_draw",
    "on_stand_ins",
    "outside_mesh",
    "own_torch_call",
    "local_map_tree",
    "module_calls",
    "weights",
}
ROOT = Path(__file__).parents[3]


class Counted:
    """A replacement of a function of torch's that counts its users."""

    def __init__(self) -> None:
        self.users = 0

    def install(self) -> None:
        self.users += 1

    def uninstall(self) -> None:
        self.users -= 1


def _present() -> dict[str, Any]:
    return {name: getattr(thread_context, name) for name in FIELDS}


def test_each_field_is_of_the_function_or_of_the_call() -> None:
    """A new field belongs into one of both: add it to `FunctionState`, or here."""
    assert set(FIELDS) == {*FunctionState._fields, *OF_THE_CALL}
    assert not OF_THE_CALL & set(FunctionState._fields)


def test_each_field_is_documented_and_has_a_default() -> None:
    documented = set(re.findall(r"^        (\w+): ", ThreadContext.__doc__ or "", re.MULTILINE))
    assert documented == set(FIELDS)
    assert all(name in vars(ThreadContext) for name in FIELDS)


def test_a_state_has_each_field_and_restores_it() -> None:
    values: dict[str, Any] = {name: object() for name in FunctionState._fields}
    values["plain_attention"], values["parts"] = Counted(), Counted()
    before = _present()
    with thread_context.running_as(FunctionState(**values)):
        assert {name: getattr(thread_context, name) for name in FunctionState._fields} == values
        state = thread_context.function_state()
    assert state == FunctionState(**values)
    assert _present() == before
    with pytest.raises(ZeroDivisionError), thread_context.running_as(state):
        raise ZeroDivisionError
    assert _present() == before
    assert values["plain_attention"].users == values["parts"].users == 0


def test_a_replacement_is_installed_where_a_function_runs_again() -> None:
    outer, inner = Counted(), Counted()
    state = thread_context.function_state()
    with thread_context.running_as(state._replace(plain_attention=outer)):
        assert (outer.users, inner.users) == (1, 0)
        with thread_context.running_as(state._replace(plain_attention=inner)):
            assert (outer.users, inner.users) == (0, 1)
        with thread_context.running_as(state):
            assert (outer.users, inner.users) == (0, 0)
        assert (outer.users, inner.users) == (1, 0)
    assert (outer.users, inner.users) == (0, 0)


def test_a_thread_starts_from_the_defaults() -> None:
    defaults = {name: vars(ThreadContext)[name] for name in FIELDS}
    seen: list[Any] = []
    with sm.ops.implicit_replication(), null_world(4):
        thread = threading.Thread(target=lambda: seen.append(_present()))
        thread.start()
        thread.join()
    assert seen == [defaults]


def test_a_rank_starts_from_the_defaults_in_a_thread_that_was_used() -> None:
    def leaves_state() -> None:
        for name in FIELDS:
            if name not in ("world", "recorder", "own_torch_call"):
                setattr(thread_context, name, "left by the last rank")

    simulate(2)(leaves_state)()
    defaults = {name: vars(ThreadContext)[name] for name in FIELDS if name != "world"}
    for seen in simulate(2)(_present)():
        assert {name: value for name, value in seen.items() if name != "world"} == defaults


def test_what_needs_each_operator() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        seen.append(thread_context.needs_each_operator)
        return x.sum()

    seen = [thread_context.needs_each_operator]
    sm.grad(loss)(torch.ones(3))
    torch.func.vmap(loss)(torch.ones(3, 2))
    assert seen == [False, True, True]


def test_state_by_thread_is_kept_nowhere_else() -> None:
    """But for the lineage, which is by world as well, or of the program's own calls, and for the
    kernels, which import nothing.
    """
    uses = [
        path.relative_to(ROOT).as_posix()
        for folder in ("mesh", "sharding", "kernels", "shardmesh")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for _ in re.finditer(r"threading\.local|_thread\._local", path.read_text())
    ]
    assert uses == [
        "mesh/comm/comm_context.py",
        "mesh/comm/thread_context.py",
        "kernels/backend.py",
    ]
