"""accelerate and Hugging Face's Trainer with a parallelized model, compared with torch's
DistributedDataParallel.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardmesh as sm
from tests.models.tiny import IDS, loss_of, model, same, shard, whole

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def _parallel():
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("fsdp",))
    return shard("llama", model("llama"), mesh, "fsdp")


def _trained_by_accelerate(parallel):
    made = _parallel() if parallel else model("llama")
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(made, optimizer)
    if parallel:
        assert prepared is made
    accelerator.backward(loss_of(prepared, IDS.chunk(4)[dist.get_rank()]))
    norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
    optimizer.step()
    return {**{name: whole(x) for name, x in made.named_parameters()}, "norm": whole(norm)}


@pytest.mark.slow
def test_accelerate(world4):
    expected = world4(_trained_by_accelerate, False)[0]
    for found in world4(_trained_by_accelerate, True):
        same(found, expected, 1e-7)


def _trained_by_trainer(parallel, folder):
    made = _parallel() if parallel else model("llama")
    settings = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=3,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        max_grad_norm=0.5,
        learning_rate=1e-2,
    )
    trainer = transformers.Trainer(
        model=made,
        args=settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in IDS.repeat(3, 1)],
    )
    trainer.train()
    assert (trainer.model_wrapped is made) == parallel
    return {name: whole(x) for name, x in made.named_parameters()}


@pytest.mark.slow
def test_trainer(world4, tmp_path):
    expected = world4(_trained_by_trainer, False, str(tmp_path))[0]
    for found in world4(_trained_by_trainer, True, str(tmp_path)):
        same(found, expected, 1e-6)  # AdamW divides by small second moments
