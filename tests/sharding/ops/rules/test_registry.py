"""The operator table: one entry for a function, and arguments by the names of a decomposition's
signature.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.sharding.ops.rules import registry
from shardmesh.sharding.ops.rules.decomposition_utils import is_split
from shardmesh.sharding.ops.rules.notation import Rule, along_dims, dim_names
from shardmesh.sharding.ops.rules.registry import decomposition, decomposition_maker, handler, rule
from tests.sharding.ranks import on_mesh


def halved(x: Any, dim: int = 0, *, by: float = 2.0) -> torch.Tensor:
    return x / by


@pytest.fixture
def empty_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RULES", "DECOMPOSITIONS", "HANDLERS"):
        monkeypatch.setattr(registry, name, {})
    monkeypatch.setattr(registry, "RESULT_IS_VIEW", set())


@pytest.mark.parametrize("register", [rule, decomposition, decomposition_maker, handler])
def test_second_registration_raises(register: Any, empty_tables: None) -> None:
    register(also=(halved,))(halved)
    with pytest.raises(
        ValueError,
        match=r"halved is registered twice: by .*\.halved and by .*test_registry.*; remove one",
    ):
        register(also=(halved,))(lambda x: x)


def test_second_rule_of_a_decomposition_raises(empty_tables: None) -> None:
    rule(also=(halved,))(lambda x: None)
    with pytest.raises(ValueError, match="halved is registered twice"):
        decomposition(also=(halved,), rule=lambda a: None)(halved)


def test_functions_of_two_names_are_registered_once(empty_tables: None) -> None:
    decomposition("softmax", "softmax")(halved)
    assert len(registry.DECOMPOSITIONS) == len(set(registry.functions("softmax")))


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1, 2), {}), ((1,), {"dim": 2}), ((), {"dim": 2, "x": 1})]
)
def test_arguments_are_bound_by_name_with_defaults(
    args: Any, kwargs: Any, empty_tables: None
) -> None:
    seen = []
    decomposition(also=(halved,), when=lambda a: seen.append(a), rule=lambda a: seen.append(a))(
        halved
    )
    assert registry.DECOMPOSITIONS[halved](*args, **kwargs) is None
    registry.RULES[halved](*args, **kwargs)
    assert [vars(a) for a in seen] == [{"x": 1, "dim": 2, "by": 2.0}] * 2


def test_prepared_value_is_the_first_argument(empty_tables: None) -> None:
    def scaled(factor: int, x: int, dim: int = 0) -> int:
        return factor * x

    decomposition(also=(halved,), prepare=lambda a: a.dim or None, rule=lambda a: None)(scaled)
    assert registry.DECOMPOSITIONS[halved](5) is None
    made: Any = registry.DECOMPOSITIONS[halved](5, dim=3)
    assert made(7, dim=3) == 21


@pytest.mark.parametrize("register", [decomposition, decomposition_maker])
def test_check_gets_the_arguments_of_the_call(register: Any, empty_tables: None) -> None:
    calls = []
    register(also=(halved,), check=lambda *args, **kwargs: calls.append((args, kwargs)))(
        lambda x, dim: halved
    )
    registry.DECOMPOSITIONS[halved](1, dim=2)
    assert calls == [((1,), {"dim": 2})]


def test_a_pattern_of_a_row_describes_the_first_parameters(empty_tables: None) -> None:
    registry.rules({"mm addmm(input, mat2, out=None)": "m k, k n -> m n"}, linear=((0,), (1,)))
    x, w = torch.empty(4, 3, device="meta"), torch.empty(3, 2, device="meta")
    made: Any = registry.RULES[torch.mm](mat2=w, input=x)
    assert made.operands == (x, w)
    assert made.inputs == ((("m",), ("k",)), (("k",), ("n",)))
    assert made.linear == ((0,), (1,))
    assert registry.RULES[torch.addmm] is registry.RULES[torch.Tensor.mm]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        registry.RULES[torch.mm](x, w, alpha=2)


def test_a_function_of_a_row_gets_the_arguments_and_the_operator(empty_tables: None) -> None:
    seen = []
    row = {"sum linalg.norm(input, dim=None, *, dtype=None)": lambda a: seen.append((a, a.func))}
    registry.rules(row, with_func=True, view=True)
    assert set(registry.RULES) == {torch.sum, torch.Tensor.sum, torch.linalg.norm}
    assert registry.RULES[torch.linalg.norm](1, dtype=2) is None
    ((arguments, func),) = seen
    assert vars(arguments) == {"input": 1, "dim": None, "dtype": 2}
    assert func is torch.linalg.norm
    assert set(registry.RULES) <= registry.RESULT_IS_VIEW


@pytest.mark.parametrize("register", [rule, decomposition_maker, handler])
def test_with_func_passes_the_operator_first(register: Any, empty_tables: None) -> None:
    register("cos", with_func=True)(lambda func, x: (func, x))
    table = next(t for t in (registry.RULES, registry.DECOMPOSITIONS, registry.HANDLERS) if t)
    made: Any = table
    assert made[torch.cos](1) == (torch.cos, 1)
    assert made[torch.Tensor.cos](1) == (torch.Tensor.cos, 1)


def test_wrong_arguments_do_not_fit_the_rule(empty_tables: None) -> None:
    decomposition(also=(halved,), rule=lambda a: None)(halved)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        registry.RULES[halved](1, out=2)


def test_decomposition_runs_where_it_applies_and_binds_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = []
    for name in ("RULES", "DECOMPOSITIONS"):
        for func in registry.functions("deg2rad"):
            monkeypatch.delitem(getattr(registry, name), func, raising=False)

    def when(a: Any) -> bool:
        bound.append(a.input.shape)
        return is_split(a.input)

    def its_rule(a: Any) -> Rule:
        return along_dims(a.input, range(a.input.ndim))

    @decomposition("deg2rad", when=when, rule=its_rule)
    def doubled(input: Any) -> Any:
        return input + input

    def program(mesh: sm.DeviceMesh) -> tuple[list[float], list[float]]:
        split = sm.distribute_tensor(torch.arange(4.0), mesh, [sm.Shard(0)])
        whole = sm.distribute_tensor(torch.arange(4.0), mesh, [sm.Replicate()])
        several = [torch.deg2rad(split).full_tensor().tolist() for _ in range(3)]
        assert several[0] == several[2]
        return several[0], torch.deg2rad(whole).full_tensor().tolist()

    try:
        results = on_mesh((2,), program)
    finally:
        for func in registry.functions("deg2rad"):
            registry.RULES.pop(func, None)
            registry.DECOMPOSITIONS.pop(func, None)
    expected = [0.0, 2.0, 4.0, 6.0], torch.deg2rad(torch.arange(4.0)).tolist()
    assert all(pair == expected for pair in results)
    assert len(bound) == 4, "once for each of two layouts on each of two ranks, not at every call"


def test_dim_names() -> None:
    assert dim_names(3, [1]) == "d0 [d1] d2"
    assert dim_names(2, prefix="k") == "k0 k1"
    assert dim_names(0) == ""
