"""The manifests of docs/cluster.md are YAML whose hosts, names and volumes agree, and torchrun
understands its lines.
"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Any

import pytest

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


def test_lines_are_ones_that_torchrun_understands() -> None:
    from torch.distributed.run import parse_args

    lines = re.findall(r"^shardmesh run (--nnodes .*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        options = parse_args(shlex.split(line))
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 0)
        assert options.training_script in ("shardmesh", "train.py")
