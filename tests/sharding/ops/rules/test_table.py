"""Every function of the operator table on every combination of placements, compared with one
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardmesh.sharding.ops import strategy
from shardmesh.sharding.ops.rules.check import prove
from shardmesh.sharding.ops.rules.registry import DECOMPOSITIONS, HANDLERS, RULES
from tests.sharding.ops.rules import (
    samples_conv,
    samples_fft,
    samples_index,
    samples_linalg,
    samples_matmul,
    samples_nn,
    samples_pointwise,
    samples_reduction,
    samples_view,
)
from tests.sharding.ops.rules.table import OWNERS, Call, registered, samples_of

FILLED = (
    samples_conv,
    samples_fft,
    samples_index,
    samples_linalg,
    samples_matmul,
    samples_nn,
    samples_pointwise,
    samples_reduction,
    samples_view,
)
# Not operators whose results are a matter of values and placements alone; they have tests of their
# own.
ELSEWHERE = (
    "rules.elementwise.like",
    "rules.random.draw",
    "rules.random.dropout",
    "rules.random.init",
    "rules.metadata",
    "rules.optim.foreach",
    "autograd.backward",
    "tensor.methods",
)
# Refusals, which are tested where the others are, and what has another name here.
WITHOUT_SAMPLES = (
    "Tensor.cuda",
    "Tensor.requires_grad_",
    "torch._pack_padded_sequence",
    "torch._pad_packed_sequence",
    "linalg.eig",
)


# Meshes, and how many combinations to try on each. Functions that share a rule are tried briefly,
# and again under another owner (`torch.add`, `Tensor.add`). `make test` tries a few of them, for
# one function of each rule and each call on one mesh; slow tests try all, and three times as many:
# on (3,) 18 are all of two operands of two dims, on (2, 2) 18 are all of one.
THOROUGHLY = {(3,): 8, (2, 2): 6}
BRIEFLY = {(3,): 3, (2, 2): 2}
ONCE_MORE = {(2, 2): 1}


def _family(func: Callable[..., Any]) -> str:
    maker = _makers(func)[0]
    return getattr(maker, "__module__", "") or getattr(maker, "func", maker).__module__


def _makers(func: Callable[..., Any]) -> tuple[Any, ...]:
    """Return what is registered for a function: its rule, its decomposition, its handler."""
    return tuple(
        maker
        for table in (RULES, DECOMPOSITIONS, HANDLERS)
        if (maker := table.get(func)) is not None
    )


def _table() -> list[Any]:
    """Return one case for each function: name, function, and how thoroughly to test it."""
    cases, makers, names = [], set(), set()
    for label, func in registered():
        if (
            _family(func).endswith(ELSEWHERE)
            or label in WITHOUT_SAMPLES
            or label.partition(".")[0] not in OWNERS
        ):
            continue
        maker, name = _makers(func), label.rpartition(".")[2]
        extent = THOROUGHLY if maker not in makers else BRIEFLY if name not in names else ONCE_MORE
        cases.append(
            pytest.param(
                label,
                func,
                extent,
                id=label,
                marks=[] if extent is THOROUGHLY else [pytest.mark.slow],
            )
        )
        makers.add(maker)
        names.add(name)
    return cases


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, torch.Tensor) and entry.dtype is torch.bool


def _runs_gathered(label: str, c: Call) -> bool:
    """Return whether a call has no rule by design, since the shape of its result depends on
    values.
    """
    if label != "Tensor.__getitem__":
        return False
    index = c.args[1]
    return any(map(_is_mask, index if isinstance(index, tuple) else (index,)))


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings(
    "ignore:torch.* is deprecated",
    "ignore:at::",
    "ignore:Using torch.cross without",
    "ignore:index_reduce",
)
@pytest.mark.parametrize(("label", "func", "extent"), _table())
@pytest.mark.parametrize(
    "times",
    [
        0.15,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow, id="slow"),
    ],
)
def test_rule(
    label: str,
    func: Callable[..., Any],
    extent: dict[tuple[int, ...], int],
    times: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = samples_of(label)
    assert calls, f"{label} is in the table and has no sample"
    for number, c in enumerate(calls):
        tried = list(extent.items())
        if times < 1:  # one mesh, and the next call on the other one
            tried = [tried[number % len(tried)]]
        with monkeypatch.context() as patch:
            if _runs_gathered(label, c):
                patch.setattr(strategy, "_warned", {func})
            else:
                patch.setattr(strategy, "_gathering_strategy", _refuse)
            ran = sum(
                prove(func, c.args, c.kwargs, meshes=[mesh], most=math.ceil(most * times))
                for mesh, most in tried
            )
            # In-place operators refuse layouts that they would have to change: among a few there
            # may be no other.
            assert ran > 0 or any(
                prove(func, c.args, c.kwargs, meshes=[(2, 2)], most=most) > 0 for most in (24, None)
            )


def _refuse(func: Callable[..., Any], *_: Any) -> Any:
    raise AssertionError(f"{func} ran gathered")
