"""Pipelines in the world that behaves like NCCL (`tests/mesh/simulated/nccl_world.py`).

Sends and receives are under way while the host goes on, and memory that is used before they have
ended is an error.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.transport import Inbox
from tests.device import DEVICE
from tests.mesh.simulated.late_memory import StreamHazard
from tests.mesh.simulated.nccl_world import nccl_world
from tests.sharding.parallel.pipeline.pipeline_jobs import (
    FORMS,
    Trained,
    batch,
    check_equal,
    make_pipeline,
    one_process,
    train,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="stands for a device")


@pytest.fixture(scope="module")
def expected() -> Trained:
    return one_process()


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("schedule", "form", "microbatches", "stages"),
    [
        ("1f1b", "fsdp", 3, 2),
        ("gpipe", "tp", 3, 2),
        ("interleaved", "fsdp", 2, 4),
        ("zb_v", "fsdp and tp", 3, 4),
        ("looped_bfs", "none", 3, 4),
        ("v_half", "zero1", 3, 4),
        ("zb_h1", "tp", 2, 4),
        ("v_min", "none", 3, 4),
        ("dualpipe_v", "fsdp", 4, 4),
    ],
)
def test_equals_one_process(
    schedule: str, form: str, microbatches: int, stages: int, expected: Trained
) -> None:
    ranks = 2 * 2 ** len(FORMS[form])
    with nccl_world():
        trained = sm.simulate(ranks)(train)(form, schedule, 2, microbatches, stages)
    check_equal(trained, expected)


def test_a_receive_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Inbox, action: object) -> list[torch.Tensor]:
        """Return buffers that the messages have not reached."""
        while action not in self._posted:
            metas = self._known_metas(self._to_post[0])
            self._post(self._receive_header(self._to_post[0]) if metas is None else metas)
        return [buffer for buffer, _ in self._posted.pop(action)]  # type: ignore[call-overload]

    def step() -> None:
        pipe = make_pipeline("none", "1f1b", 2, 2, 2)
        pipe.step(*batch(), loss_fn=F.cross_entropy)

    monkeypatch.setattr(Inbox, "take", take)
    with nccl_world(), pytest.raises(StreamHazard, match="reads the result of permute"):
        sm.simulate(2)(step)()
