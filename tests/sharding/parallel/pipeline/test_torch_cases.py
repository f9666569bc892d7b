"""What the tests of torch.distributed.pipelining and torchtitan's pipelines try, of running a step.

The cases are those of torch 2.13, test/distributed/pipelining (test_schedule_multiproc, test_stage,
test_backward, test_microbatch), and of torchtitan's integration tests; the tests are ours. Where
the behaviour differs on purpose, docs/pipeline.md has a table.
"""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import Schedule, make_schedule, pipeline

WIDTH, ROWS = 6, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden if scale is None else hidden * scale) + x


class Layers(nn.Module):
    """Layers with a keyword argument that all of them use."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale)
        return x


class TwoResults(Layers):
    """Passes a tuple between its parts and returns one, with a tensor of integers in it."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        count = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        skip = x
        for layer in self.layers:
            x, skip = layer(x), x + skip
            count = count + 1
        return x, skip, count


def make(kind: type[Layers] = Layers, **options: Any) -> Any:
    torch.manual_seed(3)
    return kind(**options).double()


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=random)
    return x, target


def make_pipe(model: nn.Module, schedule: Any = "1f1b", stages: int = 2, **options: Any) -> Any:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
    split = {2: ["layers.2"], 4: ["layers.1", "layers.2", "layers.3"]}[stages]
    return pipeline(model, mesh, split=split, schedule=schedule, **options)


def grads_of(pipe: Any) -> dict[str, Tensor | None]:
    return {name: x.grad for name, x in pipe.named_parameters()}


def check_grads(by_rank: list[dict[str, Tensor | None]], model: nn.Module) -> None:
    """Compare gradients of all ranks with one process; None must be None."""
    own = {name: grad for grads in by_rank for name, grad in grads.items()}
    expected = {name: x.grad for name, x in model.named_parameters()}
    assert own.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None:
            assert own[name] is None, name
        else:
            assert own[name] is not None, name
            torch.testing.assert_close(own[name], grad, rtol=0, atol=1e-12)


# -- test_schedule_multiproc -----------------------------------------------------------------------


def test_forward_only_in_a_loop() -> None:
    """`schedule.step` without a loss function."""

    def program() -> Tensor | None:
        pipe = make_pipe(make())
        x = rows()[0]
        for _ in range(3):
            results = pipe.forward(x)
            x = x + 1
        return None if results is None else torch.cat(results)

    with torch.no_grad():
        expected = torch.cat([make()(part + 1 + 1) for part in rows()[0].split(2)])
    first, last = sm.simulate(2)(program)()
    assert first is None
    assert torch.equal(last, expected)


def test_evaluation_in_inference_mode() -> None:
    def program() -> tuple[float, bool]:
        pipe = make_pipe(make())
        with torch.inference_mode():
            loss = pipe.eval(*rows(), loss_fn=F.mse_loss).item()
        pipe.step(*rows(), loss_fn=F.mse_loss)  # which trains afterwards
        return loss, all(grad is not None for grad in grads_of(pipe).values())

    expected = F.mse_loss(make()(rows()[0]), rows()[1]).item()
    for loss, has_grads in sm.simulate(2)(program)():
        assert loss == pytest.approx(expected, abs=1e-12)
        assert has_grads


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 2), ("zb_h1", 4), ("dualpipe_v", 4)])
def test_keyword_arguments_of_all_stages(schedule: str, stages: int) -> None:
    """torch passes keyword arguments to each stage as well, and chunks them."""

    def program() -> dict[str, Tensor | None]:
        pipe = make_pipe(make(), schedule, stages)
        x, target = rows()
        pipe.step(x, target, loss_fn=F.mse_loss, scale=x.abs())
        return grads_of(pipe)

    model = make()
    x, target = rows()
    F.mse_loss(model(x, scale=x.abs()), target).backward()
    check_grads(sm.simulate(2)(program)(), model)


