"""Stages on meshes of different shapes: other tp and dp sizes per stage equal one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import Pipeline, colwise, pipeline, prepare_inputs, rowwise
from tests.mesh.simulated.nccl_world import nccl_world
from tests.sharding.parallel.pipeline import stateful_model
from tests.sharding.parallel.pipeline.pipeline_jobs import (
    STEPS,
    Block,
    Trained,
    batch,
    boundaries,
    check_equal,
    detached,
    make_model,
    one_process,
    whole,
)

Sizes = Sequence[Mapping[str, int]]


def ranks_of(sizes: Sizes) -> list[int]:
    """Return the number of ranks of each place."""
    return [math.prod(shape.values()) for shape in sizes]


def make_pipe(
    sizes: Sizes,
    stages: int,
    model: nn.Module | None = None,
    *,
    sequence: bool = False,
    **options: Any,
) -> Pipeline:
    """Return a pipeline with tensor parallelism over "tp" and FSDP over "dp".

    Args:
        sequence: split what blocks return along the sequence.
    """
    ranks = ranks_of(sizes)
    if len(set(ranks)) == 1:
        shape, names = (len(sizes), ranks[0]), ("pp", "rank")
    else:
        shape, names = (sum(ranks),), ("pp",)
    mesh = sm.init_device_mesh("cpu", shape, axis_names=names)
    pipe = pipeline(
        make_model() if model is None else model,
        mesh,
        split=boundaries(stages),
        stage_meshes=sizes,
        **options,
    )
    own = pipe.stage_mesh
    if "tp" in own.axis_names:
        plan: dict[str, Any] = {"*.up": colwise(), "*.down": rowwise()}
        if sequence:
            plan["*.down"] = rowwise(out=P(None, "tp", None))
            plan["head"] = prepare_inputs(P())
        pipe.parallelize(plan, own["tp"])
    if "dp" in own.axis_names:
        pipe.fully_shard(own["dp"], units=Block)
    return pipe


def train(
    sizes: Sizes, schedule: str, microbatches: int, stages: int, sequence: bool = False
) -> Trained:
    pipe = make_pipe(sizes, stages, schedule=schedule, microbatches=microbatches, sequence=sequence)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses: list[float] = []
    grads: dict[str, Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipe.step(*batch(), loss_fn=F.cross_entropy).item())
        grads = {name: whole(x.grad) for name, x in pipe.named_parameters()}
        optimizer.step()
    evaluated = pipe.eval(*batch(), loss_fn=F.cross_entropy).item()
    state = {name: x.full_tensor().clone() for name, x in pipe.state_dict().items()}
    assert set(state) == set(make_model().state_dict())
    return Trained(losses, grads, detached(pipe.named_parameters()), evaluated)


FOUR_THEN_TWO = [{"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}]
CASES = [
    (FOUR_THEN_TWO, "1f1b", 4, 2),
    ([{"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}], "zb_v", 2, 4),
    ([{"dp": 4}, {"dp": 2, "tp": 2}], "zb_h1", 4, 2),
    ([{"tp": 2}, {"dp": 2}, {"tp": 2}], "gpipe", 2, 3),
    ([{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}], "interleaved", 4, 4),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("sizes", "schedule", "microbatches", "stages"),
    CASES,
    ids=[f"{case[1]}" for case in CASES],
)
def test_equals_one_process(sizes: Sizes, schedule: str, microbatches: int, stages: int) -> None:
    trained = sm.simulate(sum(ranks_of(sizes)))(train)(sizes, schedule, microbatches, stages)
    check_equal(trained, one_process())


UNEQUAL = [
    ([{"dp": 2}, {"dp": 2, "tp": 2}], "1f1b", 4, 2),
    ([{"dp": 1}, {"dp": 2}], "zb_v", 2, 4),
    ([{"dp": 2, "tp": 2}, {"tp": 2}, {"tp": 1}], "gpipe", 2, 3),
    ([{"dp": 4}, {"tp": 2}], "zb_h1", 4, 2),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("sizes", "schedule", "microbatches", "stages"),
    UNEQUAL,
    ids=[f"{case[1]}" for case in UNEQUAL],
)
def test_unequal_numbers_of_ranks(
    sizes: Sizes, schedule: str, microbatches: int, stages: int
) -> None:
    trained = sm.simulate(sum(ranks_of(sizes)))(train)(sizes, schedule, microbatches, stages)
    check_equal(trained, one_process())


SHARDED = [
    (FOUR_THEN_TWO, "1f1b", 4, 2),
    ([{"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}], "zb_v", 2, 4),
    ([{"dp": 1, "tp": 2}, {"dp": 4}], "zb_h1", 4, 2),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("sizes", "schedule", "microbatches", "stages"),
    SHARDED,
    ids=[f"{case[1]}" for case in SHARDED],
)
def test_values_split_along_the_sequence(
    sizes: Sizes, schedule: str, microbatches: int, stages: int
) -> None:
    trained = sm.simulate(sum(ranks_of(sizes)))(train)(
        sizes, schedule, microbatches, stages, sequence=True
    )
    check_equal(trained, one_process())


def kinds_of_inputs() -> list[tuple[str, ...] | None]:
    """Return for the inputs of this rank's stage the axes that split it, None if it is plain."""
    pipe = make_pipe([{"dp": 1, "tp": 2}, {"dp": 1, "tp": 4}], 2, sequence=True, microbatches=2)
    kinds: list[tuple[str, ...] | None] = []

    def inspect(_: nn.Module, args: tuple[Any, ...]) -> None:
        for x in args[0]:
            kinds.append(tuple(x.spec.axes) if isinstance(x, sm.ShardedTensor) else None)

    for stage in pipe.stages.values():
        stage.register_forward_pre_hook(inspect)
    pipe.forward(batch()[0])
    return kinds


