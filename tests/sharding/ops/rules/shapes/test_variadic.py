"""Methods of tensors that take several ints, or a sequence of them, as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh

CALLS: dict[str, Callable[[Any], Any]] = {
    "squeeze ints": lambda x: x.squeeze(0, 1),
    "squeeze negative": lambda x: x.squeeze(-3, 1),
    "squeeze tuple": lambda x: x.squeeze((0, 1)),
    "squeeze dim=": lambda x: x.squeeze(dim=(0, 1)),
    "squeeze all": lambda x: x.squeeze(),
    "torch.squeeze": lambda x: torch.squeeze(x, (0, 1)),
    "permute": lambda x: x.permute(-1, 0, 1),
    "flip": lambda x: x.flip(0, -1),
    "expand": lambda x: x.expand(3, -1, -1),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "tile": lambda x: x.tile(2, 1),
    "view": lambda x: x.view(1, -1, 6),
    "reshape": lambda x: x.reshape(4, 6),
    "new_zeros": lambda x: x.new_zeros(2, 3),
    "roll": lambda x: x.roll((1, 2), (1, 2)),
    "movedim": lambda x: x.movedim((0, 1), (1, 0)),
    "sum": lambda x: x.sum((0, 1)),
    "amax": lambda x: x.amax([1, 2], True),
    "flip tuple": lambda x: x.flip((0, 2)),
    "expand list": lambda x: x.expand([3, 4, 6]),
    "repeat tuple": lambda x: x.repeat((2, 1, 1, 2)),
    "tile int": lambda x: x.tile(2),
    "view Size": lambda x: x.view(torch.Size([4, 6])),
    "reshape shape=": lambda x: x.reshape(shape=(2, 12)),
    "roll int": lambda x: x.roll(1),
    "rot90": lambda x: x.rot90(-1, [1, 2]),
    "unflatten": lambda x: x.unflatten(-1, [3, -1]),
    "unflatten kw": lambda x: x.unflatten(dim=1, sizes=(2, 2)),
    "moveaxis": lambda x: x.moveaxis((0, 1), (2, 0)),
    "swapaxes": lambda x: x.swapaxes(axis0=0, axis1=2),
    "split": lambda x: x.split((1, 3), 1)[1],
    "tensor_split": lambda x: x.tensor_split(indices=(1,), dim=1)[0],
    "hsplit ints": lambda x: x.hsplit(1, 3)[1],
    "dsplit list": lambda x: x.dsplit([2, 4])[1],
    "sum_to_size": lambda x: x.sum_to_size(1, 1, 6),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0, 1], [0, 1])),
    "gradient": lambda x: torch.gradient(x, dim=(1, 2))[0],
    "einsum list": lambda x: torch.einsum("abc,abd->cd", [x, x]),
}


@pytest.mark.parametrize("name", CALLS)
def test_like_torch(name: str) -> None:
    call, x = CALLS[name], torch.arange(24.0).reshape(1, 4, 6)

    def program(mesh: Any) -> None:
        for spec in (P(), P(None, "a"), P(None, None, "a")):
            placed = sm.device_put(x.to(DEVICE), mesh, spec)
            torch.testing.assert_close(call(placed).full_tensor().cpu(), call(x))

    on_mesh((2,), program)


# torch's functions in C++ accept NumPy's names of arguments.
NUMPY_NAMES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(axis=1, keepdims=True),
    "mean": lambda x: x.mean(axis=(0, 2)),
    "amax": lambda x: x.amax(axis=2, keepdims=True),
    "var": lambda x: torch.var(x, axis=1),
    "logsumexp": lambda x: x.logsumexp(axis=1),
    "max": lambda x: x.max(axis=1)[0],
    "argmax": lambda x: x.argmax(axis=-1, keepdims=True),
    "aminmax": lambda x: x.aminmax(axis=1)[1],
    "cumsum": lambda x: x.cumsum(axis=1),
    "cummax": lambda x: torch.cummax(x, axis=2)[0],
    "softmax": lambda x: torch.softmax(x, axis=1),
    "diff": lambda x: torch.diff(x, axis=1),
    "cat": lambda x: torch.cat([x, x], axis=2),
    "topk": lambda x: x.topk(2, axis=1)[0],
    "chunk": lambda x: x.chunk(2, axis=1)[1],
    "unbind": lambda x: x.unbind(axis=1)[2],
    "quantile": lambda x: torch.quantile(x, 0.5, axis=1, keepdims=True),
    "select": lambda x: torch.select(x, axis=1, index=2),
    "narrow": lambda x: torch.narrow(x, axis=2, start=1, length=3),
}


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_names_of_numpy(name: str) -> None:
    call, x = NUMPY_NAMES[name], torch.arange(24.0).reshape(1, 4, 6)

    def program(mesh: Any) -> None:
        for spec in (P(), P(None, "a"), P(None, None, "a")):
            placed = sm.device_put(x.to(DEVICE), mesh, spec)
            torch.testing.assert_close(call(placed).full_tensor().cpu(), call(x))

    on_mesh((2,), program)


def test_an_argument_by_both_names_raises() -> None:
    def program(mesh: Any) -> None:
        x = sm.device_put(torch.ones(4), mesh, P("a"))
        with pytest.raises(TypeError, match="axis"):
            x.sum(dim=0, axis=0)

    on_mesh((2,), program)