def test_results_that_are_tuples() -> None:
    def loss_fn(results: Any, target: Tensor) -> Tensor:
        x, skip, count = results
        return F.mse_loss(x + skip * count[:, None], target)

    def program() -> dict[str, Tensor | None]:
        pipe = make_pipe(make(TwoResults), "zb_v", 4)
        pipe.step(*rows(), loss_fn=loss_fn)
        return grads_of(pipe)

    model = make(TwoResults)
    loss_fn(model(rows()[0]), rows()[1]).backward()
    check_grads(sm.simulate(2)(program)(), model)


def test_losses_of_microbatches() -> None:
    """In place of `losses=[]`: what the loss function returns, seen by the program."""

    def program() -> tuple[float, list[float]]:
        losses: list[float] = []

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss = F.mse_loss(output, target)
            losses.append(loss.item())
            return loss

        pipe = make_pipe(make())
        return pipe.step(*rows(), loss_fn=loss_fn).item(), losses

    (first, none), (last, losses) = sm.simulate(2)(program)()
    parts = zip(*(x.split(2) for x in rows()), strict=True)
    assert none == []
    assert losses == pytest.approx([F.mse_loss(make()(x), y).item() for x, y in parts], abs=1e-12)
    assert first == last == pytest.approx(sum(losses) / 4, abs=1e-12)


@pytest.mark.parametrize("communication", [False, True])
def test_schedule_from_a_file(communication: bool, tmp_path: Path) -> None:
    """torch's `_load_csv` of both formats, and torchtitan's `pipeline_parallel_schedule_csv`."""
    path = tmp_path / "schedule.csv"
    table = [
        ["0F0", "0F1", "2F0", "", "2F1", "2B0", "2I1", "0B0", "2W1", "0B1"],
        ["", "1F0", "1F1", "3F0", "3B0", "3F1", "3I1", "1B0", "3W1", "1B1"],
    ]
    if communication:
        Schedule(table).to_csv(path, communication=True)
        assert "SEND_F" in path.read_text()
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(table)

    def program() -> dict[str, Tensor | None]:
        pipe = make_pipe(make(), Schedule.from_csv(path), 4, microbatches=2)
        pipe.step(*rows(), loss_fn=F.mse_loss)
        return grads_of(pipe)

    model = make()
    F.mse_loss(model(rows()[0]), rows()[1]).backward()
    check_grads(sm.simulate(2)(program)(), model)


def test_stages_of_a_rank_in_any_place() -> None:
    """torch's `test_non_symmetric_stage_ids`: rank 0 has the stages 0 and 3."""
    table = [
        ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"],
        ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"],
    ]

    def program() -> tuple[list[int], dict[str, Tensor | None]]:
        pipe = make_pipe(make(), Schedule(table), 4, microbatches=2)
        pipe.step(*rows(), loss_fn=F.mse_loss)
        return sorted(pipe.stages), grads_of(pipe)

    model = make()
    F.mse_loss(model(rows()[0]), rows()[1]).backward()
    (first, one), (second, other) = sm.simulate(2)(program)()
    assert (first, second) == ([0, 3], [1, 2])
    check_grads([one, other], model)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("frozen", [(0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2)])
def test_frozen_stages(schedule: str, frozen: tuple[int, ...]) -> None:
    """No gradient goes to a stage before which nothing is trained."""

    def freeze(model: Layers) -> Layers:
        for number in frozen:
            model.layers[number].requires_grad_(False)
        return model

    def program() -> dict[str, Tensor | None]:
        pipe = make_pipe(freeze(make()), schedule, 4 if schedule == "zb_h1" else 2)
        pipe.step(*rows(), loss_fn=F.mse_loss)
        return grads_of(pipe)

    model = freeze(make())
    F.mse_loss(model(rows()[0]), rows()[1]).backward()
    check_grads(sm.simulate(2)(program)(), model)


