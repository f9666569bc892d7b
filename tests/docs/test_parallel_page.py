"""docs/parallel.md: its programs and that of docs/from_fsdp2.md run, the rows of its tables are the
named forms, and its formulas give their costs.
"""

from __future__ import annotations

import copy
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
import shardmesh.compat
import shardmesh.parallel
from shardmesh import P
from shardmesh.parallel import MixedPrecisionPolicy, data_parallel, fully_shard, parallelize
from shardmesh.sharding.parallel.data.unit import units_in
from tests.device import DEVICE, on_device
from tests.docs.pages import DOCS, blocks, unknown_names
from tests.sharding.parallel import models
from tests.sharding.parallel.plans import on_axes
from tests.sharding.ranks import collectives

PAGE = (DOCS / "parallel.md").read_text()
PROGRAMS = blocks(PAGE, "python") + blocks((DOCS / "from_fsdp2.md").read_text(), "python")
NAMES = vars(shardmesh.parallel) | {"torch": torch, "sm": sm}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading."""
    lines = PAGE.split(f"{heading}\n", 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    table = lines[first + 1 :]
    until = next((i for i, line in enumerate(table) if not line.startswith("|")), len(table))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[:until]]


def test_names():
    assert unknown_names(PAGE) == []


# -- programs --------------------------------------------------------------------------------------


class TanhResidual(nn.Module):
    """A small model for the programs that name none: two matrices."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        return x + self.wo(torch.tanh(self.wq(x)))


def _program(words: str) -> str:
    (program,) = [block for block in PROGRAMS if words in block]
    return program.replace('"cuda"', f'"{DEVICE}"')


def _run(words: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(_program(words), "docs/parallel.md", "exec"), names)
    return names


def _ranks(count: int, program: Any) -> list[Any]:
    def rank() -> Any:
        with on_device():
            return program()

    return sm.simulate(count)(rank)()


def test_first_program():
    """Also runs the programs with sharded inputs and with microbatches, with its results."""

    def program():
        names: dict[str, Any] = {}
        plain = _run("class Block", names)["loss"]
        assert names["logits"].spec == P(None, None, "tp")
        assert torch.isfinite(plain)
        assert names["model"][1].up.weight.spec.dims[0] == ("tp", "fsdp")
        total = _run("make_array_from_process_local_data(mesh, sm.P", names)["loss"]
        assert names["logits"].spec == P("fsdp", None, "tp")
        mesh, batch = names["mesh"], names["batch"]
        with torch.no_grad():
            ids = names["ids"]
            own = F.cross_entropy(names["model"](ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        mean = sm.from_local(own.to_local().reshape(1), mesh, P("fsdp")).mean()
        torch.testing.assert_close(total.full_tensor(), mean.full_tensor())

        def loss(model, batch):
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        before = names["model"][1].up.weight.full_tensor().detach().clone()
        _run(
            "accumulate_grads", NAMES | names | {"micro_batches": [batch, batch + 0], "loss": loss}
        )
        return (names["model"][1].up.weight.full_tensor() - before).abs().max().item()

    assert min(_ranks(8, program)) > 0


PORTS = {
    "DDP(model)": "data_parallel(model, mesh)  ",
    "fully_shard(block, mesh=mesh)": "units=Block)\noptimizer",
}


def _trained_by(words: str) -> list[torch.Tensor]:
    """Return the parameters after a program of the page on a real rank, with different rows on each
    rank.
    """
    torch.manual_seed(0)
    model = nn.Sequential(TanhResidual(), TanhResidual()).double()
    rows = torch.arange(64.0, dtype=torch.float64).reshape(2, 4, 8).cos()
    loader = [batch[dist.get_rank()][None] for batch in rows]
    _run(words, NAMES | {"model": model, "Block": TanhResidual, "loader": loader})
    return [
        x.full_tensor().detach() if hasattr(x, "full_tensor") else x.detach()
        for x in model.parameters()
    ]


@pytest.mark.parametrize("theirs", PORTS)
def test_torch_script_and_its_port(theirs, world4):
    expected, found = world4(_trained_by, theirs), world4(_trained_by, PORTS[theirs])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=0)


def test_program_with_units():
    def program():
        mesh = sm.init_device_mesh(DEVICE, (3,), axis_names=("fsdp",))
        model = nn.Sequential(TanhResidual(), TanhResidual())
        _run(
            "units=Block)            #",
            NAMES | {"model": model, "mesh": mesh, "Block": TanhResidual},
        )
        return len(units_in(model))

    assert _ranks(3, program) == [3, 3, 3]


def test_program_with_compiled_blocks():
    def program():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("fsdp",))
        model = nn.Module()
        model.blocks = nn.ModuleList([TanhResidual(), TanhResidual()])
        _run(
            "block.compile(fullgraph=True)",
            NAMES | {"model": model, "mesh": mesh, "Block": TanhResidual},
        )
        model.blocks[0](torch.ones(2, 8)).sum().backward()
        return len(units_in(model)), model.blocks[0].wq.weight.grad is not None

    torch.compiler.reset()
    assert _ranks(2, program) == [(3, True)] * 2


