"""Programs of other tests under `sm.jit`: the bits of eager code in every call, or a `JitError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.jit.errors import JitError
from tests.device import DEVICE
from tests.sharding.functional.programs import make
from tests.sharding.functional.test_random_programs import call, mapped, spec_placements
from tests.sharding.ranks import on_mesh, place
from tests.sharding.test_loud import DRAWN, EQUAL, LOUD, NESTED, UNEVEN, plain
from tests.sharding.test_traps import CLASSES, LOSSES, X

Jit = Callable[..., Any]
CALLS = 4


def jit(f: Callable[..., Any]) -> Any:
    return sm.jit(f, backend="eager")


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("ignore:.*no sharding rule", "ignore:.*was recorded 8 times")
@pytest.mark.parametrize("name", EQUAL)
def test_programs_of_the_loud_tests(name: str) -> None:
    def main(wrap: Jit) -> list[Any]:
        sm.random.manual_seed(1)
        mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
        f = wrap(
            lambda: plain(
                EQUAL[name](lambda t, spec: sm.device_put(t, mesh, spec, src_data_rank=None))
            )
        )
        return [f() for _ in range(CALLS)]

    expected = sm.simulate(4)(main)(lambda f: f)
    found = sm.simulate(4)(main)(jit)
    # Under a dispatch mode torch's svdvals computes vectors, too.
    assert_same(found, expected, 1e-15 if "matrix norms" in name else 0)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_numbers_of_the_loud_tests(name: str) -> None:
    def main(wrap: Jit) -> list[Any]:
        sm.random.manual_seed(7)
        mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
        f = wrap(lambda x: plain(DRAWN[name](x)))
        return [
            f(sm.device_put(torch.zeros(7, 6), mesh, spec, src_data_rank=None))
            for spec in (NESTED, UNEVEN, P()) * 3
        ]

    assert_same(sm.simulate(4)(main)(jit), sm.simulate(4)(main)(lambda f: f))


@pytest.mark.parametrize("name", LOUD)
def test_errors_of_the_loud_tests(name: str) -> None:
    """The same error as eager code, or that the graph could not repeat it."""
    program, kind, text = LOUD[name]

    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
        f = jit(lambda: program(mesh))
        for _ in range(2):
            with pytest.raises((kind, JitError), match=f"{text}|reads a value"):
                f()

    sm.simulate(4)(main)()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_traps(name: str) -> None:
    def main(wrap: Jit) -> list[Any]:
        mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
        f = wrap(LOSSES[name])
        given = [
            sm.device_put(t, mesh, P("a"), src_data_rank=None) for t in (X, X.flip(0), CLASSES)
        ]
        return [f(*given).full_tensor() for _ in range(CALLS)]

    assert_same(sm.simulate(4)(main)(jit), sm.simulate(4)(main)(lambda f: f))


def assert_same(found: Any, expected: Any, rtol: float = 0, atol: float = 0) -> None:
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("part", range(20))
def test_random_programs(part: int) -> None:
    """Values and gradients of mapped functions; those that types refuse are refused as before."""
    assert equal_programs(range(part * 15, part * 15 + 15), "eager") >= 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_programs_with_inductor(part: int) -> None:
    assert equal_programs(range(part * 5, part * 5 + 5), "inductor", 1e-9) >= 1


def equal_programs(seeds: range, backend: str, tolerance: float = 0) -> int:
    """Compare programs under `sm.jit` with eager ones; return how many ran and were equal."""
    equal = 0
    for seed in seeds:
        program, _ = make(seed)

        def main(mesh: sm.DeviceMesh, wrap: Jit, program: Any = program) -> list[Any]:
            f = mapped(program, mesh)
            g = wrap(lambda *leaves: call(program, f, leaves))
            found = []
            for number in (0, 0, 1, 0, 1):
                pairs = zip(program.inputs(number), program.given, strict=True)
                leaves = [
                    place(
                        mesh, x.detach(), *spec_placements(spec, mesh, x.ndim), grad=x.requires_grad
                    )
                    for x, spec in pairs
                ]
                results, grads = g(*leaves)
                found.append(
                    (
                        [y.detach() for y in results],
                        [None if x is None else x.to_local() for x in grads],
                    )
                )
            return found

        def run(wrap: Jit) -> Any:
            try:
                return on_mesh(program.mesh, lambda mesh: main(mesh, wrap))  # noqa: B023
            except (JitError, sm.errors.ShardingTypeError, RuntimeError, ValueError) as error:
                return error

        expected, found = run(lambda f: f), run(lambda f: sm.jit(f, backend=backend))
        if isinstance(found, JitError):
            continue
        if isinstance(expected, Exception):
            assert type(found) is type(expected), f"{program}{found!r}"
            continue
        assert not isinstance(found, Exception), f"{program}{found!r}"
        # Under a dispatch mode torch computes the gradient of prod by another formula.
        assert_same(
            found, expected, max(tolerance, 1e-15 if ".prod(" in str(program) else 0), tolerance
        )
        equal += 1
    return equal
