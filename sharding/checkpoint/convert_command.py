"""`shardmesh convert`: checkpoints in other formats, on the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...mesh.launch.progress_bar import byte_progress
from ...mesh.text import shortened
from .agreement import CheckpointError
from .convert import FORMATS, run_conversion

EXAMPLE = """\
  python -m shardmesh convert checkpoints trained --to safetensors --config llama
"""


def add_to(commands: Any) -> None:
    """Add the command to argparse subparsers; its `run` takes the parsed arguments."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in another format: sharded, safetensors or torch's",
        description="Reads Hugging Face's safetensors files, checkpoints of sm.checkpoint.save, or "
        "those of torch.distributed.checkpoint, and writes one of the others.",
        epilog=f"examples:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a folder, or a *.safetensors file")
    add("target", metavar="TARGET", help="a folder that does not exist yet")
    add("--to", choices=FORMATS, required=True, help="the format to write; dcp is torch's")
    add("--key", metavar="NAME", help="the entry of the checkpoint that has the weights (model)")
    add("--step", metavar="N", type=int, help="which step to read (the newest one)")
    add(
        "--config",
        metavar="FOLDER",
        help="a Hugging Face folder whose configuration and tokenizer are copied",
    )
    add("--max-shard-size", metavar="SIZE", default="5GB", help="of a file of safetensors (5GB)")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        conversion = run_conversion(
            arguments.source,
            arguments.target,
            arguments.to,
            arguments.key,
            arguments.step,
            arguments.config,
            arguments.max_shard_size,
            byte_progress,
        )
    except (ValueError, OSError, CheckpointError) as error:
        parser.error(shortened(str(error).removeprefix("convert: "), 1000))
    print(json.dumps(conversion.as_dict(), indent=2) if arguments.json else conversion)
    return 0