def test_ragged_rows():
    """w_1 [5, 4] and w_2 [7, 4] on 3 ranks."""
    shown = re.findall(r"w_\d \[(\d), 4\]: (P\(.*?\)}\))", PAGE)
    assert len(shown) == 2

    def program():
        mesh = sm.init_device_mesh(DEVICE, (3,), axis_names=("fsdp",))
        model = nn.Sequential(*[nn.Linear(4, int(rows), bias=False) for rows, _ in shown])
        fully_shard(model, mesh)
        return [x.spec.cuts[0] for x in model.parameters()]

    assert _ranks(3, program)[0] == [eval(spec).cuts[0] for _, spec in shown]


def test_plan():
    config = models.Config()
    inputs, targets = models.tokens()
    expected = models.loss_of(models.gpt(config).to(DEVICE)(inputs), targets)

    def program(mesh):
        model = models.gpt(config).to(DEVICE)
        _run("PLAN", NAMES | {"mesh": mesh, "heads": config.heads, "model": model})
        placed = [sm.device_put(x, mesh, P("fsdp"), src_data_rank=None) for x in (inputs, targets)]
        logits = model(placed[0])
        assert logits.spec.dims[2] == ("tp",)
        torch.testing.assert_close(
            models.loss_of(logits, placed[1]).full_tensor(), expected, rtol=1e-12, atol=0
        )

    on_axes((2, 2), ("fsdp", "tp"), program)


class NormAndHead(nn.Module):
    """A model with the names of the program in torch's form."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TanhResidual(), TanhResidual()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_program_in_the_form_of_fsdp2():
    def program():
        torch.manual_seed(0)
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("fsdp",))
        model, expected = NormAndHead().double(), NormAndHead().double()
        expected.load_state_dict(model.state_dict())
        batches = torch.randn(3, 4, 8, dtype=torch.float64)
        names = {"model": model, "mesh": mesh, "loss": lambda m, x: m(x).square().mean()}
        with collectives() as records:
            _run(
                "set_requires_gradient_sync",
                names | {"micro_batches": list(batches.chunk(2, 1)[mesh.get_rank()])},
            )
        assert [record.op for record in records].count(
            "reduce_scatter"
        ) == 3  # two blocks, and the norm with the head
        sum(expected(x).square().mean() for x in batches).backward()
        for x, y in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=1e-12, atol=1e-14)

    _ranks(2, program)


def test_program_with_context_parallelism():
    inputs, _ = models.tokens()
    expected = models.gpt().to(DEVICE)(inputs).square().mean()

    def program(mesh):
        model = parallelize(models.gpt().to(DEVICE), mesh, {}, src_data_rank=None)
        ids = sm.device_put(inputs, mesh, P(None, "cp"), src_data_rank=None)
        with collectives() as records:
            found = _run(
                "context_parallel(",
                NAMES | {"model": lambda ids: model(ids).square().mean(), "ids": ids},
            )["loss"]
        assert {record.op for record in records} == {"permute"}
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=0)

    on_axes((4,), ("cp",), program)


def test_programs_with_hugging_face_models(tmp_path):
    tiny = pytest.importorskip(
        "tests.models.tiny", reason="transformers is not installed", exc_type=ImportError
    )
    reference = tiny.model("llama")
    reference.save_pretrained(tmp_path)
    expected = reference(input_ids=tiny.IDS, labels=tiny.IDS).loss.detach()
    auto = SimpleNamespace(
        from_pretrained=lambda _: tiny.model("llama"), from_config=lambda _: tiny.llama().double()
    )

    def program(mesh):
        names = NAMES | {
            "P": P,
            "mesh": mesh,
            "AutoModelForCausalLM": auto,
            "name": "",
            "config": None,
            "ids": tiny.IDS,
        }
        loss = _run("gradient_checkpointing_enable()", dict(names))["loss"]
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-6, atol=0)
        code = _program("materialize(model)").replace("llama/", str(tmp_path))
        exec(compile(code, "docs/parallel.md", "exec"), names)
        ids = sm.device_put(tiny.IDS, mesh, P("fsdp"))
        torch.testing.assert_close(
            names["model"](input_ids=ids, labels=ids).loss.full_tensor(),
            expected,
            rtol=1e-6,
            atol=0,
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing_enable", FutureWarning)
        on_axes((2, 2), ("fsdp", "tp"), program)


class Routed(nn.Module):
    """The model of the program with a style of its own: an MLP whose output a router scales."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(d, 1), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return torch.sigmoid(self.router(x)) * self.down(torch.tanh(self.up(x)))


