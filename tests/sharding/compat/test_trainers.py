"""Programs in the form of torchtitan, Lightning and accelerate: with other imports they equal one
process, as on torch.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.sharding.compat.trainers.imports import program
from tests.tiers import slow

TITAN: dict[str, dict[str, Any]] = {
    "FSDP": {"dp_shard": 4},
    "FSDP, kept whole": {"dp_shard": 4, "reshard_after_forward": False},
    "HSDP": {"dp_replicate": 2, "dp_shard": 2},
    "FSDP x TP": {"dp_shard": 2, "tp": 2},
    "FSDP x TP, whole logits": {"dp_shard": 2, "tp": 2, "loss_parallel": False},
    "FSDP, recomputed": {"dp_shard": 4, "recompute": "full"},
    "FSDP, selectively recomputed": {"dp_shard": 4, "recompute": "selective"},
    "FSDP x TP, selectively recomputed": {"dp_shard": 2, "tp": 2, "recompute": "selective"},
    "FSDP, compiled blocks": {"dp_shard": 4, "compile": True},
    "FSDP, recomputed compiled blocks": {
        "dp_shard": 4,
        "compile": True,
        "recompute": "selective",
    },
    "mixture, FSDP": {"dp_shard": 4, "mixture": True},
    "mixture, FSDP x TP": {"dp_shard": 2, "tp": 2, "mixture": True},
    "mixture, FSDP x EP": {"dp_shard": 4, "ep": 2, "mixture": True},
    "mixture, HSDP x EP": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "mixture": True},
    "mixture, EP over all ranks": {"dp_shard": 4, "ep": 4, "mixture": True},
    "mixture, FSDP x TP x EP": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2, "mixture": True},
    "mixture, FSDP x EP, recomputed": {
        "dp_shard": 4,
        "ep": 2,
        "mixture": True,
        "recompute": "full",
    },
}
TORCH_REFUSES = {"mixture, FSDP x EP, selectively recomputed"}
ON_TORCH = [name for name in TITAN if "compiled" not in name]


def train(name: str, on_torch: bool, *args: Any) -> dict[str, Any]:
    """Run a program on the ranks of a pool."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about its own experimental parts
        module = program(name, torch=on_torch)
        if name == "titan":
            args = (module.Config(**args[0]), *args[1:])
        return module.train(*args)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-11, atol=1e-11)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", TITAN)
def test_the_form_of_torchtitan(world4, tmp_path, case):
    expected = program("titan", torch=True).train_alone(TITAN[case].get("mixture", False))
    results = world4(train, "titan", False, TITAN[case], str(tmp_path))
    assert [result["logs"] for result in results] == [results[0]["logs"]] * 4
    assert_equal(results[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_TORCH)
def test_the_form_of_torchtitan_on_torch(world4, tmp_path, case):
    expected = program("titan", torch=True).train_alone(TITAN[case].get("mixture", False))
    assert_equal(world4(train, "titan", True, TITAN[case], str(tmp_path))[0], expected)


@pytest.mark.parametrize("on_torch", [False, slow(True)], ids=["shardmesh", "torch"])
@pytest.mark.parametrize("shape", [(2, 2), slow((4, 1)), slow((1, 4))])
def test_the_form_of_lightning(world4, tmp_path, shape, on_torch):
    expected = program("lightning_form", torch=True).train_alone()
    results = world4(train, "lightning_form", on_torch, shape, str(tmp_path))
    assert_equal(results[0], expected)


@pytest.mark.parametrize("on_torch", [False, slow(True)], ids=["shardmesh", "torch"])
@pytest.mark.parametrize("offload", [False, True])
def test_the_form_of_accelerate(world4, tmp_path, offload, on_torch):
    expected = program("accelerate_form", torch=True).train_alone()
    (result, *_) = world4(train, "accelerate_form", on_torch, offload, str(tmp_path))
    moments = result.pop("moments")["state"]
    for name, moment in expected.pop("moments").items():
        torch.testing.assert_close(moments[name]["exp_avg"], moment, rtol=1e-11, atol=1e-11)
    assert_equal(result, expected)
