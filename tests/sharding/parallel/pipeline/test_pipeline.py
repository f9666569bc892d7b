"""Pipelines equal one process, for all schedules, splits and layers inside of stages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import (
    Schedule,
    colwise,
    make_schedule,
    pipeline,
    prepare_inputs,
    rowwise,
)
from tests.sharding.parallel.pipeline.pipeline_jobs import (
    FORMS,
    Trained,
    batch,
    boundaries,
    check_equal,
    make_model,
    make_pipeline,
    one_process,
    own_rows,
    train,
    whole,
)
from tests.tiers import slow

# schedule, ranks, microbatches, stages
SCHEDULES = [
    ("gpipe", 2, 3, 2),
    ("1f1b", 2, 3, 2),
    ("1f1b", 3, 2, 3),
    ("1f1b", 4, 3, 4),
    ("interleaved", 2, 2, 4),
    ("interleaved", 2, 2, 6),
    ("looped_bfs", 2, 3, 4),
    ("zb_h1", 2, 3, 2),
    ("zb_h1", 2, 2, 4),
    ("zb_v", 2, 3, 4),
    ("v_half", 2, 3, 4),
    ("v_min", 2, 3, 4),
    ("dualpipe_v", 2, 4, 4),
]


@pytest.fixture(scope="module")
def expected() -> Trained:
    return one_process()


def simulated(form: str, ranks: int, *args: Any, **options: Any) -> list[Any]:
    size = ranks * 2 ** len(FORMS[form])
    return sm.simulate(size)(functools.partial(train, form))(args[0], ranks, *args[1:], **options)


@pytest.mark.one_in(12, each=["form", "schedule"])
@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "stages"), SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
def test_equals_one_process(form, schedule, ranks, microbatches, stages, expected):
    microbatches = min(microbatches, 3) if form in ("hsdp",) else microbatches
    if schedule == "dualpipe_v" and form == "hsdp":
        pytest.skip("3 rows on a rank make no 4 microbatches")
    check_equal(simulated(form, ranks, schedule, microbatches, stages), expected)


@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        ("fsdp", "interleaved"),
        ("hsdp", "zb_v"),
        ("fsdp and tp", "1f1b"),
        slow("fsdp", "1f1b"),
        slow("fsdp", "zb_v"),
        slow("hsdp", "1f1b"),
        slow("hsdp", "interleaved"),
        slow("fsdp and tp", "interleaved"),
        slow("fsdp and tp", "zb_v"),
    ],
)
def test_gathered_once_a_step(form, schedule, expected):
    stages = 2 if schedule == "1f1b" else 4
    check_equal(simulated(form, 2, schedule, 2, stages, gather="step"), expected)


def count_gathers(gather: str) -> tuple[int, int]:
    pipe = make_pipeline("fsdp", "1f1b", 2, 3, 2, gather=gather)
    ids, targets = own_rows(pipe.mesh, *batch())
    pipe.step(ids, targets, loss_fn=F.cross_entropy)
    with sm.debug.comm_report() as report:
        pipe.step(ids, targets, loss_fn=F.cross_entropy)
    return report.by_op["all_gather"][0], report.by_op["reduce_scatter"][0]


def test_gathering_once_a_step_takes_one_gather_and_one_reduction_per_unit():
    each = sm.simulate(4)(count_gathers)("microbatch")
    once = sm.simulate(4)(count_gathers)("step")
    units = [2, 2, 4, 4]  # a block and the stage; three blocks and the stage
    assert once == [(n, n) for n in units]
    assert all(reduced == 3 * n for (_, reduced), n in zip(each, units, strict=True))
    assert all(gathered > 3 * n for (gathered, _), n in zip(each, units, strict=True))


@pytest.mark.parametrize(
    ("form", "schedule", "stages"), [("fsdp", "1f1b", 2), ("zero1", "zb_v", 4), ("tp", "zb_h1", 4)]
)
def test_on_processes(form, schedule, stages, world4, expected):
    microbatches = 2 if schedule == "zb_h1" else 3
    check_equal(world4(train, form, schedule, 2, microbatches, stages), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_in_a_line_of_processes(schedule, world4, expected):
    check_equal(world4(train, "none", schedule, 4, 4, 4), expected)


def train_checked(mode: str, *case: Any) -> Trained:
    """Train with collectives compared in another way."""
    sm.monitor.collective_check(mode)
    try:
        return train(*case, steps=2)
    finally:
        sm.monitor.collective_check("on")


@pytest.mark.one_in(7, each=["mode"])
@pytest.mark.parametrize("mode", ["strict", "full"])
@pytest.mark.parametrize(
    ("form", "schedule", "ranks", "microbatches", "stages"),
    [
        ("fsdp", "gpipe", 2, 3, 2),
        ("tp", "1f1b", 2, 3, 2),
        ("none", "1f1b", 4, 4, 4),
        ("fsdp", "interleaved", 2, 2, 4),
        ("fsdp", "looped_bfs", 2, 3, 4),
        ("none", "zb_h1", 4, 4, 4),
        ("zero1", "zb_v", 2, 3, 4),
        ("fsdp", "v_half", 2, 3, 4),
        ("tp", "v_min", 2, 3, 4),
        ("ddp", "dualpipe_v", 2, 4, 4),
    ],
)
def test_on_processes_that_wait_for_each_other_in_collectives(
    form, schedule, ranks, microbatches, stages, mode, world4
):
    trained = world4(train_checked, mode, form, schedule, ranks, microbatches, stages)
    check_equal(trained, one_process(steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hsdp", "fsdp and tp"])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zb_v", 4)])
def test_ten_steps_on_eight_processes(form, schedule, stages, world8):
    trained = world8(train, form, schedule, 2, 3, stages, steps=10)
    check_equal(trained, one_process(steps=10))


# -- bits ------------------------------------------------------------------------------------------


def test_bits_do_not_depend_on_the_schedule():
    results = []
    for schedule, ranks, stages in [
        ("gpipe", 1, 1),
        ("gpipe", 2, 2),
        ("1f1b", 4, 4),
        ("interleaved", 2, 4),
        ("zb_h1", 2, 2),
        ("zb_v", 2, 4),
        ("v_min", 2, 4),
    ]:
        trained = simulated("none", ranks, schedule, 4, stages)
        parameters = {name: x for one in trained for name, x in one.parameters.items()}
        results.append((trained[0].losses, parameters))
    losses, parameters = results[0]
    for other_losses, other_parameters in results[1:]:
        assert other_losses == losses
        assert all(torch.equal(x, other_parameters[name]) for name, x in parameters.items())


class WithDropout(nn.Module):
    """Dropout in units, between them by a module and by a function, and recomputation."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.model = make_model(dropout=0.3)
        self.between = nn.Dropout(0.2)
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.between(self.model.embedding(ids))
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.model.head(F.dropout(self.model.norm(x), 0.1, self.training)).transpose(1, 2)