def test_program_with_a_style_of_its_own():
    torch.manual_seed(0)
    whole, x = Routed().double(), torch.randn(3, 8, dtype=torch.float64)
    whole(x).square().sum().backward()

    def program(mesh):
        model = copy.deepcopy(whole).to(DEVICE)
        model.zero_grad()
        _run("class NoParallel(ParallelStyle)", vars(sm.compat) | {"mesh": mesh, "model": model})
        y = model(x.to(DEVICE))
        torch.testing.assert_close(y.cpu(), whole(x), rtol=1e-12, atol=1e-12)
        y.square().sum().backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().cpu(), q.grad, rtol=1e-12, atol=1e-12)

    on_axes((2,), ("tp",), program)


def test_programs_with_penalties_and_losses():
    def program():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        model = fully_shard(TanhResidual(), mesh)
        rows, labels = torch.randn(4, 8), torch.arange(4)
        names = {"model": model, "rows": rows, "labels": labels, "criterion": F.cross_entropy}
        _run("penalty = sum", NAMES | names)
        assert all(torch.isfinite(p.grad.full_tensor()).all() for p in model.parameters())

        class DiceLoss(nn.CrossEntropyLoss):
            def __init__(self):
                super().__init__(weight=torch.arange(8.0))

        images, classes = (sm.device_put(x, mesh, P("dp")) for x in (rows, labels))
        names = {"model": model, "images": images, "labels": classes, "DiceLoss": DiceLoss}
        names = _run("criterion = parallelize", NAMES | names | {"mesh": mesh})
        expected = names["criterion"](names["model"](images), classes)
        torch.testing.assert_close(names["loss"].full_tensor(), expected.full_tensor())

    _ranks(2, program)


def test_program_with_metrics():
    torchmetrics = pytest.importorskip("torchmetrics")

    def program():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        labels = sm.device_put(torch.arange(4), mesh, P("dp"))
        logits = F.one_hot(labels, 10).float()
        names = {"torchmetrics": torchmetrics, "logits": logits, "labels": labels}
        accuracy = _run("torchmetrics.Accuracy", NAMES | names)["accuracy"]
        assert float(accuracy.compute()) == 1

    _ranks(2, program)


@pytest.mark.parametrize("axis", ["ep", "fsdp", "cp"])
def test_program_with_experts_of_transformers(axis):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )

    def model_of():
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config).to(DEVICE).eval()

    tokens = torch.arange(24, device=DEVICE).view(4, 6)
    expected = model_of()(tokens).logits

    def program():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=(axis,))
        model = model_of()
        words = 'register_moe("ep")' if axis == "ep" else "register_moe(None)"
        names = NAMES | {"P": P, "model": model, "mesh": mesh}
        _run(words, names)
        if axis == "cp":
            _run("token_wise(", names)
            ids = sm.device_put(tokens, mesh, P(None, axis))
            ring = shardmesh.parallel.context_parallel(axis, method="ring")
            with ring, sm.debug.comm_report() as report:
                logits = model(ids).logits
            assert "view" not in report.by_operator, report
        else:
            logits = model(sm.device_put(tokens, mesh, P(axis))).logits
        torch.testing.assert_close(logits.full_tensor(), expected, rtol=1e-4, atol=1e-5)

    _ranks(2, program)


def test_names_of_the_page_about_fsdp2():
    assert {"colwise", "fully_shard"} <= _run("import colwise, data_parallel", {}).keys()


def test_every_program_is_run():
    assert len(PROGRAMS) == 23


# -- the table of forms ----------------------------------------------------------------------------