def test_a_sharded_value_has_its_spec_on_the_next_mesh() -> None:
    kinds = sm.simulate(6)(kinds_of_inputs)()
    assert kinds == [[]] * 2 + [[("tp",)] * 2] * 4


def on_a_data_axis_of_size_one() -> tuple[float, float]:
    """Return losses of eval and step where values are on a whole mesh with dp=1 before dp=2."""
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "rank"))
    sizes = [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}]
    pipe = pipeline(make_model(), mesh, split=boundaries(2), stage_meshes=sizes, microbatches=2)
    own = pipe.stage_mesh
    if own.size("dp") == 1:

        def split(_: nn.Module, args: Any, y: Tensor) -> Tensor:
            return sm.device_put(y, own, P("dp", "tp"), src_data_rank=None)

        for stage in pipe.stages.values():
            for block in stage.modules():
                if isinstance(block, Block):
                    block.register_forward_hook(split)
    else:
        pipe.fully_shard(own, axes="dp", units=Block)
    ids, targets = batch()
    return (
        pipe.eval(ids, targets, loss_fn=F.cross_entropy).item(),
        pipe.step(ids, targets, loss_fn=F.cross_entropy).item(),
    )


def test_a_data_axis_of_size_one_splits_nothing_on_the_next_mesh() -> None:
    expected = F.cross_entropy(make_model()(batch()[0]), batch()[1]).item()
    for losses in sm.simulate(4)(on_a_data_axis_of_size_one)():
        assert losses == pytest.approx((expected, expected), abs=1e-12)


def most_in_flight() -> int:
    """Return how many sends this rank holds at most before it waits for a gradient."""
    mesh = sm.init_device_mesh("cpu", (3,), axis_names=("pp",))
    sizes = [{"tp": 1}, {"tp": 2}]
    pipe = pipeline(
        make_model(),
        mesh,
        split=boundaries(2),
        stage_meshes=sizes,
        data_axes=(),
        microbatches=16,
    )
    transport = pipe._transport
    take_gradients = transport.take_gradients
    counts: list[int] = [0]

    def take(stage: int, microbatch: int) -> list[Tensor]:
        counts.append(sum(len(box._in_flight) for box in transport._outboxes.values()))
        return take_gradients(stage, microbatch)

    transport.take_gradients = take
    pipe.step(*batch(), loss_fn=F.cross_entropy)
    return max(counts)


def test_what_is_sent_to_a_rank_that_sends_nothing_back_is_freed() -> None:
    # for each of two ranks a header of two parts, and activations: those of the warmup, the next
    assert sm.simulate(3)(most_in_flight)()[0] <= 2 * (2 + 2)