def train_with_dropout(
    schedule: str, ranks: int, split: list[str], recompute: bool
) -> tuple[list[float], dict[str, Tensor]]:
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("pp",))
    model = WithDropout(recompute)
    torch.manual_seed(7)
    pipe = pipeline(
        model, mesh, split=split, schedule=schedule, microbatches=4, example=((batch()[0],), {})
    )
    losses = [pipe.step(*batch(), loss_fn=F.cross_entropy).item() for _ in range(2)]
    return losses, {name: x.grad for name, x in pipe.named_parameters()}


def test_dropout_does_not_depend_on_split_schedule_or_recomputation():
    results = []
    for schedule, ranks, split, recompute in [
        ("gpipe", 1, [], False),
        ("gpipe", 1, [], True),
        ("1f1b", 2, ["model.blocks.2"], False),
        ("1f1b", 2, ["model.blocks.1"], True),
        ("zb_v", 2, ["model.blocks.0", "model.blocks.1", "model.blocks.3"], False),
        ("zb_v", 2, ["model.blocks.1", "model.blocks.2", "model.norm"], True),
    ]:
        by_rank = sm.simulate(ranks)(train_with_dropout)(schedule, ranks, split, recompute)
        grads = {name: grad for _, own in by_rank for name, grad in own.items()}
        results.append(([losses for losses, _ in by_rank], grads))
    losses, grads = results[0]
    assert losses[0][0] != losses[0][1]  # new numbers in each step
    for other_losses, other_grads in results[1:]:
        assert all(each == losses[0] for each in other_losses)
        assert all(torch.equal(grad, other_grads[name]) for name, grad in grads.items())


