"""The pieces together: batches, a data-parallel model, scaling, clipping, Muon, averages; the
losses and weights of one process.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from shardmesh.sharding.checkpoint.state import load_state_dict, state_dict
from shardmesh.sharding.optim.muon import Muon
from shardmesh.sharding.optim.shampoo import Shampoo
from shardmesh.sharding.parallel.data.fully_shard import data_parallel, fully_shard
from shardmesh.sharding.training.average import EMA
from shardmesh.sharding.training.batches import batches
from shardmesh.sharding.training.clipping import clip_grad_norm_
from shardmesh.sharding.training.norms import tensor_norms
from shardmesh.sharding.training.sampler import DistributedSampler
from shardmesh.sharding.training.scaler import GradScaler
from tests.device import DEVICE
from tests.sharding.optim.test_muon import PLACES, data, placed
from tests.sharding.parallel.models import Config, TransformerBlock, gpt, loss_of, tokens
from tests.sharding.ranks import on_mesh

STEPS, BATCH = 5, 8
CONFIG = Config(layers=1, d=8, f=10)  # 10 rows over 4 ranks: uneven
SAMPLES = list(zip(*tokens(b=STEPS * BATCH), strict=True))
FORMS = {
    "FSDP": lambda model, mesh: fully_shard(model, mesh, units=TransformerBlock),
    "ZeRO-1": lambda model, mesh: data_parallel(model, mesh, optimizer=mesh.axis_names),
    "DDP": lambda model, mesh: data_parallel(model, mesh),
}


class Pieces:
    """One program for all: `ours` says whether the pieces are those under test, or torch's."""

    def __init__(self, model, ours):
        self.model, self.clip = model, clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
        self.scaler = (GradScaler if ours else torch.amp.GradScaler)(
            DEVICE, init_scale=2.0**10, growth_interval=2
        )
        options = {
            "lr": 0.02,
            "ns_dtype": torch.float64,
            "adamw": ["embed*", "lm_head*"],
            "adamw_lr": 0.01,
        }
        # Whole matrices by torch's own: see test_muon.
        self.optimizer = Muon(model.named_parameters(), **options)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, 1.0, STEPS)
        self.average = EMA(model, 0.7)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = self.clip(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.update()
        return loss.item(), float(norm)


def expected():
    pieces, found = Pieces(gpt(CONFIG), ours=False), []
    for step in range(STEPS):
        x, y = (
            torch.stack(some)
            for some in zip(*SAMPLES[step * BATCH : (step + 1) * BATCH], strict=True)
        )
        found.append(pieces.step(loss_of(pieces.model(x), y)))
    with pieces.average.swapped():
        evaluated = loss_of(pieces.model(x), y).item()
    return found, tensor_norms(pieces.model), evaluated


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plain", [False, True], ids=["sharded batches", "plain batches"])
@pytest.mark.parametrize("form", FORMS)
def test_equals_one_process(form, plain):
    steps, sizes, evaluated = expected()

    def program(mesh):
        pieces = Pieces(FORMS[form](gpt(CONFIG), mesh), ours=True)
        sampler = DistributedSampler(SAMPLES, mesh=mesh, shuffle=False)
        loader = DataLoader(SAMPLES, BATCH // mesh.size(), sampler=sampler)
        for (x, y), (loss, norm) in zip(
            loader if plain else batches(loader, mesh, P("a")), steps, strict=True
        ):
            found, total = pieces.step(loss_of(pieces.model(x), y))
            if plain:  # each rank has a loss of its own
                found = sum(mesh.group().all_gather_object(found)) / mesh.size()
            assert (found, total) == pytest.approx((loss, norm), rel=1e-10)
        assert tensor_norms(pieces.model) == pytest.approx(sizes, rel=1e-9)
        with pieces.average.swapped():
            found = loss_of(pieces.model(x), y).item()
        if plain:
            found = sum(mesh.group().all_gather_object(found)) / mesh.size()
        assert found == pytest.approx(evaluated, rel=1e-10)

    on_mesh((4,), program)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", [Muon, Shampoo])
@pytest.mark.parametrize(
    ("shape", "where"), [((2, 2), "tp and fsdp"), ((2, 2), "replicas"), ((4,), "fsdp")]
)
def test_resumed_on_another_mesh(kind, shape, where, tmp_path):
    """Loading optimizer state and averages from a checkpoint into new objects gives the losses of
    an uninterrupted run.
    """

    def program(mesh, where, resume):
        model = placed(mesh, PLACES[where])
        optimizer = kind(model.named_parameters(), lr=0.02, adamw=["embed"], adamw_lr=0.003)
        average, losses = EMA(model, 0.9), []
        if resume:
            tree = load(
                tmp_path,
                like={"model": state_dict(model, optimizer), "average": average.state_dict()},
            )
            load_state_dict(model, tree["model"], optimizer)
            average.load_state_dict(tree["average"])
        for step in range(3 if resume else 0, 6):
            x = sm.distribute_tensor(data(step), mesh, P("a"), src_data_rank=None)
            loss = F.mse_loss(model(x), x.flip(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update()
            losses.append(loss.item())
            if step == 2:
                save(
                    {"model": state_dict(model, optimizer), "average": average.state_dict()},
                    tmp_path,
                    step=step,
                )
        return losses, tensor_norms(average.average)

    losses, sizes = on_mesh((2, 2), lambda mesh: program(mesh, "tp and fsdp", resume=False))[0]
    found, found_sizes = on_mesh(shape, lambda mesh: program(mesh, where, resume=True))[0]
    assert found == pytest.approx(losses[3:], rel=1e-10)
    assert found_sizes == pytest.approx(sizes, rel=1e-10)