def tied_gradients_and_state() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients of a step, and the state after that of another model was loaded."""
    mesh = sm.init_device_mesh("cpu", (3,), axis_names=("pp",))
    sizes = [{"dp": 1}, {"dp": 2}]
    model = stateful_model.make_model()
    pipe = pipeline(model, mesh, split=["blocks.1"], stage_meshes=sizes, microbatches=2)
    pipe.fully_shard()
    pipe.step(*stateful_model.batch(), loss_fn=F.cross_entropy)
    grads = {name: whole(x.grad) for name, x in pipe.named_parameters()}
    pipe.load_state_dict(stateful_model.make_model(seed=1).state_dict())
    state = pipe.state_dict()
    own = {name: x.full_tensor() for name, x in state.items() if x.mesh.coordinate is not None}
    assert set(state) == set(model.state_dict())
    return grads, own


def test_tied_parameters_and_state_with_unequal_numbers_of_ranks() -> None:
    model = stateful_model.make_model()
    ids, targets = stateful_model.batch()
    F.cross_entropy(model(ids), targets).backward()
    loaded = stateful_model.make_model(seed=1).state_dict()
    seen: set[str] = set()
    for grads, state in sm.simulate(3)(tied_gradients_and_state)():
        assert "embedding.weight" in grads
        for name, grad in grads.items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
        assert all(torch.equal(x, loaded[name]) for name, x in state.items())
        seen |= set(state)
    assert seen == set(loaded)


def pipe_on_a_part(seed: int) -> tuple[Pipeline, torch.optim.Optimizer, int]:
    """Return one of two pipelines on a mesh, its optimizer and its number."""
    mesh = sm.init_device_mesh("cpu", (2, 3), axis_names=("dp", "pp"))
    pipe = pipeline(
        stateful_model.make_model(seed=seed),
        mesh["pp"],
        split=["blocks.1"],
        stage_meshes=[{"dp": 1}, {"dp": 2}],
        microbatches=2,
    )
    pipe.fully_shard()
    return pipe, stateful_model.make_optimizer(pipe), mesh.get_local_rank("dp")


def state_saved_on_a_part(folder: Path) -> tuple[int, dict[str, Tensor], Any]:
    """Train with other data in each pipeline, then with the same, from the same values, and save.

    Return the number of the pipeline, its gradients of the first step, and the whole state.
    """
    pipe, optimizer, number = pipe_on_a_part(0)
    ids, targets = stateful_model.batch()
    pipe.step(ids.roll(number, 1), targets, loss_fn=F.cross_entropy)
    grads = {name: whole(x.grad) for name, x in pipe.named_parameters()}
    pipe.zero_grad()
    stateful_model.step(pipe, optimizer)
    sm.checkpoint.save(sm.checkpoint.state_dict(pipe, optimizer), folder)
    return number, grads, stateful_model.whole_state(pipe, optimizer)


def state_loaded_on_a_part(folder: Path) -> Any:
    pipe, optimizer, _ = pipe_on_a_part(1)
    state = sm.checkpoint.load(folder, like=sm.checkpoint.state_dict(pipe, optimizer))
    sm.checkpoint.load_state_dict(pipe, state, optimizer)
    return stateful_model.whole_state(pipe, optimizer)


def state_loaded_in_one_process(folder: Path) -> Any:
    model = stateful_model.make_model(seed=1)
    optimizer = stateful_model.make_optimizer(model)
    state = sm.checkpoint.load(folder, like=sm.checkpoint.state_dict(model, optimizer))
    sm.checkpoint.load_state_dict(model, state, optimizer)
    return stateful_model.whole_state(model, optimizer)


def test_checkpoint_of_unequal_stages_on_a_part_of_a_mesh(tmp_path: Path) -> None:
    results = sm.simulate(6)(state_saved_on_a_part)(tmp_path)
    for number, grads, _ in results:
        model = stateful_model.make_model()
        ids, targets = stateful_model.batch()
        F.cross_entropy(model(ids.roll(number, 1)), targets).backward()
        for name, grad in grads.items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
    saved = results[0][2]
    in_one_process = sm.simulate(1)(state_loaded_in_one_process)(tmp_path)[0]
    on_a_part = sm.simulate(6)(state_loaded_on_a_part)(tmp_path)[0]
    stateful_model.check_same(in_one_process, saved)
    stateful_model.check_same(on_a_part, saved)


@pytest.mark.slow
def test_unequal_numbers_of_processes(world4: Any) -> None:
    sizes = [{"dp": 1, "tp": 1}, {"dp": 1, "tp": 3}]
    check_equal(world4(train, sizes, "1f1b", 2, 2, sequence=True), one_process())


@pytest.mark.slow
def test_on_processes(world8: Any) -> None:
    check_equal(world8(train, *CASES[0]), one_process())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sequence"), [(CASES[0], False), (UNEQUAL[0], False), (SHARDED[0], True)]
)
def test_like_nccl(case: Any, sequence: bool) -> None:
    ranks = sum(ranks_of(case[0]))
    with nccl_world():
        check_equal(sm.simulate(ranks)(train)(*case, sequence), one_process())


def norms_and_losses(sizes: Sizes) -> tuple[float, float, int]:
    pipe = make_pipe(sizes, 2, microbatches=4)
    ids, targets = batch()
    parts = list(ids.split([2, 4, 8, 2])), list(targets.split([2, 4, 8, 2]))
    loss = pipe.step(*parts, loss_fn=F.cross_entropy)
    norm = sm.training.clip_grad_norm_(pipe, 1e9)
    results = pipe.forward(ids)
    return loss.item(), float(norm), 0 if results is None else sum(len(x) for x in results)


@pytest.mark.parametrize(
    ("sizes", "expected_rows"),
    [([{"tp": 2}, {"dp": 2}], [0, 0, 8, 8]), ([{"dp": 1}, {"dp": 2, "tp": 2}], [0, 8, 8, 8, 8])],
    ids=["equal", "unequal"],
)
def test_uneven_microbatches_norm_and_results(sizes: Sizes, expected_rows: list[int]) -> None:
    model = make_model()
    loss = F.cross_entropy(model(batch()[0]), batch()[1])
    loss.backward()
    norm = torch.nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None])
    rows = []
    for own_loss, own_norm, own_rows in sm.simulate(sum(ranks_of(sizes)))(norms_and_losses)(sizes):
        assert own_loss == pytest.approx(loss.item(), abs=1e-12)
        assert own_norm == pytest.approx(norm.item(), abs=1e-12)
        rows.append(own_rows)
    assert rows == expected_rows  # those of each data rank


# -- errors ----------------------------------------------------------------------------------------


def errors_of(call: Any, ranks: int = 4) -> list[str]:
    """Return the text of the error that each rank raises."""

    def run() -> str:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call()
        return str(raised.value)

    return sm.simulate(ranks)(run)()


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ([{"dp": 2}], {}, "stage_meshes has 1 meshes, and axis 'pp' 2 ranks"),
        ([{"dp": 2}, {"dp": 4}], {}, "stage_meshes[1]={'dp': 4}: the sizes of axes"),
        ([{"dp": 1}, {"dp": 3}], {}, "different numbers of ranks need a mesh with the pipeline's"),
        ([{"dp": 2}, {"pp": 2}], {}, "stage_meshes[1]={'pp': 2}"),
        ([{"dp": 2}, {"tp": 2}], {"data_axes": "fsdp"}, "no mesh of stage_meshes has an axis"),
    ],
)
def test_errors_of_sizes(sizes: Sizes, options: dict[str, Any], text: str) -> None:
    def make() -> None:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "rank"))
        pipeline(make_model(), mesh, split=boundaries(2), stage_meshes=sizes, **options)

    texts = errors_of(make)
    assert len(set(texts)) == 1
    assert text in texts[0]


def test_sizes_that_do_not_divide_the_ranks() -> None:
    def make() -> None:
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("pp",))
        sizes = [{"dp": 2}, {"tp": 3}]
        pipeline(make_model(), mesh, split=boundaries(2), stage_meshes=sizes)

    texts = errors_of(make)
    assert len(set(texts)) == 1
    assert "have [2, 3] ranks, and" in texts[0]


def test_rows_must_be_split_among_all_data_ranks() -> None:
    def step() -> None:
        pipe = make_pipe([{"tp": 2}, {"dp": 2}], 2, microbatches=4)
        pipe.step(*(x[:12] for x in batch()), loss_fn=F.cross_entropy)

    texts = errors_of(step)
    assert len(set(texts)) == 1
    assert "a multiple of 2 rows" in texts[0]
    assert "got 3 rows of 3" in texts[0]


def test_gradients_must_be_averaged_over_data_axes() -> None:
    def step() -> None:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "rank"))
        sizes = [{"tp": 2}, {"dp": 2}]
        pipe = pipeline(make_model(), mesh, split=boundaries(2), stage_meshes=sizes)
        pipe.step(*batch(), loss_fn=F.cross_entropy)

    texts = errors_of(step)
    assert len(set(texts)) == 1
    assert "stage_meshes[1] splits rows over data_axes" in texts[0]


class WithPositions(nn.Module):
    """Carries an output of a unit that has no rows, past the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(torch.ones(1, 3))
        return self.blocks[1](self.blocks[0](x) + positions)


def test_a_value_without_rows_that_requires_a_gradient() -> None:
    def step() -> None:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "rank"))
        sizes = [{"tp": 2}, {"dp": 2}]
        pipe = pipeline(WithPositions(), mesh, split=["blocks.0"], stage_meshes=sizes)
        if "dp" in pipe.stage_mesh.axis_names:
            pipe.fully_shard()
        x = torch.ones(8, 3)
        pipe.step(x, x, loss_fn=F.mse_loss)

    with pytest.raises(RuntimeError, match="has no dim with the rows of the microbatch"):
        sm.simulate(4)(step)()