# -- batches ---------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Uses a mask in every block, and returns two results; a skip connection crosses blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8).double()
        self.blocks = nn.ModuleList([nn.Linear(8, 8).double() for _ in range(3)])
        self.head = nn.Linear(8, 2).double()

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor | None = None, power: int = 1) -> Any:
        x = skip = self.first(x * scale)
        for block in self.blocks:
            x = torch.tanh(block(x))
            if mask is not None:
                x = x * mask.unsqueeze(-1) ** power
        return {"out": self.head(x + skip), "inner": x}


def masked_loss(result: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(result["out"], target[0]) + 0.1 * F.mse_loss(result["inner"], target[1])


def masked_batch() -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    mask = (normal(7, 4) > 0).double()
    return normal(7, 4, 3), normal(1, 1, 3), mask, (normal(7, 4, 2), normal(7, 4, 8))


def run_masked(split: list[str], presplit: bool) -> tuple[float, dict[str, Tensor]]:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
    pipe = pipeline(Masked(), mesh, split=split, schedule="1f1b", microbatches=3)
    x, scale, mask, target = masked_batch()
    inputs: Any = (x, scale)
    masks: Any = mask
    targets: Any = target
    if presplit:
        sizes = [1, 5, 1]
        inputs = [(part, scale) for part in x.split(sizes)]
        masks = list(mask.split(sizes))
        targets = list(zip(*(part.split(sizes) for part in target), strict=True))
    loss = pipe.step(inputs, targets, loss_fn=masked_loss, mask=masks, power=2)
    return loss.item(), {name: grad.grad for name, grad in pipe.named_parameters()}


@pytest.mark.parametrize("presplit", [False, True])
@pytest.mark.parametrize("split", [["blocks.0"], ["blocks.2"], ["head"]])
def test_several_inputs_masks_and_results(split, presplit):
    model = Masked()
    x, scale, mask, target = masked_batch()
    loss = masked_loss(model(x, scale, mask, 2), target)
    loss.backward()
    names = set()
    for own_loss, grads in sm.simulate(2)(run_masked)(split, presplit):
        assert abs(own_loss - loss.item()) < 1e-12
        for name, grad in grads.items():
            assert (grad - model.get_parameter(name).grad).abs().max() < 1e-12
            names.add(name)
    assert names == set(dict(model.named_parameters()))


def losses_of_lengths() -> tuple[list[float], int]:
    pipe = make_pipeline("none", "1f1b", 2, 2, 2)
    ids, targets = batch()
    losses: list[float] = []
    for lengths in [(5, 5), (3, 4), (5, 3), (4, 4), (3, 4)]:
        parts = [x[:8, :n] for x, n in zip((ids, ids), lengths, strict=True)]
        wanted = [x[8:, :n] for x, n in zip((targets, targets), lengths, strict=True)]
        losses.append(pipe.step(parts, wanted, loss_fn=F.cross_entropy).item())
    with sm.debug.comm_report() as report:
        pipe.step(parts, wanted, loss_fn=F.cross_entropy)
    return losses, report.by_op["permute"][0]


def test_lengths_change_from_step_to_step_and_between_microbatches():
    model = make_model()
    ids, targets = batch()
    expected: list[float] = []
    for lengths in [(5, 5), (3, 4), (5, 3), (4, 4), (3, 4)]:
        sums = [
            F.cross_entropy(model(ids[:8, :n]), targets[8:, :n], reduction="sum") for n in lengths
        ]
        count = sum((targets[8:, :n] != -100).sum() for n in lengths)
        expected.append((sum(sums) / count).item())
    for losses, messages in sm.simulate(2)(losses_of_lengths)():
        assert losses == pytest.approx(expected, abs=1e-12)
        assert messages == 4  # known lengths: an activation and a gradient per microbatch


def eval_counts() -> list[float]:
    pipe = make_pipeline("none", "zb_v", 2, 4, 4)
    ids, targets = batch()
    losses = [pipe.eval(ids, targets, loss_fn=F.cross_entropy).item()]
    for parts in (1, 3, 7):
        split_ids, split_targets = (list(x.tensor_split(parts)) for x in (ids, targets))
        losses.append(pipe.eval(split_ids, split_targets, loss_fn=F.cross_entropy).item())
    results = pipe.forward(ids)
    assert (results is None) == (3 not in pipe.stages)
    if results is not None:
        assert torch.equal(torch.cat(results), torch.cat([make_model()(x) for x in ids.split(4)]))
    assert all(x.grad is None for x in pipe.parameters())
    return losses


def test_evaluation_takes_any_number_of_microbatches():
    ids, targets = batch()
    expected = F.cross_entropy(make_model()(ids), targets).item()
    for losses in sm.simulate(2)(eval_counts)():
        assert losses == pytest.approx([expected] * 4, abs=1e-12)


def step_with(loss_fn: Any, weight: Any, targets: Tensor) -> float:
    pipe = make_pipeline("none", "1f1b", 2, 3, 2)
    return pipe.step(batch()[0], targets, loss_fn=loss_fn, weight=weight).item()


def mean_of_squares(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "weight"),
    [
        (F.cross_entropy, None),
        (functools.partial(F.cross_entropy, ignore_index=3), None),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), None),
        (functools.partial(F.cross_entropy, weight=torch.linspace(0, 2, 20).double()), None),
        (functools.partial(F.cross_entropy, reduction="sum"), None),
        (nn.CrossEntropyLoss(ignore_index=4), None),
        (lambda logits, t: F.cross_entropy(logits, t), lambda t: (t != -100).sum()),
    ],
    ids=["mean", "ignored", "smoothed", "weighted", "sum", "module", "counted"],
)
def test_loss_is_that_of_the_whole_batch(loss_fn, weight):
    ids, targets = batch()
    if "ignore_index" in repr(loss_fn) or isinstance(loss_fn, nn.Module):
        targets = targets.clamp(min=0)
    expected = loss_fn(make_model()(ids), targets).item()
    for loss in sm.simulate(2)(step_with)(loss_fn, weight, targets):
        assert loss == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, nn.L1Loss(), mean_of_squares])