def test_frozen_input_layers_get_no_message() -> None:
    def program() -> int:
        model = make()
        model.layers[:2].requires_grad_(False)
        pipe = make_pipe(model)
        pipe.step(*rows(), loss_fn=F.mse_loss)
        with sm.debug.comm_report() as report:
            pipe.step(*rows(), loss_fn=F.mse_loss)
        return report.by_op["permute"][0]

    assert sm.simulate(2)(program)() == [4, 4]  # the activations


# -- models of test_schedule_multiproc and torchtitan ----------------------------------------------


class ExampleCode(nn.Module):
    """torch's model with parameters and a buffer of its own, between the layers of two stages."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("constant", torch.randn(WIDTH))
        self.linear0 = nn.Linear(WIDTH, WIDTH)
        self.linear1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(torch.mm(x, self.first))
        skip = self.constant.clone()  # a value without gradient, past the boundary
        x = self.linear0(x)
        x = torch.relu(x) + skip
        return torch.relu(self.linear1(torch.mm(x, self.second)))


@pytest.mark.parametrize("has_example", [False, True])
def test_parameters_and_buffers_between_layers(has_example: bool) -> None:
    def model() -> ExampleCode:
        torch.manual_seed(4)
        return ExampleCode().double()

    def program() -> dict[str, Tensor | None]:
        example = ((torch.empty(2, WIDTH, dtype=torch.float64, device="meta"),), {})
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        inputs: Any = example if has_example else None
        pipe = pipeline(model(), mesh, split=["linear1"], schedule="zb_h1", example=inputs)
        pipe.step(*rows(), loss_fn=F.mse_loss)
        return grads_of(pipe)

    one = model()
    F.mse_loss(one(rows()[0]), rows()[1]).backward()
    check_grads(sm.simulate(2)(program)(), one)


class Decoder(nn.Module):
    """torchtitan's form of a model: what a stage lacks is None or not in the ModuleDict."""

    embedding: nn.Embedding | None
    head: nn.Linear | None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(4)})
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def part_of(whole: Decoder, layers: range) -> Decoder:
    """Return a stage as torchtitan cuts it: a copy from which the rest is deleted."""
    part = copy.deepcopy(whole)
    part.embedding = part.embedding if 0 in layers else None
    part.head = part.head if 3 in layers else None
    for name in list(part.layers):
        if int(name) not in layers:
            del part.layers[name]
    return part


def test_stages_that_are_cut_by_copies() -> None:
    def model() -> Decoder:
        torch.manual_seed(5)
        return Decoder().double()

    ids = torch.arange(ROWS).view(ROWS, 1) % 9
    targets = ids.flip(0)[:, 0]

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 0], target)

    def program(cut: bool) -> tuple[float, dict[str, Tensor | None]]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        whole = model()
        ranges = [range(number, number + 1) for number in range(4)]
        stages: Any = [part_of(whole, layers) for layers in ranges] if cut else whole
        split = None if cut else ["layers.1", "layers.2", "layers.3"]
        pipe = pipeline(stages, mesh, split=split, schedule="interleaved", microbatches=4)
        loss = pipe.step(ids, targets, loss_fn=loss_fn)
        # of a list, names begin with the number of the stage
        return loss.item(), {n.split(".", 1)[1] if cut else n: g for n, g in grads_of(pipe).items()}

    one = model()
    expected = loss_fn(one(ids), targets)
    expected.backward()
    for cut in (True, False):
        results = sm.simulate(2)(program)(cut)
        assert results[0][0] == pytest.approx(expected.item(), abs=1e-12)
        check_grads([grads for _, grads in results], one)


