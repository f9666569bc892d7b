"""Training resumes in another form of data parallelism on another mesh, from a checkpoint or full
tensors on one rank.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardmesh.sharding.checkpoint.full_state import full_state_dict, load_full_state_dict
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from shardmesh.sharding.checkpoint.state import load_state_dict, state_dict
from shardmesh.sharding.parallel.data.fully_shard import data_parallel, fully_shard
from tests.sharding.ranks import on_mesh

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
FORMS = {
    "DDP": data_parallel,
    "ZeRO-1": lambda model, mesh: data_parallel(model, mesh, optimizer=mesh.axis_names),
    "FSDP": fully_shard,
}


def trained(form, mesh_shape, count, seed, before, after):
    """Return the losses of some steps on a mesh, on rank 0; `before` loads the model's state,
    `after` receives it.
    """

    def program(mesh):
        torch.manual_seed(seed)
        model = FORMS[form](
            nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3)).double(), mesh
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before(model, optimizer, mesh)
        found = []
        for _ in range(count):
            loss = model(X).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        after(model, optimizer, mesh)
        return found

    return on_mesh(mesh_shape, program)[0]


def nothing(*_):
    pass


@pytest.fixture(scope="module")
def curve():
    """Return the losses on one rank, without interruption."""
    return trained("DDP", (1,), 5, 0, nothing, nothing)


@pytest.mark.parametrize(
    ("first", "second"), [("FSDP", "FSDP"), ("FSDP", "DDP"), ("ZeRO-1", "FSDP"), ("DDP", "ZeRO-1")]
)
def test_loss_curve_continues(first, second, curve, tmp_path):
    """Three steps on four ranks, two on three."""

    def saved(model, optimizer, mesh):
        save(state_dict(model, optimizer), tmp_path)

    def loaded(model, optimizer, mesh):
        load_state_dict(model, load(tmp_path, state_dict(model, optimizer)), optimizer)

    found = trained(first, (2, 2), 3, 0, nothing, saved) + trained(
        second, (3,), 2, 1, loaded, nothing
    )
    assert found == pytest.approx(curve, rel=1e-12)


def test_resume_from_full_tensors_on_one_rank(curve):
    whole = []

    def gathered(model, optimizer, mesh):
        state = full_state_dict(state_dict(model, optimizer))
        assert bool(state) == (mesh.get_rank() == 0)
        whole.extend([state] if state else [])

    def scattered(model, optimizer, mesh):
        load_full_state_dict(model, whole[0] if mesh.get_rank() == 0 else None, optimizer=optimizer)

    found = trained("FSDP", (4,), 3, 0, nothing, gathered) + trained(
        "FSDP", (3,), 2, 1, scattered, nothing
    )
    assert found == pytest.approx(curve, rel=1e-12)
