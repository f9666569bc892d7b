"""What an installed package reads of a tensor selects among recordings."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.jit import selection
from shardmesh.sharding.jit.errors import JitError
from tests.device import DEVICE
from tests.pool import Pool
from tests.sharding.jit.steps import runs
from tests.sharding.parallel.compositions import whole
from tests.sharding.ranks import collectives, every_rank, launched

PACKAGE = """
def is_full(mask):
    return bool(mask.all())

def count(mask):
    return mask.sum().item()

def masked(x, mask):
    return x * 2 if is_full(mask) else x * mask

def branches(x, mask):
    if is_full(mask):
        return x
    return -x if count(mask) else x * 0

def scaled(x, mask):
    return x * count(mask)
"""


def package(name: str) -> Callable[..., Any]:
    """Return a function of an installed package."""
    names: dict[str, Any] = {}
    exec(compile(PACKAGE, "/nowhere/site-packages/masks.py", "exec"), names)
    return names[name]


def mask_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


FULL, SOME, NONE = mask_of(1, 1, 1, 1), mask_of(1, 0, 1, 1), mask_of(0, 0, 0, 0)
X = torch.arange(1.0, 5.0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", [None, False], ids=["passes", "no passes"])
@pytest.mark.parametrize("spec", [None, P("a"), P()], ids=["plain", "split", "replicated"])
def test_values_in_turn(spec: Any, options: Any, backend: str) -> None:
    def main() -> tuple[list[Any], int, int]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        f = sm.jit(package("branches"), backend=backend, compiler_options=options)

        def placed(x: Tensor) -> Any:
            return x.to(DEVICE) if spec is None else sm.device_put(x, mesh, spec)

        found = []
        for i, mask in enumerate((FULL, SOME, FULL, NONE, SOME, NONE, FULL)):
            found.append(whole(f(placed(X + i), placed(mask))).cpu())
        return found, len(f.recorded), runs(f)

    expected = [
        package("branches")(X + i, mask)
        for i, mask in enumerate((FULL, SOME, FULL, NONE, SOME, NONE, FULL))
    ]
    for found, recorded, ran in sm.simulate(2)(main)():
        assert all(map(torch.equal, found, expected))
        assert (recorded, ran) == (3, 4)


@pytest.mark.parametrize("options", [None, False], ids=["passes", "no passes"])
def test_global_values_take_no_more_collectives_than_eager_code(options: Any) -> None:
    def main() -> list[tuple[list[str], list[str]]]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        eager = package("branches")
        f = sm.jit(eager, backend="eager", compiler_options=options)
        counts = []
        for mask in (FULL, SOME, NONE) * 2:
            x, y = (sm.device_put(t, mesh, P("a")) for t in (X, mask))
            with collectives() as expected:
                eager(x, y)
            with collectives() as found:
                f(x, y)
            counts.append((launched(found), launched(expected)))
        return counts[3:]

    for counts in sm.simulate(2)(main)():
        assert [len(expected) for _, expected in counts] == [1, 2, 2]
        assert all(found == expected for found, expected in counts)


def test_the_program_of_the_user_is_refused_as_before() -> None:
    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        f = sm.jit(lambda x: x * 2 if x.all() else x, backend="eager", fullgraph=True)
        with pytest.raises(JitError, match=r"test_values.py:\d+: .* reads a value inside"):
            f(sm.device_put(FULL, mesh, P("a")))

    sm.simulate(2)(main)()


def test_the_reason_and_the_values_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    f = sm.jit(package("masked"), backend="eager")
    with caplog.at_level(logging.INFO, "shardmesh"):
        f(X, FULL)
        f(X, SOME)
    text = "the value read at /nowhere/site-packages/masks.py:3 is False and was True"
    assert f.recorded[1].reason == text
    assert text in caplog.text
    assert "# runs where /nowhere/site-packages/masks.py:3 reads True" in str(f.recorded[0])


@pytest.mark.parametrize("strict", [False, True])
def test_the_limit(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    f = sm.jit(package("scaled"), backend="eager", strict=strict)
    masks = [torch.arange(20) < n for n in range(selection.MOST + 2)]
    for mask in masks[: selection.MOST - 1]:
        assert torch.equal(f(X, mask), X * mask.sum())
    with pytest.warns(UserWarning, match="recorded 8 times"):
        f(X, masks[selection.MOST - 1])
    with caplog.at_level(logging.WARNING, "shardmesh"):
        for mask in masks[selection.MOST :]:
            if strict:
                with pytest.raises(JitError, match=r"at most 8 .*masks.py:6, and this call"):
                    f(X, mask)
            else:
                assert torch.equal(f(X, mask), X * mask.sum())
    assert caplog.text.count("calls with others run eagerly") == (not strict)
    ran = runs(f)
    for mask in masks[: selection.MOST]:
        assert torch.equal(f(X, mask), X * mask.sum())
    assert runs(f) == ran + selection.MOST
    assert len(f.recorded) == selection.MOST


def test_the_result_beyond_the_limit_has_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST", 1)
    w = torch.ones(4, requires_grad=True)
    read = package("is_full")
    f = sm.jit(lambda x, mask: (x * w).sum() if read(mask) else w.sum(), backend="eager")
    f(X, FULL)
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside the function"):
        f(X, SOME).backward()
    assert len(f.recorded) == 1


OBSTACLES: dict[str, tuple[Callable[..., Any], str]] = {
    "random": (lambda x: torch.rand_like(x) > 0.5, "it depends on random numbers"),
    "dropout": (lambda x: F.dropout(x, 0.5) > 0, "it depends on random numbers"),
    "written": (lambda x: x.add_(1) > 5, "it depends on what the function has written before"),
    "long": (lambda x: sum((x * i for i in range(99)), x) > 9999, "operators compute it"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_values_that_are_known_only_inside(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are a break; with `fullgraph=True` compared in the graph, and the error says why."""
    function, why = OBSTACLES[name]
    read = package("count")

    def step(x: Tensor) -> Tensor:
        return x * read(function(x))

    f = sm.jit(step, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    f(X.clone())
    assert not f.recorded[0]._program.reads
    with pytest.raises(JitError, match=rf"masks.py:6: the value was .*{why}"):
        for _ in range(30):
            f(torch.full((4,), 20.0))
    with_break = sm.jit(step, backend="eager")
    with caplog.at_level(logging.WARNING, "shardmesh"):
        for i in range(4):
            torch.manual_seed(i)
            expected = step(X * 4)
            torch.manual_seed(i)
            assert torch.equal(with_break(X * 4), expected)
    assert not with_break.recorded
    assert re.search(rf"masks.py:6: a value is read that cannot select .*{why}", caplog.text)


def test_a_write_inside_what_is_read() -> None:
    """To memory of its own: computed before the graph, and again in it."""
    read = package("masked")

    def step(x: Tensor, mask: Tensor) -> Tensor:
        copy = mask.clone()
        copy[0] = True
        return read(x, copy) + copy

    f = sm.jit(step, backend="eager")
    masks = (FULL, SOME, mask_of(0, 1, 1, 1), mask_of(0, 0, 1, 1))
    for mask in masks * 2:
        assert torch.equal(f(X, mask), step(X, mask))
    assert len(f.recorded) == 2


def test_a_value_of_a_state_that_the_step_changes() -> None:
    """A counter in a tensor: each value is recorded once, if it comes again."""
    counter, read = torch.zeros((), dtype=torch.long), package("count")

    def step(x: Tensor) -> Tensor:
        n = read(counter)
        counter.add_(1).remainder_(3)
        return x * n

    f = sm.jit(step, backend="eager")
    for i in range(9):
        assert torch.equal(f(X), X * (i % 3))
    assert len(f.recorded) == 3


# -- ranks that differ -----------------------------------------------------------------------------


class Linear(nn.Module):
    """A layer whose rows are masked by an installed package, and its training."""

    def __init__(self, options: Any = None, strict: bool = False, size: int = 2) -> None:
        super().__init__()
        self.mesh = sm.init_device_mesh(DEVICE, (size,), axis_names=("dp",))
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        sm.parallel.fully_shard(self.layer, self.mesh)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.read = package("branches")
        self.f = sm.jit(self.step, backend="eager", compiler_options=options, strict=strict)

    def step(self, x: Tensor, mask: Tensor) -> Tensor:
        loss = self.read(self.layer(x), mask).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, masks: Sequence[Sequence[Tensor]], jitted: bool) -> list[Any]:
        step = self.f if jitted else self.step
        rank = current_world().rank
        losses = [step(X * (i + rank + 1), mask[rank]).item() for i, mask in enumerate(masks)]
        return [losses, *(whole(p) for p in self.layer.parameters())]