class LinearForInputs(torch.autograd.Function):
    """A product with a weight whose backward notes what the weight's gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: OwnWeightPart) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.module.deferred.append((grads[0], x))
        return grads[0] @ weight, None, None


class OwnWeightPart(nn.Module):
    """A layer of torch's MultiMLPWithDw, whose weight gradients `dw_builder` computes in W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.deferred: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(LinearForInputs.apply(x, self.weight, self))  # type: ignore[arg-type]

    def compute_weight_grad(self) -> None:
        for grad, x in self.deferred:
            product = grad.t() @ x
            self.weight.grad = product if self.weight.grad is None else self.weight.grad + product
        self.deferred.clear()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_weight_part_of_a_models_own(schedule: str) -> None:
    """torch calls it in W; here the program does, after the step."""

    def layers() -> list[OwnWeightPart]:
        torch.manual_seed(5)
        return [OwnWeightPart().double() for _ in range(4 if schedule == "zb_v" else 2)]

    def program() -> dict[str, Tensor | None]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(layers(), mesh, schedule=schedule)
        pipe.step(*rows(), loss_fn=F.mse_loss)
        for stage in pipe.stages.values():
            for module in stage.modules():
                if isinstance(module, OwnWeightPart):
                    module.compute_weight_grad()
        return grads_of(pipe)

    one = nn.Sequential(*layers())
    F.mse_loss(one(rows()[0]), rows()[1]).backward()
    for layer in one:
        layer.compute_weight_grad()  # type: ignore[operator]
    check_grads(sm.simulate(2)(program)(), one)


# -- test_microbatch -------------------------------------------------------------------------------


def test_rows_that_do_not_divide() -> None:
    """As `torch.tensor_split`, also in torch; the mean is still that of all rows."""

    def program() -> tuple[list[int], dict[str, Tensor | None]]:
        sizes: list[int] = []

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            sizes.append(len(output))
            return F.mse_loss(output, target)  # a mean, weighed by its rows

        pipe = make_pipe(make(), microbatches=5)
        pipe.step(*rows(), loss_fn=loss_fn)
        return sizes, grads_of(pipe)

    model = make()
    F.mse_loss(model(rows()[0]), rows()[1]).backward()
    by_rank = sm.simulate(2)(program)()
    assert by_rank[1][0] == [2, 2, 2, 1, 1]
    check_grads([grads for _, grads in by_rank], model)


def test_chunks_of_another_dim_are_given_as_lists() -> None:
    """In place of `TensorChunkSpec(1)`."""

    def program() -> dict[str, Tensor | None]:
        pipe = make_pipe(make(), microbatches=2)
        x, target = (value.view(2, 4, WIDTH) for value in rows())
        pipe.step(list(x.split(2, 1)), list(target.split(2, 1)), loss_fn=F.mse_loss)
        return grads_of(pipe)

    model = make()
    F.mse_loss(model(rows()[0]), rows()[1]).backward()
    check_grads(sm.simulate(2)(program)(), model)


# -- test_stage and test_backward ------------------------------------------------------------------


def test_inputs_that_require_gradients_get_none() -> None:
    """The first stage computes no gradient of the batch, in torch and here."""

    def program() -> tuple[bool, dict[str, Tensor | None]]:
        pipe = make_pipe(make(), "zb_h1")
        x, target = rows()
        pipe.step(x, target, loss_fn=F.mse_loss)
        return x.grad is None, grads_of(pipe)

    model = make()
    F.mse_loss(model(rows()[0]), rows()[1]).backward()
    results = sm.simulate(2)(program)()
    assert all(is_none for is_none, _ in results)
    check_grads([grads for _, grads in results], model)


def test_arguments_that_the_model_does_not_take() -> None:
    def program() -> str:
        with pytest.raises(TypeError) as raised:
            make_pipe(make()).step((*rows(), 1, 2), rows()[1], loss_fn=F.mse_loss)
        return str(raised.value)

    first, second = sm.simulate(2)(program)()
    assert first == second
    assert "forward() takes" in first


def test_a_schedule_of_other_microbatches_than_the_batch() -> None:
    def program() -> str:
        pipe = make_pipe(make(), make_schedule("1f1b", 2, 4))
        with pytest.raises(ValueError, match="microbatches") as raised:
            pipe.step(list(rows()[0].split(4)), list(rows()[1].split(4)), loss_fn=F.mse_loss)
        return str(raised.value)

    first, second = sm.simulate(2)(program)()
    assert first == second
    assert "is for 4 microbatches, not 2" in first
