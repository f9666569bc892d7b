"""The table of torch's DTensor surface names all that torch has, and what it says is so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh as device_mesh
import torch.distributed.tensor as tensor
import torch.distributed.tensor.experimental as experimental
import torch.distributed.tensor.parallel as parallel
from torch.distributed.tensor.experimental import _attention

from shardmesh import compat, simulate
from tests.sharding.compat.surface_dtensor import ACCEPTED, REFUSED, STATUS, WORKS

_PRIVATE_IN_USE = ("_flatten", "_unflatten", "_concatenate", "_get_root_mesh")
_BY_POSITION = {"DeviceMesh._concatenate(device_mesh_list)"}  # ours is called meshes


def parameters_of(function: Any) -> list[str]:
    """Return the names of a callable's parameters; of those in C++, from the signatures in its
    docstring.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        text = function.__init__.__doc__ if isinstance(function, type) else function.__doc__
        return sorted(set(re.findall(r"[(, ](\w+): ", text)) - {"self"})
    return [name for name in parameters if name != "self"]


def members(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    for member in dir(kind):
        is_tensors = kind is tensor.DTensor and hasattr(torch.Tensor, member)
        if not is_tensors and (
            not member.startswith("_")
            or (kind is device_mesh.DeviceMesh and member in _PRIVATE_IN_USE)
        ):
            yield f"{name}.{member}", getattr(kind, member)


def surface() -> dict[str, Any]:
    """Return torch's public names, members of classes and parameters, with the objects."""
    objects: dict[str, Any] = {}
    for module in (tensor, parallel, experimental, device_mesh):
        objects |= {name: getattr(module, name) for name in module.__all__}
    objects |= {
        name: getattr(_attention, name) for name in _attention.__all__ if not name.startswith("_")
    }
    for name in ("DTensor", "DeviceMesh", "Shard", "Replicate", "Partial", "Placement"):
        objects |= members(name, objects[name])
    keys = dict(objects)
    for name, value in objects.items():
        is_method_of_placement = (
            name.split(".")[0] in ("Shard", "Replicate", "Partial", "Placement") and "." in name
        )
        if callable(value) and not is_method_of_placement:
            keys |= {f"{name}({parameter})": value for parameter in parameters_of(value)}
    return keys


def test_every_name_of_torch_is_listed_and_no_other() -> None:
    known = surface()
    assert sorted(set(known) - set(STATUS)) == []
    assert sorted(set(STATUS) - set(known)) == []
    assert {status for status, _ in STATUS.values()} <= {WORKS, ACCEPTED, REFUSED}


def attribute(name: str, instances: dict[str, Any]) -> Any:
    """Return an object of `shardmesh.compat` by its name; members are looked up in an instance of
    the class.
    """
    owner, _, member = name.partition(".")
    return getattr(instances[owner] if member else compat, member or owner)


def instances() -> dict[str, Any]:
    mesh = compat.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    placements = {
        "Shard": compat.Shard(0),
        "Replicate": compat.Replicate(),
        "Partial": compat.Partial(),
        "Placement": compat.Replicate(),
    }
    return {"DeviceMesh": mesh, "DTensor": compat.zeros(2, device_mesh=mesh), **placements}


def test_what_works_is_there() -> None:
    made = simulate(2)(instances)()[0]
    for key, (status, _) in STATUS.items():
        if status == REFUSED:
            continue
        name, _, parameter = key.rstrip(")").partition("(")
        value = attribute(name, made)
        if parameter and key not in _BY_POSITION:
            names = inspect.signature(value).parameters
            assert parameter in names, f"{key}: the signature has {list(names)}"
            assert names[parameter].kind is not inspect.Parameter.VAR_KEYWORD, key


@pytest.mark.parametrize("name", [key for key in STATUS if "." not in key and "(" not in key])
def test_parameters_have_the_order_of_torch(name: str) -> None:
    """Arguments that torch takes by position are in the same place."""
    theirs, ours = surface()[name], getattr(compat, name)
    try:
        positional = inspect.signature(theirs).parameters.values()
    except ValueError:
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    expected = [
        p.name
        for p in positional
        if p.kind in kinds and STATUS.get(f"{name}({p.name})", (WORKS,))[0] != REFUSED
    ]
    assert [p.name for p in inspect.signature(ours).parameters.values() if p.kind in kinds][
        : len(expected)
    ] == expected


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "DTensor(args)": (lambda: compat.DTensor(torch.ones(2)), TypeError),
    "DTensor(kwargs)": (lambda: compat.DTensor(requires_grad=True), TypeError),
    "Shard.local_shard_size_and_offset": (
        lambda: compat.Shard(0).local_shard_size_and_offset(4, 2, 0),
        AttributeError,
    ),
    "Partial.ALL_REDUCE_OPS": (lambda: compat.Partial.ALL_REDUCE_OPS, AttributeError),
    "Partial.LINEAR_REDUCE_OPS": (lambda: compat.Partial.LINEAR_REDUCE_OPS, AttributeError),
    **{
        f"DeviceMesh({name})": (
            lambda name=name: compat.DeviceMesh("cpu", [0, 1], **{name: None}),
            TypeError,
        )
        for name in ("_init_backend", "_rank", "_layout", "_rank_map", "_root_mesh")
    },
}


def test_what_is_refused_raises() -> None:
    assert set(REFUSALS) == {key for key, (status, _) in STATUS.items() if status == REFUSED}

    def program() -> None:
        for key, (call, error) in REFUSALS.items():
            with pytest.raises(error):
                call()
                pytest.fail(f"{key} does not raise")

    simulate(2)(program)()


def test_what_is_accepted_has_no_effect() -> None:
    assert {key for key, (status, _) in STATUS.items() if status == ACCEPTED} == {
        "DTensor.from_local(stride)"
    }

    def program() -> None:
        mesh = compat.init_device_mesh("cpu", (2,))
        x = compat.DTensor.from_local(
            torch.ones(2, 3), mesh, [compat.Shard(0)], shape=torch.Size((4, 3)), stride=(1, 4)
        )
        assert x.stride() == (3, 1)

    simulate(2)(program)()


def test_factories_take_every_parameter() -> None:
    def program() -> None:
        mesh = compat.init_device_mesh("cpu", (2,))
        options = {
            "device_mesh": mesh,
            "placements": [compat.Shard(0)],
            "layout": torch.strided,
            "requires_grad": True,
        }
        for make in (compat.zeros, compat.ones, compat.empty, compat.rand, compat.randn):
            x = make(4, 3, dtype=torch.float64, **options)
            assert (x.dtype, x.requires_grad, x.placements, x.shape) == (
                torch.float64,
                True,
                (compat.Shard(0),),
                (4, 3),
            )
            with pytest.raises(ValueError, match=r"layout=torch.sparse_coo is not supported"):
                make(4, 3, layout=torch.sparse_coo, device_mesh=mesh)
        x = compat.full((4,), 2.5, dtype=torch.float16, **options)
        assert (x.dtype, x.requires_grad, x.sum().item()) == (torch.float16, True, 10)

    simulate(2)(program)()
