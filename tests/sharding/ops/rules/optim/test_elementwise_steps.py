"""torch's elementwise optimizer steps run on the parts; on a GPU, for which tensors without memory
stand in, with `step` beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import shardmesh as sm
from shardmesh import P, ShardedTensor
from shardmesh.mesh import device_mesh
from tests.recorded_operators import RecordedOperators
from tests.sharding.ops.rules.optim.test_implementation import MAKERS, sharded, stepped
from tests.sharding.ranks import every_rank, on_mesh

GPU = torch.device("cuda", 0)
SHAPES, SPECS = [(4, 3), (6, 2), (5,)], [P("a"), P(None, "a"), P()]


class _FakeFactories(TorchFunctionMode):
    """Tensors made on a GPU have no memory."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if ShardedTensor in types or str(kwargs.get("device")) != str(GPU):
            return func(*args, **kwargs)
        with self.fake:
            return func(*args, **kwargs)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    monkeypatch.setattr(
        device_mesh, "local_device", lambda device_type: torch.device(device_type, 0)
    )
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    fake = FakeTensorMode()
    with sm.debug.null_world(2), _FakeFactories(fake):
        yield fake


def _part(shape: Any, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        return torch.empty(shape, device=GPU)


def _on_gpu(fake: FakeTensorMode) -> list[Any]:
    """Parameters with gradients, as rank 0 of 2 has them."""
    mesh = sm.init_device_mesh("cuda", (2,), axis_names=("a",))
    params = []
    for shape, spec in zip(SHAPES, SPECS, strict=True):
        local = [n // 2 if i < len(spec.dims) and spec.dims[i] else n for i, n in enumerate(shape)]
        x: Any = sm.from_local(_part(local, fake), mesh, spec, shape=shape)
        x.grad = torch.ones_like(x)
        params.append(x)
    return params


def _plain_on_gpu(params: list[Any], fake: FakeTensorMode) -> list[torch.Tensor]:
    plain = [_part(x._local.shape, fake) for x in params]
    for x in plain:
        x.grad = _part(x.shape, fake)
    return plain


def _calls_of_second_step(optimizer: torch.optim.Optimizer) -> list[str]:
    optimizer.step()
    with RecordedOperators("aten") as called:
        optimizer.step()
    return called.names


@pytest.mark.parametrize("how", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam amsgrad"])
def test_a_step_on_a_gpu_is_that_of_plain_tensors(
    name: str, how: dict[str, bool], on_gpu: FakeTensorMode
) -> None:
    """Fused and capturable ones keep `step` on the GPU, which torch compares with the device of the
    lists: of the parts, not "meta".
    """
    params = _on_gpu(on_gpu)
    optimizer = MAKERS[name](params, **how)
    plain = MAKERS[name](
        _plain_on_gpu(params, on_gpu), **({"foreach": True} | how if "fused" not in how else how)
    )
    assert _calls_of_second_step(optimizer) == _calls_of_second_step(plain)
    on = {str(state["step"].device) for state in optimizer.state.values()}
    assert on == ({"cpu"} if how == {"foreach": True} else {str(GPU)})


@pytest.mark.parametrize(
    "name", ["AdamW", "SGD", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax"]
)
def test_default_on_a_gpu_is_foreach(name: str, on_gpu: FakeTensorMode) -> None:
    """As for plain tensors there; for those without memory torch has to be asked for it."""
    params = _on_gpu(on_gpu)
    found = _calls_of_second_step(MAKERS[name](params))
    assert found == _calls_of_second_step(MAKERS[name](_plain_on_gpu(params, on_gpu), foreach=True))
    assert any(one.startswith("_foreach_") for one in found)


class _OnWrappers(TorchFunctionMode):
    """The names of functions that are called on `ShardedTensor`s."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ShardedTensor in types:
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", [{"foreach": True}, {}], ids=["foreach", "default"])
@pytest.mark.parametrize(
    "name",
    [
        "AdamW",
        "Adam amsgrad",
        "SGD",
        "Adagrad",
        "RMSprop",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adadelta",
        "Rprop",
    ],
)
def test_steps_run_on_the_parts(name: str, how: dict[str, bool]) -> None:
    """No operator is dispatched per parameter but the question whether it is complex; state stays
    sharded.
    """

    def program(mesh: sm.DeviceMesh) -> None:
        params = sharded(mesh)
        optimizer = MAKERS[name](params, **how)
        stepped(params, optimizer)  # buffers are made in the first steps
        before = [(x._lineage, x._local._version) for x in params]
        with _OnWrappers() as called:
            optimizer.step()
        assert called.names <= {"is_complex"}
        assert all(
            x._lineage != lineage and x._local._version > version
            for x, (lineage, version) in zip(params, before, strict=True)
        )
        states = [
            y
            for state in optimizer.state.values()
            for key, y in state.items()
            if isinstance(y, torch.Tensor) and y.ndim
        ]
        assert all(type(y) is ShardedTensor for y in states)

    on_mesh((2, 2), program)


@every_rank(2)
def test_lineages_of_a_step_depend_on_gradients(mesh: sm.DeviceMesh) -> None:
    """And differ between a parameter and its state."""
    found = []
    for make in (torch.ones_like, torch.sin):
        x: Any = sm.distribute_tensor(torch.ones(4), mesh, P("a"))
        x._lineage = 1
        x.grad = make(x)
        optimizer = torch.optim.AdamW([x], foreach=True)
        optimizer.step()
        found.append(
            (
                x._lineage,
                *(y._lineage for y in optimizer.state[x].values() if type(y) is ShardedTensor),
            )
        )
    assert len({*found[0], *found[1]}) == 6
