"""Transforms and control flow against JAX, on the programs of `jax_transforms.py`."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put
from tests.sharding.functional.jax_transforms import (
    AXES,
    FLOW,
    NUMBERS,
    PROGRAMS,
    SHAPE,
    TRANSFORMS,
    inputs,
)

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="needs the extra jax-oracle"
)
pytestmark = [needs_jax, pytest.mark.xdist_group("jax")]
WHOLE = {name: P() for name in inputs()}
LAYOUTS = {
    "whole": WHOLE,
    "split": WHOLE
    | {
        "x": P("tp"),
        "v": P("tp"),
        "xs": P(None, None, "tp"),
        "w": P(None, "tp"),
        "u": P(None, "dp"),
    },
}


@pytest.fixture(scope="module")
def jax() -> dict[str, list[np.ndarray]]:
    command = [sys.executable, "-m", "tests.sharding.functional.jax_transforms"]
    return pickle.loads(
        subprocess.run(
            command, cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, check=True
        ).stdout
    )


@pytest.mark.one_in(4, each=["name"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(jax, name, layout):
    def ours() -> list[torch.Tensor]:
        mesh = sm.init_device_mesh("cpu", SHAPE, axis_names=AXES)

        def mapped(f: Any, in_specs: Any, out_specs: Any) -> Any:
            return sm.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

        names = {each: getattr(sm, each) for each in (*TRANSFORMS, *FLOW)}
        t = SimpleNamespace(
            **names, **{each: getattr(torch, each) for each in NUMBERS}, map=mapped, P=P
        )
        given = {
            each: put(mesh, torch.from_numpy(x), LAYOUTS[layout][each])
            for each, x in inputs().items()
        }
        leaves = pytree.tree_leaves(PROGRAMS[name](t, SimpleNamespace(**given)))
        return [
            x.full_tensor() if isinstance(x, sm.ShardedTensor) else torch.as_tensor(x)
            for x in leaves
        ]

    for found in sm.simulate(4)(ours)():
        assert len(found) == len(jax[name])
        for mine, wanted in zip(found, jax[name], strict=True):
            assert mine.shape == wanted.shape
            np.testing.assert_allclose(mine.numpy(), wanted, rtol=1e-9, atol=1e-9)
