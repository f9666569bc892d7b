"""Run calls one of whose arguments has a gradient history, as a loss of a model's outputs has.

    outputs = model(x)
    loss = sm.jit(loss_of)(outputs, y)     forward program
    loss.backward()                        backward program; its gradients go on through `outputs`

They are two programs, as calls of a module are (`joined.py`): stand-ins for the arguments keep the
caller's history out of what is recorded. The programs have the collectives of eager code, so each
rank records by itself, and nothing that one rank learns in such a call, such as a break, has a part
in calls on which ranks agree.

What would have to reach the caller's history, and ends at the stand-ins, runs eagerly: gradients
that the function computes, or an optimizer that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...mesh.comm.thread_context import thread_context
from .entry import Static
from .joined import JoinedFunction
from .parts import Parts, log_break
from .state.names import assignments_of, codes
from .state.snapshot import Snapshot

_FORMS = 8  # structures of the arguments and static values that are two programs
_OF_HISTORY = frozenset(
    {
        "backward",
        "detach_",
        "grad",
        "grad_and_value",
        "grad_fn",
        "hessian",
        "is_leaf",
        "jacrev",
        "register_hook",
        "register_multi_grad_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "value_and_grad",
        "vjp",
        "zero_grad",
    }
)
_ASSIGNED = frozenset({"data", "requires_grad"})


class CallsWithHistory:
    """What runs the calls of one function on one rank whose arguments have a gradient history.

    Args:
        name: of the function, for people.
        two_programs: returns the two programs for a structure of arguments and their static values.
        parts: returns the parts of a function that has these modules.
        fullgraph: whether a function that reaches units of `fully_shard` is two programs as well.
        is_shown: whether breaks are logged: on one rank.
    """

    def __init__(
        self,
        name: str,
        two_programs: Callable[[Any, Sequence[Static | None], Sequence[nn.Module]], JoinedFunction],
        parts: Callable[[Sequence[nn.Module]], Parts],
        fullgraph: bool,
        is_shown: bool,
    ) -> None:
        self._name, self._two_programs, self._parts = name, two_programs, parts
        self._fullgraph, self._is_shown = fullgraph, is_shown
        self._runners: dict[Any, JoinedFunction | Parts | str] = {}
        # those that have a graph in recomputations of forwards before they broke
        self._broken: dict[Any, JoinedFunction] = {}
        self._limits: set[str] = set()  # those that were logged

    @property
    def functions(self) -> list[JoinedFunction]:
        """The two programs of all calls."""
        return [x for x in self._runners.values() if isinstance(x, JoinedFunction)]

    @property
    def parts(self) -> list[Parts]:
        """The parts of calls that are no two programs."""
        return [x for x in self._runners.values() if isinstance(x, Parts)]

    def runner_of(
        self, tree: Any, leaves: Sequence[Any], look: Callable[[], Snapshot]
    ) -> JoinedFunction | Parts | str:
        """Return what runs a call: two programs, parts, or why it is eager.

        The reason is empty where it was logged before, and in recomputations of eager calls.

        Args:
            look: returns a snapshot of what the function reaches.
        """
        if not torch.is_grad_enabled():
            return "grad mode is off, and the function may turn it on"
        key = tree, tuple([x if type(x) is Static else None for x in leaves])
        broken = self._broken.get(key)
        if broken is not None and not broken.is_over:
            return broken
        runner = self._runners.get(key)
        if runner is None and thread_context.graphs_before is not None:
            return ""
        if runner is None and len(self._runners) >= _FORMS:
            return f"there were {_FORMS} other structures or static values of arguments"
        if runner is None:
            runner = self._runners[key] = self._new_runner(key, leaves, look())
        if isinstance(runner, JoinedFunction) and runner.is_over and runner.is_eager:
            self._broken[key] = runner
            runner = self._runners[key] = runner.broken or ""
        if isinstance(runner, JoinedFunction) and runner.is_over:
            self._broken[key] = runner
            reason, parts = runner.broken, self._parts(runner.modules)
            runner = self._runners[key] = parts if parts.joined else ""
            if self._is_shown and reason is not None:
                names = ", ".join(one.name for one in parts.joined.values())
                log_break(self._name, reason, f"with graphs of {names}" if names else "")
        limit = runner.limit if isinstance(runner, JoinedFunction) else None
        if limit is not None and self._is_shown and limit not in self._limits:
            self._limits.add(limit)
            log_break(self._name, limit, "but for calls that have a graph")
        return runner

    def _new_runner(
        self, key: Any, leaves: Sequence[Any], snapshot: Snapshot
    ) -> JoinedFunction | Parts | str:
        reason = self._reason_of(leaves, snapshot)
        if reason is not None:
            return reason
        is_of_units = any(hasattr(module, "_shardmesh_unit") for module in snapshot.modules)
        if is_of_units and not self._fullgraph:
            return self._parts(snapshot.modules)
        tree, static = key
        return self._two_programs(tree, static, snapshot.modules)

    def why_eager(
        self, function: JoinedFunction, leaves: Sequence[Any], look: Callable[[], Snapshot]
    ) -> str | None:
        """Return why two programs do not fit a call that has no recording, None if they do.

        It may have another callback among its arguments or in a closure than the calls before.
        """
        snapshot = look()
        if not set(snapshot.modules) <= set(function.modules):
            return "the function reaches other modules than in its first call"
        return self._reason_of(leaves, snapshot)

    def _reason_of(self, leaves: Sequence[Any], snapshot: Snapshot) -> str | None:
        """Return why a call is eager, None if it may have a graph."""
        values = [x.value if type(x) is Static else x for x in leaves]
        if any(isinstance(x, (nn.Module, torch.optim.Optimizer)) for x in values):
            return "a module or an optimizer is an argument as well"
        if snapshot.numbers:
            return "the function reaches an optimizer or an average, which it may update"
        names = names_of_history(snapshot)
        if names:
            return f"the function has `{min(names)}`, which ends at the arguments of a graph"
        return None


def names_of_history(snapshot: Snapshot) -> set[str]:
    """Return the names in the program's code by which it reads or changes gradient histories."""
    functions = snapshot.functions
    parts = [code for f in functions for code in codes(f.__code__)]
    names = {name for code in parts for name in code.co_names}
    names |= {x for code in parts for x in code.co_consts if isinstance(x, str)}  # of getattr
    assigned = frozenset[str]().union(*(assignments_of(f.__code__) for f in functions))
    return (names & _OF_HISTORY) | (assigned & _ASSIGNED)