def test_losses_of_elements(loss_fn):
    ids, _ = batch()
    targets = torch.ones(16, 20, 5, dtype=torch.float64)
    expected = loss_fn(make_model()(ids), targets).item()
    for loss in sm.simulate(2)(step_with)(loss_fn, None, targets):
        assert loss == pytest.approx(expected, abs=1e-12)


# -- additional losses -----------------------------------------------------------------------------


class Penalised:
    """Adds the mean square of a value to the loss."""

    @staticmethod
    def apply_to(x: Tensor, pipes: list[Any]) -> Tensor:
        for pipe in pipes:
            pipe.add_loss(0.01 * x.square().mean())
        return x


class PenalisedBlock(nn.Module):
    """A block that adds to the loss inside of its own forward."""

    def __init__(self, block: nn.Module, pipes: list[Any]) -> None:
        super().__init__()
        self.block = block
        self.pipes = pipes

    def forward(self, x: Tensor) -> Tensor:
        return Penalised.apply_to(self.block(x), self.pipes)


def penalised_model(pipes: list[Any]) -> nn.Module:
    model = make_model()
    model.blocks = nn.ModuleList([PenalisedBlock(block, pipes) for block in model.blocks])
    return model


def train_penalised(schedule: str, stages: int) -> tuple[float, dict[str, Tensor]]:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
    pipes: list[Any] = []
    model = penalised_model(pipes)
    pipe = pipeline(model, mesh, split=boundaries(stages), schedule=schedule, microbatches=4)
    pipes.append(pipe)
    ids = batch()[0]
    loss = pipe.step(ids, ids, loss_fn=F.cross_entropy)
    pipes.clear()  # the pipe refers to the model
    return loss.item(), {name: x.grad for name, x in pipe.named_parameters()}


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved", 4), ("zb_v", 4)])
def test_additional_losses_of_any_stage(schedule, stages):
    ids = batch()[0]
    collected: list[Tensor] = []

    class Collector:
        def add_loss(self, value: Tensor) -> None:
            collected.append(value)

    model = penalised_model([Collector()])
    total = F.cross_entropy(model(ids), ids)
    total = total + torch.stack(collected).sum()
    total.backward()
    for loss, grads in sm.simulate(2)(train_penalised)(schedule, stages):
        assert loss == pytest.approx(total.item(), abs=1e-12)
        for name, grad in grads.items():
            assert (grad - model.get_parameter(name).grad).abs().max() < 1e-12, name