def _axes(cell: str, mesh: sm.DeviceMesh) -> tuple[str, ...]:
    given = eval(cell.strip("`")) if cell != "both" else mesh.axis_names
    return (given,) if isinstance(given, str) else given


@pytest.mark.parametrize("row", rows("## Data parallelism: one table"), ids=lambda row: row[3])
def test_rows_are_the_named_forms(row):
    names = ("dp", "fsdp") if "fsdp" in "".join(row[:3]) else ("dp",)
    programs = [code for code in re.findall(r"`(.*?)`", row[4]) if code.endswith(")")]
    assert programs

    def program(mesh):
        for code in programs:
            model = nn.Linear(8, 8)
            eval(code, NAMES | {"model": model, "mesh": mesh})
            form = units_in(model)[0].plan.options.stage
            found = form.parameter, form.gradient, form.optimizer
            assert [set(axes) for axes in found] == [set(_axes(cell, mesh)) for cell in row[:3]]

    on_axes((2, 2)[: len(names)] if len(names) == 2 else (4,), names, program)


# -- what a row costs ------------------------------------------------------------------------------

D, WIDE, BLOCKS, M = 8, 16, 3, 2
BLOCK_SIZE, ROOT_SIZE = 2 * D * WIDE, D * D  # each cut falls between two rows, so nothing is lost
ALL = BLOCKS * BLOCK_SIZE + ROOT_SIZE
BYTES = {"p": 2, "g": 4, "q": 8}  # of an element: as gathered, as summed, as it is
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _model():
    return nn.Sequential(
        nn.Linear(D, D, bias=False), *[TanhResidual(D) for _ in range(BLOCKS)]
    ).double()


BY_ROW = {
    "DDP": ((4,), {}),
    "ZeRO-1": ((4,), {"optimizer": "dp"}),
    "ZeRO-2": ((4,), {"optimizer": "dp", "gradient": "dp"}),
    "FSDP": ((4,), {"axes": "dp"}),
    "FSDP, `reshard_after_forward=False`": ((4,), {"axes": "dp", "reshard_after_forward": False}),
    "FSDP, gradients whole": ((4,), {"parameter": "dp", "optimizer": "dp"}),
    "HSDP, n = fsdp": ((2, 2), {"axes": "fsdp"}),
    "hpZ, n = dp fsdp": (
        (2, 2),
        {"parameter": "fsdp", "optimizer": ("dp", "fsdp"), "gradient": ("dp", "fsdp")},
    ),
}
COSTS = {row[0]: row[1:] for row in rows("### What a row costs")}


def _split(model: nn.Module, mesh: sm.DeviceMesh, said: dict[str, Any]) -> nn.Module:
    layer: Any = fully_shard if "axes" in said else data_parallel
    return layer(model, mesh, units=TanhResidual, mp_policy=HALF, **said)


def _gathered(model: nn.Module) -> int:
    """Return the bytes of gathered parameters on this rank, present or in flight."""
    levels = [bucket.storage for unit in units_in(model) for bucket in unit.plan.buckets]
    coming = [
        one.flat.layout.parts * one.flat.layout.piece * BYTES["p"]
        for one in levels
        if one._pending is not None
    ]
    return sum(held.nbytes for one in levels for _, held in one._copies.values()) + sum(coming)


def _gradients(model: nn.Module) -> int:
    waiting = [
        bucket.deferred
        for unit in units_in(model)
        for bucket in unit.plan.buckets
        if bucket.deferred is not None
    ]
    return sum(x._local.grad.nbytes for x in model.parameters() if x._local.grad is not None) + sum(
        x.nbytes for x in waiting
    )


def _measured(mesh: sm.DeviceMesh, said: dict[str, Any]) -> dict[str, Any]:
    """Measure the second of two steps, of M microbatches each."""
    model, seen, while_accumulating = _split(_model(), mesh, said), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    at_rest = sum(x._local.nbytes for x in model.parameters())

    def look(*_):
        seen.append(_gathered(model))

    for block in model[1:]:
        block.wo.register_forward_hook(lambda _, __, out: (look(), out.register_hook(look))[0])
    for _ in range(2):
        with collectives() as records, sm.accumulate_grads():
            for _ in range(M):
                model(
                    torch.ones(2, D, dtype=torch.float64) * (1 + mesh.get_rank())
                ).square().mean().backward()
                while_accumulating = _gradients(model)
        gradients = sum(x.grad._local.nbytes for x in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "gathered": sum(r.bytes_received for r in records if r.op == "all_gather"),
        "summed": sum(
            r.bytes_received for r in records if r.op in ("reduce_scatter", "all_reduce")
        ),
        "parameters": (at_rest + _gathered(model), at_rest + max(seen)),
        "gradients": (while_accumulating, gradients),
        "optimizer state": sum(
            x._local.nbytes for state in optimizer.state.values() for x in state.values() if x.ndim
        ),
    }