TURNS = [(FULL, FULL), (FULL, SOME), (SOME, FULL), (NONE, SOME), (FULL, NONE), (SOME, SOME)]


@pytest.mark.parametrize("options", [None, False, {"overlap": True}], ids=str)
def test_ranks_that_read_other_values(options: Any) -> None:
    def main(jitted: bool) -> Any:
        model = Linear(options)
        trained = model.train(TURNS * 2, jitted)
        return trained, [model.f.recorded[i].reason for i in range(len(model.f.recorded))]

    for (found, reasons), (expected, _) in zip(
        sm.simulate(2)(main)(True), sm.simulate(2)(main)(False), strict=True
    ):
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1:], expected[1:]))
        assert len(reasons) == 3


def trained(jitted: bool) -> list[Any]:
    """Train on four ranks, each of which pads other batches."""
    turns = [[FULL if i % (rank + 2) else SOME for rank in range(4)] for i in range(8)]
    return Linear(size=4).train(turns, jitted)


def test_processes(world4: Pool) -> None:
    for found, expected in zip(world4(trained, True), world4(trained, False), strict=True):
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1:], expected[1:]))


def test_all_ranks_record_when_one_has_read_a_new_value() -> None:
    def main() -> list[list[str]]:
        model, found = Linear(), []
        for masks in ((FULL, FULL), (FULL, FULL), (FULL, SOME), (SOME, FULL), (SOME, FULL)):
            with collectives() as records:
                model.train([masks], True)
            found.append([record.op for record in records if record.op == "all_gather_object"])
        return [len(ops) for ops in found]

    counts = sm.simulate(2)(main)()
    assert counts[0] == counts[1]


