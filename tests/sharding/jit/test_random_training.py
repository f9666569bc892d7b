"""Random training programs under `sm.jit` (`training_programs.py`): the bits of eager code in every
step, whatever breaks, and whichever rank reads what.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import shardmesh as sm
from tests.sharding.jit.training_programs import Program
from tests.sharding.ranks import on_mesh

EACH = 5  # programs of a test; 300 in all


@pytest.mark.one_in(20)
@pytest.mark.filterwarnings("ignore:.*was recorded 8 times")
@pytest.mark.parametrize("part", range(300 // EACH))
def test_training_has_the_bits_of_eager(part: int) -> None:
    graphs = 0
    for seed in range(part * EACH, (part + 1) * EACH):
        program = Program(seed)

        def run(jit: Any, program: Program = program) -> Any:
            return on_mesh((program.ranks,), lambda mesh: program.run(mesh, jit))

        jit = functools.partial(sm.jit, backend="eager")
        for (values, count), (expected, _) in zip(run(jit), run(None), strict=True):
            for value, other in zip(values, expected, strict=True):
                torch.testing.assert_close(
                    value, other, rtol=0, atol=0, equal_nan=True, msg=str(program)
                )
            graphs += count
    assert graphs > 0
