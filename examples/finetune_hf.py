"""Finetune a Hugging Face causal language model on a text or chat file, on any mesh.

    python examples/finetune_hf.py                        one process: a tiny model, on this file
    shardmesh run examples/finetune_hf.py --mesh fsdp=2,tp=2 --model llama/ --data chat.jsonl --lora

Run it again with the same --out, on any mesh, and it goes on from the newest checkpoint; Ctrl-C
saves one under `shardmesh run`. --out has metrics.jsonl, loss.png, and `model` for from_pretrained.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_model import save_tiny_model
from torch.utils.data import DataLoader

import shardmesh as sm
from shardmesh import P, training
from shardmesh.parallel import MixedPrecisionPolicy, fully_shard, parallelize


def shard_model(options, folder, mesh) -> Any:
    """Return the model, with adapters if asked for, laid out on the mesh."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if options.lora:
        import peft

        torch.manual_seed(0)  # adapters begin with the same values on every rank
        config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    parallelize(model.to(mesh.device), mesh, "auto")
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return fully_shard(model, mesh, axes="fsdp", units="auto", mp_policy=policy)


def state_of(model, optimizer, loader):
    """Return what a checkpoint has: what is trained, the optimizer, the position in the data."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    state = sm.checkpoint.state_dict(model, optimizer)
    state["model"] = {name: x for name, x in state["model"].items() if name in trained}
    return {**state, "data": loader.sampler}


def read_data(options, tokenizer, mesh):
    """Return the documents, and loaders of rows: nine tenths to train on, one to evaluate."""
    records = (training.tokenize(x, tokenizer) for x in training.read_records(options.data))
    documents = [x for x in records if any(y != -100 for y in x["labels"][1:])]
    loaders = []
    for part in ([x for i, x in enumerate(documents) if i % 10], documents[::10]):
        rows = training.pack(part, options.length)
        sampler = training.DistributedSampler(rows, mesh=mesh, axes="fsdp")
        loaders.append(DataLoader(rows, options.batch // mesh.size("fsdp"), sampler=sampler))
    return documents, *loaders


def train(options, mesh):
    say, folder = training.rank_zero(print), options.model or options.out / "base"
    with training.main_process_first():
        if not folder.exists():
            save_tiny_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template or training.DEFAULT_CHAT_TEMPLATE
    try:
        documents, loader, test_loader = read_data(options, tokenizer, mesh)
    except (ValueError, OSError) as error:
        sys.exit(f"finetune_hf.py: --data: {error}")
    model = shard_model(options, folder, mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], options.lr)
    checkpoints, first = options.out / "checkpoints", 1
    newest = sm.checkpoint.latest(checkpoints)
    if newest is not None:
        state = sm.checkpoint.load(newest.path, like=state_of(model, optimizer, loader))
        sm.checkpoint.load_state_dict(model, state, optimizer, strict=False)
        first = newest.step + 1
    say(f"{loader.dataset} from step {first} on {mesh}")
    metrics = training.Metrics(training.JsonLines(options.out / "metrics.jsonl"))
    epochs = (training.batches(loader, mesh, P("fsdp")) for _ in itertools.count())
    batches = itertools.chain.from_iterable(epochs)
    for step in training.progress(range(first, options.steps + 1), "training"):
        loss = model(**next(batches), use_cache=False).loss
        loss.backward()
        values = {"loss": loss, "norm": training.clip_grad_norm_(model.parameters(), 1.0)}
        optimizer.step()
        optimizer.zero_grad()
        is_milestone = step % options.every == 0 or step == options.steps
        if is_milestone:
            test_batches = training.batches(test_loader, mesh, P("fsdp"))
            values["evaluation"] = training.evaluate_loss(model, test_batches)
            say(f"step {step}: loss {loss.item():.4f}, evaluation {values['evaluation']:.4f}")
        metrics(step, values)
        has_to_end = training.reached_preemption(step)
        if has_to_end or is_milestone:
            sm.checkpoint.save(state_of(model, optimizer, loader), checkpoints, step=step, keep=2)
        if has_to_end and step < options.steps:
            return say(f"saved step {step}; run it again to go on")
    learned = [label != -100 for label in documents[0]["labels"]].index(True)
    prompt = torch.tensor([documents[0]["input_ids"][: max(learned, 16)]], device=mesh.device)
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    say(tokenizer.decode(model.eval().generate(prompt, pad_token_id=0, **how)[0]))
    merged = model.merge_and_unload() if options.lora and not options.apart else model
    state = sm.checkpoint.full_state_dict(merged)
    if mesh.get_rank() == 0:
        with sm.monitor.idle():  # the other ranks wait, however long it takes
            merged.save_pretrained(options.out / "model", state_dict=state)
            tokenizer.save_pretrained(options.out / "model")
            curves = options.out / "metrics.jsonl", options.out / "loss.png", ("loss", "evaluation")
            training.JsonLines.picture(*curves)


def main():
    parser = argparse.ArgumentParser(description="Finetune a Hugging Face causal language model.")
    add = parser.add_argument
    add("--model", type=Path, help="folder of a model and its tokenizer (a tiny random one)")
    add("--data", type=Path, default=Path(__file__), help="text, or JSON lines of chats")
    add("--out", type=Path, default=Path("out/finetune"), help="folder for all results")
    add("--steps", type=int, default=60)
    add("--every", type=int, default=20, help="steps between evaluations and checkpoints")
    add("--batch", type=int, default=8, help="rows of all ranks together")
    add("--length", type=int, default=256, help="tokens in a row")
    add("--lr", type=float, default=1e-3)
    add("--bf16", action="store_true", help="compute in bfloat16, keep float32 weights")
    add("--lora", action="store_true", help="train adapters alone")
    add("--apart", action="store_true", help="save adapters apart, not merged into the model")
    options = parser.parse_args()
    config = options.model and options.model / "config.json"
    for path in filter(None, (options.model, config, options.data)):
        if not path.exists():
            sys.exit(f"finetune_hf.py: there is no {path}")
    for name in ("steps", "every", "batch"):
        if vars(options)[name] < 1:
            sys.exit(f"finetune_hf.py: --{name} must be at least 1")
    transformers.utils.logging.disable_progress_bar()
    try:
        mesh = sm.mesh_from_env(("fsdp", "tp"))
        if options.batch % mesh.size("fsdp"):
            raise ValueError(f"--batch {options.batch} does not divide by fsdp of {mesh}")
    except (ValueError, RuntimeError) as error:
        sys.exit(f"finetune_hf.py: {error}")
    with sm.session():
        train(options, mesh)


if __name__ == "__main__":
    main()