def _number(formula: str, names: dict[str, float]) -> float:
    """Evaluate a formula as written on the page: adjacent letters are multiplied."""
    return eval(re.sub(r"(?<=[\w)]) +(?=[\w(])", " * ", formula), dict(names))


def _cell(row: str, column: int) -> str:
    return (
        COSTS[row][column]
        .replace("as FSDP, and", f"{COSTS['FSDP'][column]} +")
        .replace("as FSDP", COSTS["FSDP"][column])
    )


@pytest.mark.parametrize("row", BY_ROW)
def test_formulas_give_the_cost_of_a_row(row):
    shape, said = BY_ROW[row]
    n = 2 if row.startswith("HSDP") else 4
    names = {letter: size * ALL for letter, size in BYTES.items()} | {
        "n": n,
        "m": M,
        "dp": 2,
        "fsdp": 2,
        "o": ROOT_SIZE / ALL,
    }
    names["u"] = BYTES["p"] * (ROOT_SIZE + 2 * BLOCK_SIZE)
    gathered, summed, parameters, gradients, state = (_cell(row, column) for column in range(5))
    for found in on_axes(shape, ("dp", "fsdp")[: len(shape)], lambda mesh: _measured(mesh, said)):
        assert found["gathered"] == _number(gathered, names)
        assert found["summed"] == _number(summed, names)
        assert found["optimizer state"] == _number(state, names)
        while_accumulating, _, at_last = gradients.partition(
            " while microbatches accumulate, then "
        )
        assert found["gradients"] == (
            _number(while_accumulating, names),
            _number(at_last or while_accumulating, names),
        )
        between, _, in_use = parameters.partition("; in use + ")
        assert found["parameters"][0] == _number(between, names)
        assert found["parameters"][1] <= _number(between, names) + (
            _number(in_use, names) if in_use else 0
        )


def test_every_row_is_measured():
    assert set(COSTS) == set(BY_ROW)


PLACEMENTS = rows("### What a pipeline costs")
PIPELINES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb_h1", 1),
    ("interleaved", 2),
    ("looped_bfs", 3),
    ("zb_h1", 2),
    ("zb_v", 2),
    ("v_half", 2),
    ("v_min", 2),
    ("dualpipe_v", 2),
]


@pytest.mark.parametrize(("schedule", "stages"), PIPELINES)
def test_formulas_give_the_bytes_of_a_pipeline(schedule, stages):
    microbatches, rows_of_each = 8, 3
    numbered = [row for row in PLACEMENTS if f"`{schedule}`" in row[0]]
    (formulas,) = [row[1:] for row in numbered if ("with v" in row[0]) == (stages > 1)] or [
        numbered[0][1:]
    ]
    names = {"m": microbatches, "a": 8 * D * rows_of_each, "v": stages}

    def program(mesh):
        count = mesh.size() * stages
        model = nn.Sequential(*[nn.Linear(D, D) for _ in range(count)]).double()
        pipe = sm.parallel.pipeline(
            model,
            mesh,
            split=[str(unit) for unit in range(1, count)],
            schedule=sm.parallel.make_schedule(
                schedule, mesh.size(), microbatches, stages_per_rank=stages
            ),
            microbatches=microbatches,
        )
        x = torch.ones(microbatches * rows_of_each, D, dtype=torch.float64)
        pipe.step(x, x, loss_fn=F.mse_loss)
        with collectives() as records:
            pipe.step(x, x, loss_fn=F.mse_loss)
        messages = [record.bytes_received for record in records if record.op == "permute"]
        others = [record.bytes_received for record in records if record.op != "permute"]
        return sum(messages), others

    by_rank = on_axes((4,), ("pp",), program)
    expected = [_number(formulas[min(rank, 1) + (rank == 3)], names) for rank in range(4)]
    assert [messages for messages, _ in by_rank] == expected
    assert all(others == [24] for _, others in by_rank)


def test_every_schedule_has_a_row():
    named = {name for row in PLACEMENTS for name in re.findall(r"`(.*?)`", row[0])}
    assert named == {name for name, _ in PIPELINES}
