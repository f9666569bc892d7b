"""The table of FSDP2's names is complete, and true of `shardmesh.compat`."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch.distributed._composable import replicate as replicate_over_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_over_fsdp
from torch.distributed.fsdp import _fully_shard

from shardmesh import compat
from tests.sharding.compat.surface_fsdp import NO_EFFECT, REFUSED, STATUS, WORKS


def parameters(function):
    """Return the names of a function's parameters, without `self`, and those of `*args, **kwargs`
    with decorators aside.
    """
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.name != "self"]


def members(cls):
    """Return the public methods and properties of a class, without those of its bases outside of
    FSDP2.
    """
    public = {name for name in vars(cls) if not name.startswith("_")}
    fields = set(getattr(cls, "__dataclass_fields__", ()))
    return sorted(public - fields)


def surface():
    """Return all keys that the table must have, with torch's object of each name."""
    keys = {}
    for name in _fully_shard.__all__:
        value = getattr(torch_fsdp, name)
        keys[name] = value
        if not isinstance(value, type):
            keys |= {f"{name}({parameter})": value for parameter in parameters(value)}
            continue
        if hasattr(value, "__dataclass_fields__"):
            keys |= {f"{name}({field})": value for field in value.__dataclass_fields__}
        for member in members(value):
            keys[f"{name}.{member}"] = value
            if callable(getattr(value, member)):
                keys |= {
                    f"{name}.{member}({parameter})": value
                    for parameter in parameters(getattr(value, member))
                }
    for function in (replicate_over_ddp, replicate_over_fsdp):
        keys["replicate"] = function
        keys |= {f"replicate({parameter})": function for parameter in parameters(function)}
    return keys


def ours(key):
    """Return the object of `shardmesh.compat` that a key names, without its parameter."""
    found = compat
    for name in key.partition("(")[0].split("."):
        found = getattr(found, name)
    return found


def test_the_names_of_fsdp2_are_those_that_torch_exports():
    """torch.distributed.fsdp has FSDP1 and FSDP2; what is in `_fully_shard` is FSDP2."""
    assert set(_fully_shard.__all__) <= set(torch_fsdp.__all__)
    assert all(
        getattr(torch_fsdp, name) is getattr(_fully_shard, name) for name in _fully_shard.__all__
    )
    assert "unshard" in members(torch_fsdp.FSDPModule)
    assert parameters(torch_fsdp.fully_shard)[:2] == [
        "module",
        "mesh",
        # The decorator shows the function's own signature.
    ]


def test_nothing_is_unlisted_and_nothing_listed_is_not_torchs():
    assert set(STATUS) == set(surface())


@pytest.mark.parametrize("key", STATUS)
def test_the_table_is_true(key):
    status, note = STATUS[key]
    assert status in (WORKS, NO_EFFECT, REFUSED)
    name, _, parameter = key.partition("(")
    if status == REFUSED:
        assert note or STATUS[name][1], "a reason"
        refused = ours(name)
        given = {p: object() for p in parameters(refused)}
        with pytest.raises(NotImplementedError, match=name.rpartition(".")[2]):
            refused(object(), **given)
    else:
        assert name.split(".")[0] in compat.__all__
        value = ours(key)
        if parameter:
            kinds = {p.kind for p in inspect.signature(value).parameters.values()}
            taken = parameter.rstrip(")") in parameters(value) or (
                parameter == "kwargs)" and inspect.Parameter.VAR_KEYWORD in kinds
            )
            assert taken, f"{name} of shardmesh.compat takes {parameters(value)}"


@pytest.mark.parametrize("key", [key for key in STATUS if "(" not in key])
def test_signatures_are_torchs(key):
    """The order and the kinds of parameters, and their defaults where they are plain values."""
    value = surface()[key]
    if key == "replicate" or (
        isinstance(value, type) and "." not in key and not hasattr(value, "__dataclass_fields__")
    ):
        return
    theirs, mine = (
        (getattr(value, key.partition(".")[2]), ours(key)) if "." in key else (value, ours(key))
    )
    if isinstance(theirs, property):
        return
    for (a, theirs_of), (b, ours_of) in zip(
        inspect.signature(theirs).parameters.items(),
        inspect.signature(mine).parameters.items(),
        strict=True,
    ):
        assert a == b
        assert theirs_of.kind == ours_of.kind, a
        plain = isinstance(theirs_of.default, bool | int | str | type(None))
        assert not plain or theirs_of.default == ours_of.default, a