def test_the_agreement_is_one_small_collective() -> None:
    def main() -> tuple[list[str], list[str], int]:
        model = Linear()
        model.train([(FULL, FULL)] * 3, True)
        with collectives() as records:
            model.train([(FULL, FULL)], True)
        with collectives() as eager:
            model.train([(FULL, FULL)], False)
        return launched(records), launched(eager), records[0].bytes_sent

    for found, eager, size in sm.simulate(2)(main)():
        assert len(found) == len(eager) + 1
        assert found[0] == "all_reduce"
        assert size == 24


@pytest.mark.parametrize("strict", [False, True])
def test_ranks_reach_the_limit_together(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST", 2)

    def main() -> Any:
        model = Linear(strict=strict)
        masks = [(FULL, FULL), (SOME, FULL), (NONE, FULL), (FULL, SOME), (SOME, FULL), (NONE, NONE)]
        found = []
        for turn in masks:
            try:
                found.append(model.train([turn], True)[0])
            except JitError as error:
                found.append("combinations of the values" in str(error))
        return found, len(model.f.recorded)

    def eager() -> Any:
        model = Linear()
        masks = [(FULL, FULL), (SOME, FULL), (NONE, FULL), (FULL, SOME), (SOME, FULL), (NONE, NONE)]
        return [model.train([turn], False)[0] for turn in masks]

    first, second = sm.simulate(2)(main)()
    if strict:
        assert [x is True for x in first[0]] == [x is True for x in second[0]]
        assert first[0][3] is True  # the first call is not recorded: ranks exchange objects once
    else:
        assert [first[0], second[0]] == sm.simulate(2)(eager)()
    assert max(first[1], second[1]) <= 2


def test_passes_are_dropped_where_values_would_have_other_schedules() -> None:
    """Two gathers of one value become one, those of two values do not."""

    def main(jitted: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        read, rank = package("is_full"), mesh.get_rank()

        def gathered(x: Tensor) -> Tensor:
            out = x.new_empty(8)
            mesh.group().all_gather(out, x)
            return out

        def step(x: Tensor, mask: Tensor) -> Tensor:
            return gathered(x) + gathered(x if read(mask) else x + 1)

        f = sm.jit(step, backend="eager") if jitted else step
        found, counts = [], []
        for masks in [(FULL, FULL), (FULL, FULL), *TURNS[:3], (SOME, SOME)] * 2:
            with collectives() as records:
                found.append(f(X * (rank + 1), masks[rank]))
            counts.append(launched(records))
        return found, counts, [str(one).splitlines()[0] for one in getattr(f, "recorded", ())]

    for (found, counts, texts), (expected, eager, _) in zip(
        sm.simulate(2)(main)(True), sm.simulate(2)(main)(False), strict=True
    ):
        assert all(map(torch.equal, found, expected))
        assert counts[1] == ["all_reduce", "all_gather"]
        assert counts[4:] == eager[4:]
        assert texts == ["# no passes"] * 2


def test_a_value_that_is_the_same_on_a_part_of_the_mesh() -> None:
    def main(jitted: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp"))
        w = sm.device_put(torch.ones(4), mesh, P("dp"))
        read, row = package("masked"), mesh.coordinate[0]

        def step(x: Any, mask: Any) -> Any:
            return read(x, mask).full_tensor() + w.redistribute(P()).full_tensor()

        f = sm.jit(step, backend="eager") if jitted else step
        found = []
        for i, masks in enumerate(TURNS[:3] * 2):
            x, mask = (sm.device_put(t, mesh["tp"], P("tp")) for t in (X * i, masks[row]))
            found.append(f(x, mask))
        return found, [program.is_own for program in programs(f)]

    for (found, own), (expected, _) in zip(
        sm.simulate(4)(main)(True), sm.simulate(4)(main)(False), strict=True
    ):
        assert all(map(torch.equal, found, expected))
        assert own == [True, True]


def programs(f: Any) -> list[Any]:
    return [one._program for one in getattr(f, "recorded", ())]


@pytest.mark.parametrize("own_first", [False, True])
def test_collectives_of_what_is_read_after_own_values(own_first: bool) -> None:
    """Ranks need not reach them: they stay inside; before own values they select a recording."""

    def main() -> list[Any]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        read = package("is_full")

        def step(own: Tensor, common: Any) -> Tensor:
            masks = (own, common) if own_first else (common, own)
            answers = [read(mask) for mask in masks]
            return X * answers[0] + answers[1]

        f = sm.jit(step, backend="eager")
        found: list[Any] = []
        for own, common in ((FULL, FULL), (SOME, FULL), (FULL, SOME), (SOME, SOME), (FULL, FULL)):
            masks = own if mesh.get_rank() else FULL, sm.device_put(common, mesh, P("a"))
            try:
                found.append(torch.equal(f(*masks), step(*masks)))
            except JitError as error:
                found.append(re.findall("it needs a collective", str(error)))
        return found

    refused = ["it needs a collective"] if own_first else True
    assert sm.simulate(2)(main)() == [[True, True, refused, refused, True]] * 2


@every_rank(2)
def test_values_that_torch_reads_to_validate_arguments(mesh: sm.DeviceMesh) -> None:
    """Classes of `one_hot`, and arguments of distributions."""

    def f(x: Any) -> Any:
        counts = F.one_hot(x.argmax(-1), num_classes=5).sum(0)
        # said here, since the first use of torch.compile turns the default off
        normal = torch.distributions.Normal(x, x.square() + 1, validate_args=True)
        return counts, normal.log_prob(x * 2).sum()

    def classes(x: Tensor) -> Tensor:
        return F.one_hot(x.argmax(-1))  # as many as the largest value says

    for spec in (None, P(), P("a")):
        jitted = sm.jit(f, backend="eager", fullgraph=True)
        for i in range(3):
            x: Any = torch.randn(4, 5, generator=torch.Generator().manual_seed(i)).to(DEVICE)
            x = x if spec is None else sm.device_put(x, mesh, spec)
            for value, expected in zip(jitted(x), f(x), strict=True):
                assert torch.equal(whole(value), whole(expected))
        assert len(jitted.recorded) == 1
    by_name: dict[str, Any] = {"input": torch.arange(4), "num_classes": 5}
    one_hot = sm.jit(F.one_hot, backend="eager", fullgraph=True)
    assert torch.equal(one_hot(**by_name), F.one_hot(**by_name))
    with pytest.raises(JitError, match="reads a value"):
        sm.jit(classes, backend="eager", fullgraph=True)(torch.ones(4, 5))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        sm.jit(f, backend="eager")(torch.full((4, 5), float("nan")))
