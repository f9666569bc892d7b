"""The effective batch size and the learning rate for it."""

from __future__ import annotations

import json

import pytest

from shardmesh.mesh.errors import MeshError
from shardmesh.sharding.training.batch_report import BatchReport, batch_report
from tests.sharding.ranks import every_rank, same_error

TABLE = """\
                                  before        now
per_rank                               8          8
ranks                                 16          4
accumulation                           1          2
effective                            128         64
lr                                0.0003          -
for the same batch: accumulation                  4
lr, scaled linearly                         0.00015
lr, by the square root                    0.0002121"""


@every_rank(4, 2)
def test_fewer_ranks(mesh):
    before = BatchReport(8, 16, lr=3e-4)
    report = batch_report(8, mesh, "a", 2, before=json.loads(json.dumps(before.state_dict())))
    assert report.before == before
    assert (report.ranks, report.effective, report.ratio, report.same_accumulation) == (
        4,
        64,
        0.5,
        4,
    )
    assert report.linear_lr == pytest.approx(1.5e-4)
    assert report.sqrt_lr == pytest.approx(3e-4 * 0.5**0.5)
    assert str(report) == TABLE


@every_rank(3)
def test_without_a_previous_batch_and_unreachable_sizes(mesh):
    report = batch_report(8, mesh, lr=0.1)
    assert (report.effective, report.ratio, report.linear_lr, report.same_accumulation) == (
        24,
        1.0,
        0.1,
        1,
    )
    assert str(report).splitlines()[-1].split() == ["lr", "0.1"]
    assert batch_report(8, mesh, before=BatchReport(8, 4)).same_accumulation is None
    assert batch_report(8, mesh, before=BatchReport(4, 2)).same_accumulation is None
    assert batch_report(8, mesh, before=BatchReport(4, 2)).linear_lr is None


def test_errors():
    assert "per_rank=0" in same_error((2,), lambda mesh: batch_report(0, mesh), ValueError)
    assert "axes='a'" in same_error((2, 2), lambda mesh: batch_report(1, mesh), MeshError)