# -- state of the program --------------------------------------------------------------------------


def accumulate() -> dict[str, Tensor]:
    pipe = make_pipeline("none", "1f1b", 2, 2, 2)
    for _ in range(2):
        pipe.step(*batch(), loss_fn=F.cross_entropy)
    return {name: x.grad for name, x in pipe.named_parameters()}


def test_gradients_of_steps_add_up():
    model = make_model()
    ids, targets = batch()
    (2 * F.cross_entropy(model(ids), targets)).backward()
    for grads in sm.simulate(2)(accumulate)():
        for name, grad in grads.items():
            assert (grad - model.get_parameter(name).grad).abs().max() < 1e-12


def parts_of_the_model() -> tuple[list[str], list[str]]:
    pipe = make_pipeline("none", "zb_v", 2, 4, 4)
    on_meta = [name for name, x in pipe.model.named_parameters() if x.is_meta]
    return [name for name, _ in pipe.named_parameters()], on_meta


def test_a_rank_holds_its_stages_only():
    names = [name for name, _ in make_model().named_parameters()]
    for own, on_meta in sm.simulate(2)(parts_of_the_model)():
        assert sorted(own + on_meta) == sorted(names)
        assert 0 < len(own) < len(names)


def live_after_step() -> int:
    pipe = make_pipeline("none", "zb_v", 2, 6, 4)
    ids, targets = batch()
    pipe.step(ids, targets, loss_fn=F.cross_entropy)
    return len(pipe._transport._own) + sum(
        len(box._in_flight) for box in pipe._transport._outboxes.values()
    )


def test_nothing_is_kept_after_a_step():
    assert sm.simulate(2)(live_after_step)() == [0, 0]


# -- errors ----------------------------------------------------------------------------------------


def errors_of(call: Any) -> list[str]:
    """Return the text of the error that each of two ranks raises."""

    def run() -> str:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            call()
        return str(raised.value)

    return sm.simulate(2)(run)()


def make(**options: Any) -> Any:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
    defaults: dict[str, Any] = {"split": ["blocks.1"], "schedule": "1f1b", "microbatches": 4}
    return pipeline(make_model(), mesh, **{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"axis": "tp"}, "has no axis 'tp'; name one of ('pp',) with axis="),
        ({"split": ["blocks.9"]}, "blocks.9"),
        ({"split": ["blocks.1", "blocks.2"]}, "stages"),
        ({"split": ["blocks.1", "blocks.1", "blocks.2"], "schedule": "zb_v"}, "blocks.1"),
        ({"split": ["blocks.2", "blocks.1", "head"], "schedule": "zb_v"}, "blocks"),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        ({"schedule": make_schedule("1f1b", 4, 4)}, "is for 4 ranks, not 2"),
        ({"schedule": make_schedule("1f1b", 2, 3)}, "is for 3 microbatches, not 4"),
        ({"schedule": lambda p, m: make_schedule("1f1b", p, m + 1)}, "microbatches"),
        ({"schedule": lambda p, m: "1f1b"}, "returns a Schedule"),
        ({"schedule": Schedule([["0F0", "0B0"], ["1F0"]]), "microbatches": 1}, "1B0"),
        ({"schedule": "dualpipe_v", "split": boundaries(4), "microbatches": 3}, "microbatches"),
    ],
)
def test_errors_of_pipeline(options, text):
    first, second = errors_of(lambda: make(**options))
    assert first == second
    assert text in first


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"inputs": batch()[0][:3]}, "3 rows cannot be split into 4 microbatches"),
        ({"targets": batch()[1][:7]}, "targets has 7 rows, and the batch 16"),
        ({"inputs": [batch()[0]] * 3, "targets": [batch()[1]] * 2}, "their lengths are"),
        ({"inputs": [], "targets": []}, "there is no microbatch"),
        ({"targets": None}, "no targets; pass targets at least there"),
        (
            {"loss_fn": functools.partial(F.cross_entropy, reduction="none")},
            "has reduction='none'",
        ),
        ({"loss_fn": "mse"}, "give a function of output and target"),
    ],
)
def test_errors_of_step(arguments, text):
    ids, targets = batch()
    call = {"inputs": ids, "targets": targets, "loss_fn": F.cross_entropy, **arguments}
    first, second = errors_of(lambda: make().step(**call))
    assert first == second
    assert text in first


