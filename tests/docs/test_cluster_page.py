"""The manifests of docs/cluster.md are YAML whose hosts, names and volumes agree, shells and
torchrun understand its lines, and Ray's workers could run its function.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardmesh as sm
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "cluster.md").read_text()
yaml = pytest.importorskip("yaml")


def manifests() -> dict[str, Any]:
    """Return the manifests by kind."""
    documents = [one for block in blocks(PAGE, "yaml") for one in yaml.safe_load_all(block)]
    return {one["kind"]: one for one in documents}


def jobs() -> list[tuple[dict[str, Any], str]]:
    """Return the specs of jobs, each with the name of its first pod."""
    by_kind = manifests()
    job, job_set = by_kind["Job"], by_kind["JobSet"]
    name = job["metadata"]["name"]
    (replicated,) = job_set["spec"]["replicatedJobs"]
    name_of_set = job_set["metadata"]["name"]
    first = f"{name_of_set}-{replicated['name']}-0-0.{name_of_set}"
    return [
        (job["spec"], f"{name}-0.{by_kind['Service']['metadata']['name']}"),
        (replicated["template"]["spec"], first),
    ]


def test_manifests_agree_with_themselves() -> None:
    for spec, first in jobs():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        words = shlex.split(container["args"][0])
        option = dict(pairwise(words))
        assert spec["completionMode"] == "Indexed"
        assert int(option["--nnodes"]) == spec["completions"] == spec["parallelism"]
        assert int(option["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
        assert option["--master-addr"] == first
        assert option["--mesh"] == "dp=2,tp=8"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    service = manifests()["Service"]["spec"]
    assert service["selector"]["job-name"] == manifests()["Job"]["metadata"]["name"]


def test_shell_lines_parse() -> None:
    """The script for Slurm, the lines for torchrun, and what containers run, by bash and by sh."""
    scripts = [block for block in blocks(PAGE, "") if "srun" in block or "shardmesh run" in block]
    assert len(scripts) == 2
    for spec, _ in jobs():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["command"] == ["/bin/sh", "-c"]
        scripts.append(container["args"][0])
    for script in scripts:
        shell = "bash" if script.startswith("#!/bin/bash") else "sh"
        done = subprocess.run([shell, "-n"], input=script, text=True, stderr=subprocess.PIPE)
        assert done.stderr == ""


def test_options_of_sbatch_are_on_lines_of_their_own() -> None:
    (script,) = [block for block in blocks(PAGE, "") if "#SBATCH" in block]
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    options = [word for line in directives for word in shlex.split(line)[1:]]
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", word) for word in options)
    assert "--requeue" in options
    assert script.index("#SBATCH") < script.index("export")  # sbatch stops at the first command


def test_the_function_for_ray_runs_on_a_started_process_group(tmp_path: Path) -> None:
    """Of the program for Ray Train, what needs no Ray: the workers' function, here on one rank."""
    (program,) = [block for block in blocks(PAGE, "python") if "TorchTrainer" in block]
    function = program[program.index("def train") : program.index("TorchTrainer(train")]
    function = function.replace('"cuda", (2, 8)', '"cpu", (1, 1)').replace(
        "    ...", "    return mesh"
    )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        names: dict[str, Any] = {"sm": sm}
        exec(function, names)
        assert names["train"]({}).axis_names == ("dp", "tp")
    finally:
        dist.destroy_process_group()


def test_lines_are_ones_that_torchrun_understands() -> None:
    from torch.distributed.run import parse_args

    lines = re.findall(r"^shardmesh run (--nnodes .*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        options = parse_args(shlex.split(line))
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 0)
        assert options.training_script in ("shardmesh", "train.py")
