"""examples/finetune_hf.py: losses of one process on any mesh, also after a restart on another one,
and a folder that `from_pretrained` opens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from tests import tiers

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import finetune_hf  # noqa: E402
from tiny_model import save_tiny_model  # noqa: E402

# Ranks generate text, and the commands import transformers in several processes.
pytestmark = pytest.mark.timeout(420)

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_hf.py"
STEPS = 4


def chat(path: Path) -> Path:
    """Write conversations about sums."""
    lines = []
    for i in range(24):
        asked = {"role": "user", "content": f"{i}+{i}?"}
        answer = {"role": "assistant", "content": f"{2 * i} " * (i % 5 + 1)}
        lines.append(json.dumps({"messages": [asked, answer]}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat(tmp_path_factory.mktemp("data") / "chat.jsonl")


def finetune(shape: tuple[int, int], out: Path, base: Path, data: Path, **changes: Any) -> None:
    """Run the example on simulated ranks, on a mesh (fsdp, tp)."""
    options = {
        "model": base,
        "data": data,
        "out": out,
        "steps": STEPS,
        "every": 2,
        "batch": 4,
        "length": 64,
        "lr": 1e-3,
        "bf16": False,
        "lora": False,
        "apart": False,
    }

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", shape, axis_names=("fsdp", "tp"))
        finetune_hf.train(argparse.Namespace(**options | changes), mesh)

    sm.simulate(shape[0] * shape[1])(program)()


def losses(out: Path) -> list[float]:
    rows = sm.training.JsonLines.read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row[name] for row in rows for name in ("loss", "evaluation") if name in row]


def evaluation(model: Any, tokenizer: Any, data: Path) -> float:
    """Return the loss of a plain model on the documents that the example holds out."""
    records = sm.training.read_records(data)[::10]
    rows = sm.training.pack([sm.training.tokenize(x, tokenizer) for x in records], 64)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return sm.training.evaluate_loss(model, [batch])


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(
    "options", [{"lora": True, "lr": 1e-2}, tiers.slow({})], ids=["lora", "whole"]
)
def test_losses_are_those_of_one_process(options, base, data, tmp_path, monkeypatch):
    if "lora" in options:
        pytest.importorskip("peft")
    finetune((1, 1), tmp_path / "one", base, data, **options)
    with monkeypatch.context() as preempted:
        preempted.setattr(sm.training, "reached_preemption", lambda step: step == 2)
        finetune((2, 2), tmp_path / "mesh", base, data, **options)
    assert not (tmp_path / "mesh" / "model").exists()
    finetune((1, 3), tmp_path / "mesh", base, data, **options)  # goes on
    expected = losses(tmp_path / "one")
    assert losses(tmp_path / "mesh") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[2]
    assert (tmp_path / "mesh" / "loss.png").stat().st_size > 1000
    folder = tmp_path / "mesh" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == sm.training.DEFAULT_CHAT_TEMPLATE
    assert evaluation(model, tokenizer, data) == pytest.approx(expected[-1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_apart_in_half_precision(base, data, tmp_path):
    peft = pytest.importorskip("peft")
    options = {"lora": True, "apart": True, "bf16": True, "lr": 1e-2}
    finetune((2, 2), tmp_path, base, data, **options)
    assert not list((tmp_path / "model").glob("model*.safetensors"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    before = evaluation(plain, tokenizer, data)
    after = evaluation(peft.PeftModel.from_pretrained(plain, tmp_path / "model"), tokenizer, data)
    assert after == pytest.approx(losses(tmp_path)[-1], rel=1e-2)
    assert after < before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--every", "0"], "finetune_hf.py: --every must be at least 1"),
        (["--batch", "-1"], "finetune_hf.py: --batch must be at least 1"),
        (["--data", "missing.jsonl"], "finetune_hf.py: there is no missing.jsonl"),
        (["--model", "missing"], "finetune_hf.py: there is no missing"),
        (["--model", str(SCRIPT)], f"finetune_hf.py: there is no {SCRIPT / 'config.json'}"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", *arguments])
    with pytest.raises(SystemExit) as ended_with:
        finetune_hf.main()
    assert ended_with.value.code == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": 1}', "finetune_hf.py: --data: tokenize: a record is "),
        ('{"text": "a"}\n{"text":', "finetune_hf.py: --data: .*line 2 is not JSON"),
        ("\n", "finetune_hf.py: --data: .* has no records"),
    ],
)
def test_data_that_cannot_be_read(text, message, base, tmp_path):
    data = tmp_path / "chat.jsonl"
    data.write_text(text)
    with pytest.raises(SystemExit, match=message):
        finetune((2, 1), tmp_path / "out", base, data)


def ended(*arguments: str, mesh: str = "fsdp=2") -> tuple[int, str]:
    command = [sys.executable, "-m", "shardmesh", "run", str(SCRIPT), "--mesh", mesh, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "mesh", "message"),
    [
        (["--model", "no/such/folder"], "fsdp=2", "finetune_hf.py: there is no no/such/folder\n"),
        ([], "dp=2", "the program has no axis dp; use fsdp, tp.\n"),
        (["--batch", "3"], "fsdp=2", "--batch 3 does not divide by fsdp of"),
    ],
)
def test_mistakes_end_in_one_line(arguments, mesh, message):
    status, said = ended(*arguments, mesh=mesh)
    assert status == 1
    assert message in said
    assert said.count("\n") == 1, said


def test_it_is_an_example_to_copy():
    assert len(SCRIPT.read_text().splitlines()) < 150
