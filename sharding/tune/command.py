"""`python -m shardmesh tune`: choose the form of parallelism of a model on the command line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...mesh.text import shortened, whole_number
from .description import IMBALANCE, Loss
from .devices import DEVICES
from .form import Form, check_field
from .program import function_build, hugging_face_build
from .tune import tune

EXAMPLE = "  python -m shardmesh tune llama/config.json --devices 1024 --node 8 --device h100\n"
_TRUTH = {"true": True, "True": True, "false": False, "False": False}
_MOST_POSITIONS = 8192  # of a step, unless --seq says otherwise
_NAMES_OF_POSITIONS = ("max_position_embeddings", "max_seq_len")  # the second one is MPT's


def add_to(commands: Any) -> None:
    """Add the command to argparse subparsers; its `run` takes the parsed arguments."""
    parser = commands.add_parser(
        "tune",
        help="how to train a model on many devices: axes, schedule, microbatches, program",
        description=(
            "Choose the form of parallelism of a model on a cluster. Needs no devices and no "
            "weights."
        ),
        epilog=f"example:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "what",
        metavar="WHAT",
        help="a config.json of Hugging Face or its folder; or module:function that returns a model "
        'on "meta", a batch, and perhaps a function of output and batch, the loss',
    )
    add("--devices", required=True, metavar="N", help="the number of devices")
    add("--node", metavar="N", help="devices of a node, 8 by default")
    add("--device", default="h100", metavar="NAME", help=f"one of {', '.join(DEVICES)}")
    add("--memory", metavar="GB", help="memory of a device, by default that of the data sheet")
    add(
        "--batch", metavar="ROWS", help="rows of a step, all devices together; by default --devices"
    )
    add("--seq", metavar="N", help="positions of a row; by default the model's most, up to 8192")
    add("--fix", action="append", default=[], metavar="NAME=VALUE", help="as in tp=8; repeatable")
    add(
        "--from",
        dest="near",
        metavar="NAME=VALUE,...",
        help="search only the neighbours of a form, as in fsdp=32,tp=8,rows=2",
    )
    add("--max-microbatch", metavar="ROWS", help="the most rows of a microbatch on a data rank")
    add(
        "--imbalance",
        metavar="FACTOR",
        help="rows of the busiest rank's experts over the mean, by default 1.2",
    )
    add(
        "--measure",
        metavar="N",
        help="run the best N forms on this machine, and drop what runs out of memory",
    )
    add(
        "--on",
        choices=("cuda", "cpu"),
        help="where --measure runs: by default on GPUs, if this machine has any",
    )
    add("--top", default="5", metavar="N", help="forms in the table")
    add("--check", metavar="N", help="forms whose program is evaluated, by default 3; 0 for none")
    add("--json", action="store_true", help="print JSON")
    add(
        "--program",
        choices=("shardmesh", "accelerate", "torchtitan"),
        help="print only the program, or the settings of another library",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        devices = _count("--devices", arguments.devices)
        rows = _count("--batch", arguments.batch)
        positions = _count("--seq", arguments.seq)
        checks = _checks(arguments.check)
        model, batch, build, loss = _load(arguments.what, rows, positions, devices or 1)
        measured = _count("--measure", arguments.measure)
        tuning = tune(
            model,
            batch,
            devices=devices or 0,
            device=arguments.device,
            memory=_gigabytes(arguments.memory),
            node=_count("--node", arguments.node),
            fix=_fields(",".join(arguments.fix)),
            near=None if arguments.near is None else _form(arguments.near, devices or 0, batch),
            max_microbatch=_count("--max-microbatch", arguments.max_microbatch),
            imbalance=_factor(arguments.imbalance),
            loss=loss,
            build=build,
            check=checks,
            top=max(_count("--top", arguments.top) or 1, measured or 1),
        )
        if measured is not None:
            tuning = tuning.measure(measured, device=arguments.on)
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.error(shortened(str(error), 1000))
    if arguments.json:
        print(tuning.json())
    elif arguments.program is not None:
        texts = {
            "shardmesh": tuning.program.rstrip("\n"),
            "accelerate": tuning.accelerate,
            "torchtitan": tuning.titan,
        }
        print(texts[arguments.program])
    else:
        print(tuning)
    return 0


def _load(
    what: str, rows: int | None, positions: int | None, devices: int
) -> tuple[nn.Module, Any, str, Loss | None]:
    """Return the model on "meta", the batch, the lines of `build()`, and the loss."""
    path = Path(what)
    if path.exists() or what.endswith(".json"):
        model = _hugging_face(path)
        length = positions or _most_positions(model.config)
        batch = torch.empty(rows or devices, length, dtype=torch.int64, device="meta")
        return model, batch, hugging_face_build(str(path)), None
    module, colon, function = what.partition(":")
    if colon and (rows or positions):
        raise ValueError(f"--batch and --seq are for a config.json; {what} returns its own batch")
    if not colon:
        raise ValueError(
            f"{shortened(what)!r} is neither a config.json of Hugging Face, its folder, nor "
            "module:function"
        )
    sys.path.insert(0, os.getcwd())  # as `python -m` does for the module that it runs
    try:
        factory = getattr(importlib.import_module(module), function, None)
    finally:
        sys.path.pop(0)
    if not callable(factory):
        raise ValueError(f"{module} has no function {shortened(function)!r}")
    result = factory()
    model, *rest = result if isinstance(result, tuple) else (result,)
    batch, loss = [*rest, None, None][:2]
    if not isinstance(model, nn.Module) or not (
        len(rest) == 1 or (len(rest) == 2 and callable(loss))
    ):
        raise ValueError(
            f"{what} returned {', '.join(type(value).__name__ for value in (model, *rest))}; it "
            "returns a model on meta and a batch, and perhaps a loss, a function of output and "
            "batch"
        )
    return model, batch, function_build(what), loss


def _most_positions(config: Any) -> int:
    """Return the most positions of a row that a configuration allows, up to 8192."""
    most = (getattr(config, name, None) for name in _NAMES_OF_POSITIONS)
    return min([_MOST_POSITIONS, *(n for n in most if n)])


def _hugging_face(path: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError(
            f"{path} is a configuration of Hugging Face: pip install transformers"
        ) from None
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    config = transformers.AutoConfig.from_pretrained(path)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{path}: transformers has no causal language model of a {type(config).__name__}; "
            "pass module:function, a function that returns a model on meta and a batch"
        )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _count(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    value = whole_number(text)
    if value is None or value < 1:
        raise ValueError(f"{name} {shortened(text)!r}: write a whole number from 1")
    return value


def _checks(text: str | None) -> int:
    value = 3 if text is None else whole_number(text)
    if value is None or value < 0:
        raise ValueError(f"--check {shortened(text or '')!r}: write a whole number from 0")
    return value


def _gigabytes(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ValueError(f"--memory {shortened(text)!r}: write gigabytes, such as 80")
    return value * 1e9


def _factor(text: str | None) -> float:
    try:
        return IMBALANCE if text is None else float(text)
    except ValueError:
        raise ValueError(f"--imbalance {shortened(text or '')!r}: write a number from 1") from None


def _fields(text: str) -> dict[str, Any]:
    """Return fields of a form: "tp=8,recompute=full" -> {"tp": 8, "recompute": "full"}.

    Raises:
        ValueError: a field that forms do not have, or a value that it does not take.
    """
    values: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        name, _, value = (word.strip() for word in part.partition("="))
        if not name or not value:
            raise ValueError(f"{shortened(part)!r}: write NAME=VALUE, such as tp=8")
        number = whole_number(value)
        values[name] = _TRUTH.get(value, value) if number is None else number
        check_field(name, values[name])
    return values


def _form(text: str, devices: int, batch: Any) -> Form:
    """Return a form with the number of microbatches and of data ranks that follow from the rest."""
    values = _fields(text)
    form = Form(**values)
    if "fsdp" not in values and devices % (form.devices or 1) == 0:
        values["fsdp"] = devices // form.devices
    first = batch if isinstance(batch, torch.Tensor) else None
    if isinstance(batch, Mapping):
        first = next(iter(batch.values()))
    form = Form(**values)
    data = form.data * form.rows
    if "microbatches" not in values and first is not None and first.shape[0] % data == 0:
        values["microbatches"] = first.shape[0] // data
    return Form(**values)
