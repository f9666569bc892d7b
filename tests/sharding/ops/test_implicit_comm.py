"""Implicit communication: allowed, warned about or forbidden; contents of messages and reports."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from tests.sharding.ops.rules.table import f
from tests.sharding.ranks import collectives, on_mesh

X, W = f(4, 6), f(5, 6)


def operands(mesh):
    return sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None), sm.distribute_tensor(
        W, mesh, P("a"), src_data_rank=None
    )


MOVING = {
    "rows of both": (lambda x, w: F.linear(x, w), "linear"),
    "a nonlinear function of a pending sum": (lambda x, w: x.sum(0).exp(), "exp"),
    "a form": (lambda x, w: x.softmax(0), "softmax"),
    "a form of norms": (lambda x, w: torch.linalg.vector_norm(x, dim=0), "linalg_vector_norm"),
    "a handler": (lambda x, w: torch.equal(x, x), "equal"),
    "without a rule": (lambda x, w: torch.nonzero(x), "nonzero"),
    "into a view": (
        lambda x, w: x.copy_(sm.distribute_tensor(X, x.mesh, P(None, "a"), src_data_rank=None)),
        "copy_",
    ),
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_forbid_raises_before_communication(name):
    func, operator = MOVING[name]

    def program(mesh):
        x, w = operands(mesh)
        with sm.ops.implicit_comm("forbid"), collectives() as records:
            with pytest.raises(sm.errors.ImplicitCommError) as caught:
                func(x, w)
            with sm.ops.implicit_comm("allow"):
                func(x, w)
            allowed = len(records)
            with pytest.raises(sm.errors.ImplicitCommError):
                func(x, w)
        func(x, w)
        return str(caught.value), allowed

    messages = on_mesh((3,), program)
    for message, allowed in messages:
        assert f" by {operator} of f64[" in message
        assert "test_implicit_comm.py:" in message
        assert "Nothing has moved" in message
        assert allowed
    assert len({text.partition("receiving")[0] for text, _ in messages}) == 1


def test_message_suggests_the_redistribution():
    def program(mesh):
        x, w = operands(mesh)
        with sm.ops.implicit_comm("forbid"):
            with pytest.raises(sm.errors.ImplicitCommError) as caught:
                F.linear(x, w)
            text = str(caught.value)
            advised = text.partition("Write ")[2].partition(" before it")[0]
            assert advised in (
                "operand_1.redistribute(P(None, None))",
                "operand_0.redistribute(P(None, None))",
            ), text
            moved = [x, w]
            which = int(advised[8])
            moved[which] = moved[which].redistribute(P())
            return F.linear(*moved).full_tensor()

    for result in on_mesh((2,), program):
        torch.testing.assert_close(result, F.linear(X, W))


def test_requested_communication_is_explicit():
    def program(mesh):
        with sm.ops.implicit_comm("forbid"):
            x, w = operands(mesh)
            x.requires_grad_()
            total = (x * 2).sum()
            assert total.item() == pytest.approx(2 * X.sum().item())
            assert float(total) == total.tolist()
            assert f"{total:.3f} {x}"
            total.backward()
            assert x.grad is not None
            whole = w.redistribute(P()).requires_grad_()
            (grad,) = torch.autograd.grad((x @ whole.T).sum(), whole)
            return x.detach().numpy(), grad.full_tensor()

    for values, grad in on_mesh((2,), program):
        torch.testing.assert_close(torch.from_numpy(values), X)
        torch.testing.assert_close(grad, X.sum(0).expand(5, 6))


def test_a_warning_for_each_operator_and_line():
    def program(mesh):
        x, w = operands(mesh)
        with sm.ops.implicit_comm("warn"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                F.linear(x, w)
            F.linear(x, w)
            x + x
        return [(str(c.message), c.filename, c.lineno) for c in caught]

    found = on_mesh((2,), program)
    # Warnings are caught for all threads, by whoever catches.
    texts = [entry for rank in found for entry in rank]
    assert len({line for _, _, line in texts}) == 2
    assert all(
        "linear" in text and "Write " in text and file == __file__ for text, file, _ in texts
    )


def test_default_lasts_until_changed():
    def program(mesh):
        x, w = operands(mesh)
        sm.ops.implicit_comm("forbid")
        with pytest.raises(sm.errors.ImplicitCommError):
            F.linear(x, w)
        with sm.ops.implicit_comm("warn"), sm.ops.implicit_comm("allow"):
            F.linear(x, w)
        with pytest.raises(sm.errors.ImplicitCommError):
            F.linear(x, w)
        sm.ops.implicit_comm("allow")
        F.linear(x, w)
        assert mesh.world.observers == []

    on_mesh((2,), program)
    with pytest.raises(ValueError, match="'allow', 'warn', 'forbid'"):
        sm.ops.implicit_comm("never")


def test_policy_around_a_simulated_world_applies_to_all_ranks():
    def program(mesh):
        F.linear(*operands(mesh))

    with sm.ops.implicit_comm("forbid"), pytest.raises(sm.errors.ImplicitCommError):
        on_mesh((2,), program)
    on_mesh((2,), program)


def test_a_budget_names_operator_layouts_and_line():
    def program(mesh):
        x, w = operands(mesh)
        with sm.debug.comm_budget(bytes=8), pytest.raises(sm.errors.CommBudgetError) as caught:
            F.linear(x, w)
        return str(caught.value)

    for message in on_mesh((2,), program):
        assert (
            "linear of f64[4, 6] @ P('a', None) on (a=2), f64[5, 6] @ P('a', None) on (a=2)"
            in message
        )
        assert "test_implicit_comm.py:" in message
        assert "over a (2 ranks" in message
        assert "Write operand_" in message


def test_the_report_is_by_operator_axis_and_line(tmp_path):
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a", "b"), src_data_rank=None).requires_grad_()
        with sm.debug.comm_report() as report:
            y = x.redistribute(P(None, "b"))
            (y.softmax(1) ** 2).sum().backward()
            y.full_tensor()
        path = tmp_path / f"{mesh.world.rank}.json"
        report.save_trace(path)
        return report, json.loads(path.read_text())["traceEvents"]

    for rank, (report, events) in enumerate(on_mesh((2, 2), program)):
        assert set(report.by_operator) == {"redistribute", "softmax", "backward", "full_tensor"}
        assert set(report.by_axis) <= {"a", "b", "a,b"}
        assert {"a", "b"} <= set(report.by_axis)
        assert len(report.by_line) == 3
        assert all("test_implicit_comm.py:" in line for line in report.by_line)
        for totals in (report.by_operator, report.by_axis, report.by_line, report.by_op):
            assert sum(launches for launches, _ in totals.values()) == report.launches
            assert sum(received for _, received in totals.values()) == report.bytes_received
        assert len(str(report).splitlines()) > 4
        assert len(events) == report.launches
        assert sum(e["args"]["bytes_received"] for e in events) == report.bytes_received
        for e in events:
            assert e["ph"] == "X"
            assert e["pid"] == rank
            assert e["dur"] > 0


def test_direct_collective_is_named_by_itself():
    def program(mesh):
        with sm.ops.implicit_comm("forbid"), sm.debug.comm_report() as report:
            mesh.group("a").all_reduce(torch.ones(3))
        return report.by_operator

    assert on_mesh((2,), program)[0] == {"all_reduce": (1, 12)}
