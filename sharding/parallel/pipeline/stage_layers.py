"""Layers inside of the stages: tensor parallelism and FSDP, by paths of the whole model.

A pattern must match somewhere in the model, but not in every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ....mesh.device_mesh import DeviceMesh
from ...ops.torch_compile import original_of
from ..data.fully_shard import data_parallel, fully_shard
from ..data.precision import precision_of
from ..data.wrap import Units, matching_modules
from ..tensor.hf_plan import with_styles
from ..tensor.plan import apply_plan, check_matched, tensors_of


def parallelize_stages(
    model: nn.Module,
    stages: Iterable[nn.Module],
    mesh: DeviceMesh,
    plan: Mapping[str, Any] | str,
    src_data_rank: int | None,
) -> None:
    """Apply to each stage what concerns it of a plan for the model; see `parallelize`.

    Raises:
        ValueError: a pattern that matches nothing in the model.
    """
    styles = with_styles(model, plan)
    paths = [*dict(model.named_modules()), *tensors_of(model)]
    check_matched(styles, fnmatchcase, paths, type(model).__name__)
    for stage in stages:
        paths = [*dict(stage.named_modules()), *tensors_of(stage)]
        own = {
            pattern: style
            for pattern, style in styles.items()
            if any(fnmatchcase(path, pattern) for path in paths if path)
        }
        apply_plan(stage, mesh, own, src_data_rank, fnmatchcase, rest=True)


def shard_stages(
    model: nn.Module,
    stages: Mapping[int, nn.Module],
    last_stage: int,
    mesh: DeviceMesh,
    units: Units | None,
    is_data_parallel: bool,
    options: Mapping[str, Any],
) -> None:
    """Call `fully_shard` or `data_parallel` for each stage.

    A stage is the outermost unit. Only the outputs of the last one are cast.

    Raises:
        ValueError: `units` matches no module of the model.
    """
    matching = {original_of(inner) or inner for _, inner in matching_modules(model, units)}
    shard = data_parallel if is_data_parallel else fully_shard
    for number, stage in stages.items():
        has_units = any(inner in matching for inner in stage.modules())
        own_options = dict(options)
        if number != last_stage and options.get("mp_policy") is not None:
            own_options["mp_policy"] = replace(
                precision_of(options["mp_policy"]), output_dtype=None
            )
        shard(
            stage,
            mesh,
            units=(lambda _, inner: inner in matching) if has_units else None,
            **own_options,
        )