def test_ranks_that_call_differently_raise_the_same_error():
    def run() -> None:
        pipe = make()
        kind = pipe.step if 0 in pipe.stages else pipe.eval
        kind(*batch(), loss_fn=F.cross_entropy)

    first, second = errors_of(run)
    assert first == second
    assert "ranks differ: rank 0 calls step with 4 microbatches, rank 1 calls eval" in first


def test_static_shapes():
    def run() -> None:
        pipe = make(static_shapes=True)
        ids, targets = batch()
        pipe.step(ids, targets, loss_fn=F.cross_entropy)
        pipe.step(ids[:, :3], targets[:, :3], loss_fn=F.cross_entropy)

    first, second = errors_of(run)
    assert first == second
    assert "static_shapes=True" in first


def test_add_loss_outside_of_a_step():
    for text in errors_of(lambda: make().add_loss(torch.ones(()))):
        assert "no stage runs" in text


def test_outputs_are_plain_where_the_last_stage_gets_sharded_values():
    """Blocks pass on parts of the sequence; the loss is of plain logits and plain targets."""

    def program():
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "tp"))
        pipe = pipeline(make_model(), mesh, split=boundaries(2), microbatches=2)
        down = rowwise(out=P(None, "tp", None))
        plan = {"*.up": colwise(), "*.down": down, "head": prepare_inputs(P())}
        pipe.parallelize(plan, mesh["tp"])
        loss = pipe.step(*batch(), loss_fn=F.cross_entropy)
        results = pipe.forward(batch()[0])
        return loss.item(), None if results is None else [type(x) for x in results]

    ids, targets = batch()
    expected = F.cross_entropy(make_model()(ids), targets).item()
    for loss, kinds in sm.simulate(4)(program)():
        assert loss == pytest.approx(expected, abs=1e-12)
        assert kinds in (None, [Tensor, Tensor])


def test_layers_must_not_use_the_axis_of_the_pipeline():
    first, second = errors_of(lambda: make().fully_shard())
    assert first == second
    assert "has only the pipeline's axis 'pp'" in first


def test_a_pattern_must_match_in_the_model():
    def run() -> None:
        pipe = make_pipeline("none", "1f1b", 2, 2, 2)
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("tp",))
        pipe.parallelize({"*.sideways": sm.parallel.colwise()}, mesh)

    first, second = errors_of(run)
    assert first == second
    assert "'*.sideways' matches no module" in first


# -- sharded inputs --------------------------------------------------------------------------------


def train_sharded_inputs() -> tuple[float, dict[str, Tensor]]:
    pipe = make_pipeline("fsdp", "1f1b", 2, 4, 2)
    ids, targets = batch()
    mesh = pipe.mesh["fsdp"]
    sharded = [sm.distribute_tensor(x, mesh, [sm.Shard(0)]) for x in (ids, targets)]
    loss = pipe.step(*sharded, loss_fn=F.cross_entropy)
    return loss.item(), {name: whole(x.grad) for name, x in pipe.named_parameters()}


def test_sharded_inputs_are_the_global_batch():
    model = make_model()
    ids, targets = batch()
    expected = F.cross_entropy(model(ids), targets)
    expected.backward()
    for loss, grads in sm.simulate(4)(train_sharded_inputs)():
        assert loss == pytest.approx(expected.item(), abs=1e-12)
        for name, grad in grads.items():
            assert (grad - model.get_parameter(name).grad).abs().max() < 1e-12, name
