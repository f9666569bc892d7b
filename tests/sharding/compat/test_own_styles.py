"""Styles of a program's own, in the forms that trainers write them for
`torch.distributed.tensor.parallel`.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn import functional as F

import shardmesh as sm
from shardmesh.compat import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    ParallelStyle,
    Partial,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_module,
    distribute_tensor,
    parallelize_module,
)
from tests.pool import Pool
from tests.sharding.ranks import every_rank

WIDTH, HIDDEN, EXPERTS, TOKENS = 4, 8, 4, 8

# -- styles ----------------------------------------------------------------------------------------


class NoParallel(ParallelStyle):
    """Parameters, input and output replicated, so that a module works beside sharded ones."""

    def __init__(
        self, *, input_layout: Any = None, output_layout: Any = None, use_local_output: bool = True
    ) -> None:
        super().__init__()
        self.input_layout = input_layout or Replicate()
        self.output_layout = output_layout or Replicate()
        self.desired_input_layout = Replicate()
        self.use_local_output = use_local_output

    @staticmethod
    def _prepare_input_fn(
        input_layout: Any, desired_input_layout: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        assert isinstance(mod, nn.Module)
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, (input_layout,), run_check=False)
        if x.placements != (desired_input_layout,):
            x = x.redistribute(placements=(desired_input_layout,), async_op=True)
        return (x, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layout: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        assert isinstance(mod, nn.Module)
        if outputs.placements != (output_layout,):
            outputs = outputs.redistribute(placements=(output_layout,), async_op=True)
        return outputs.to_local() if use_local_output else outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            None,
            partial(self._prepare_input_fn, self.input_layout, self.desired_input_layout),
            partial(self._prepare_output_fn, self.output_layout, self.use_local_output),
        )


class TensorParallelExperts(ParallelStyle):
    """The hidden size of all experts split, on plain tensors inside."""

    def _prepare_input_fn(self, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        x, counts = inputs
        x = DTensor.from_local(x, device_mesh, (Replicate(),)).to_local(
            grad_placements=(Partial(),)
        )
        return x, counts

    def _partition_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        for weight, dim in (("w1", 1), ("w2", 2)):
            sharded = distribute_tensor(getattr(module, weight), device_mesh, [Shard(dim)])
            module.register_parameter(weight, nn.Parameter(sharded))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition_fn, self._prepare_input_fn)


class BaseExpertParallel(ParallelStyle, ABC):
    @abstractmethod
    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: Any) -> None: ...

    @abstractmethod
    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: Any) -> Any: ...

    @abstractmethod
    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: Any) -> Tensor: ...


class ExpertParallel(BaseExpertParallel):
    """Experts split over the ranks; tokens go to the rank of their expert and back by torch's own
    functional collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input_splits: Any = None
        self.output_splits: Any = None
        self.order: Any = None

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: Any) -> None:
        for param_name, param in mod.named_parameters(recurse=False):
            mod.register_parameter(
                param_name, nn.Parameter(distribute_tensor(param, device_mesh, [Shard(0)]))
            )

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: Any) -> Any:
        x, counts = inputs
        degree = device_mesh.shape[0]
        with torch.no_grad():
            received = all_to_all_single(counts, None, None, group=device_mesh.get_group())
            received = torch.ops._c10d_functional.wait_tensor(received)
            self.input_splits = counts.view(degree, -1).sum(dim=1).tolist()
            self.output_splits = received.view(degree, -1).sum(dim=1).tolist()
        x = all_to_all_single_autograd(
            x, self.output_splits, self.input_splits, device_mesh.get_group()
        )
        # From the order (rank, expert) to (expert, rank).
        experts = torch.arange(counts.numel() // degree).repeat(degree).repeat_interleave(received)
        self.order = torch.argsort(experts, stable=True)
        return x[self.order], received.view(degree, -1).sum(dim=0)

    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: Any) -> Tensor:
        y = torch.empty_like(routed_output).index_copy(0, self.order, routed_output)
        return all_to_all_single_autograd(
            y, self.input_splits, self.output_splits, device_mesh.get_group()
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partition_fn=self._partition_fn,
            input_fn=self._token_dispatch,
            output_fn=self._token_combine,
        )


class ExpertTensorParallel(ExpertParallel):
    """Experts over "ep", their hidden size over "etp"; the style has the mesh of both."""

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: Any) -> Any:
        x, counts = inputs
        x = DTensor.from_local(x, device_mesh["etp"], (Replicate(),)).to_local(
            grad_placements=(Partial(),)
        )
        return super()._token_dispatch(mod, (x, counts), device_mesh["ep"])

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: Any) -> None:
        for weight, dim in (("w1", 1), ("w2", 2)):
            sharded = distribute_tensor(getattr(mod, weight), device_mesh, [Shard(0), Shard(dim)])
            mod.register_parameter(weight, nn.Parameter(sharded))

    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: Any) -> Tensor:
        return super()._token_combine(mod, routed_output, device_mesh["ep"])


class ReordererSequenceParallel(ParallelStyle):
    """Each rank routes some of the tokens."""

    def _prepare_inputput_fn(self, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        scores, indices = inputs
        count = scores.shape[0] // device_mesh.size()
        start = device_mesh.get_local_rank() * count
        return scores[start : start + count], indices[start : start + count]

    def _prepare_output_fn(self, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        scores, positions, counts = outputs
        return scores, positions + scores.shape[0] * device_mesh.get_local_rank(), counts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partition_fn=None,
            input_fn=self._prepare_inputput_fn,
            output_fn=self._prepare_output_fn,
        )


class ColwiseParallelWithGradPlacement(ColwiseParallel):
    """Torch's style with an argument of its own for the input hook."""

    def __init__(self, *, grad_placements: Any, **options: Any) -> None:
        super().__init__(**options)
        self.grad_placements = grad_placements
        self.calls: list[str] = []

    @staticmethod
    def _prepare_input_fn(
        grads: Any, layouts: Any, desired: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:  # type: ignore[override]
        x = DTensor.from_local(
            inputs[0], device_mesh, layouts, run_check=False, grad_placements=grads
        )
        return x.redistribute(placements=desired, async_op=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.calls.append(type(module).__name__)
        return distribute_module(
            module,
            device_mesh,
            self._partition_linear_fn,
            partial(
                self._prepare_input_fn,
                self.grad_placements,
                self.input_layouts,
                self.desired_input_layouts,
            ),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


# -- modules ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        w1, w2 = ((w.to_local() if isinstance(w, DTensor) else w) for w in (self.w1, self.w2))
        parts = x.split(counts.tolist())
        return torch.cat([F.silu(part @ w1[i].T) @ w2[i].T for i, part in enumerate(parts)])


class Reorderer(nn.Module):
    def forward(self, scores: Tensor, indices: Tensor) -> Any:
        positions = torch.argsort(indices.view(-1), stable=True)
        counts = torch.bincount(indices.view(-1), minlength=EXPERTS)
        return scores.view(-1)[positions], positions, counts


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.reorderer = Reorderer()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        scores, indices = F.softmax(self.gate(x), -1).max(-1)
        scores, positions, counts = self.reorderer(scores, indices)
        routed = self.experts(x[positions], counts) * scores[:, None]
        return torch.zeros_like(x).index_add(0, positions, routed)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * torch.sigmoid(self.gate(x))


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make().double()


def inputs() -> Tensor:
    return torch.randn(
        TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and of all parameters, whole."""
    y = model(x)
    y.square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [z.full_tensor() if isinstance(z, DTensor) else z for z in [y.detach(), *grads]]


def check(model: nn.Module, expected: nn.Module) -> None:
    for one, other in zip(
        step(model, inputs()), step(copy.deepcopy(expected), inputs()), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# -- tests -----------------------------------------------------------------------------------------


@every_rank(2)
def test_own_styles_in_a_plan_beside_ours(mesh: sm.DeviceMesh) -> None:
    plan = {"gate": NoParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(seeded(MLP), mesh, plan)
    assert model.gate.weight.placements == (Replicate(),)
    assert model.up.weight.placements == (Shard(0),)
    assert not isinstance(model.norm.weight, DTensor)
    del model.norm
    expected = seeded(MLP)
    del expected.norm
    check(model, expected)


@every_rank(2)
def test_an_own_style_alone(mesh: sm.DeviceMesh) -> None:
    replacement = nn.Linear(1, 1)

    class Replacing(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            assert device_mesh is mesh
            assert self.src_data_rank == 1
            return replacement

    class Broken(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> Any:
            return None

    assert parallelize_module(nn.Linear(2, 2), mesh, Replacing(), src_data_rank=1) is replacement
    with pytest.raises(TypeError, match="_apply must return the module, got None"):
        parallelize_module(nn.Linear(2, 2), mesh, Broken())
    with pytest.raises(TypeError, match="abstract"):
        type("Empty", (ParallelStyle,), {})()
    linear = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    model = parallelize_module(copy.deepcopy(linear), mesh, NoParallel(use_local_output=False))
    assert isinstance(model(inputs()), DTensor)
    with pytest.raises(ValueError, match="matches no module"):
        parallelize_module(nn.Linear(2, 2), mesh, {"absent": NoParallel()})


@every_rank(2, 2)
def test_own_styles_in_a_plan_of_parallelize(mesh: sm.DeviceMesh) -> None:
    """The style has the whole mesh, and its module's parameters are its own to lay out; all others
    are replicated.
    """
    seen = []

    class Experts2D(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            seen.append((device_mesh, [isinstance(p, DTensor) for p in module.parameters()]))
            placed = distribute_tensor(module.w1, device_mesh, [Shard(0), Shard(1)])
            module.register_parameter("w1", nn.Parameter(placed))
            return module

    plan = {"experts": Experts2D(), "gate": sm.parallel.colwise(axis="b")}
    model = sm.parallel.parallelize(seeded(Mixture), mesh, plan)
    assert seen == [(mesh, [False, False])]
    assert model.experts.w1.placements == (Shard(0), Shard(1))
    assert not isinstance(model.experts.w2, DTensor)
    assert model.gate.weight.placements == (Replicate(), Shard(0))


@every_rank(2)
def test_layouts_of_own_styles(mesh: sm.DeviceMesh) -> None:
    """Inputs that are split and results that are asked for split, with asynchronous redistribution
    in the hooks.
    """
    linear = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    model = parallelize_module(
        copy.deepcopy(linear), mesh, NoParallel(input_layout=Shard(0), output_layout=Shard(0))
    )
    x = inputs().detach()
    start = mesh.get_local_rank() * TOKENS // 2
    part = x[start : start + TOKENS // 2].clone().requires_grad_()
    y = model(part)
    torch.testing.assert_close(y, linear(x)[start : start + TOKENS // 2], rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    linear(x).square().sum().backward()
    torch.testing.assert_close(
        model.weight.grad.full_tensor(), linear.weight.grad, rtol=1e-12, atol=1e-12
    )


@every_rank(2)
def test_experts_split_by_hidden_size(mesh: sm.DeviceMesh) -> None:
    model = seeded(Mixture)
    parallelize_module(model, mesh, {"experts": TensorParallelExperts()})
    assert [w.placements for w in (model.experts.w1, model.experts.w2)] == [
        (Shard(1),),
        (Shard(2),),
    ]
    experts, x = model.experts, inputs()
    counts = torch.tensor([3, 0, 4, 1])
    y = DTensor.from_local(experts(x, counts), mesh, [Partial()]).full_tensor()
    y.square().sum().backward()
    whole, z = seeded(Mixture).experts, inputs()
    expected = whole(z, counts)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    pairs = [
        (x.grad, z.grad),
        (experts.w1.grad.full_tensor(), whole.w1.grad),
        (experts.w2.grad.full_tensor(), whole.w2.grad),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@every_rank(2)
def test_reorderer(mesh: sm.DeviceMesh) -> None:
    reorderer = parallelize_module(Reorderer(), mesh, ReordererSequenceParallel())
    scores, indices = torch.arange(float(TOKENS)), torch.arange(TOKENS) % 3
    top, positions, counts = reorderer(scores, indices)
    assert torch.equal(top, positions.double().float())
    assert sorted(positions.tolist()) == list(
        range(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    )
    assert counts.sum() == 4


@every_rank(2)
def test_subclasses_of_ours(mesh: sm.DeviceMesh) -> None:
    style = ColwiseParallelWithGradPlacement(grad_placements=(Replicate(),))
    model = parallelize_module(
        seeded(MLP), mesh, {"up": style, "down": RowwiseParallel(), "gate": NoParallel()}
    )
    assert style.calls == ["Linear"]
    expected = seeded(MLP)
    for unused in (model, expected):
        del unused.norm
    check(model, expected)

    class Doubled(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
        ) -> Any:
            return 2 * RowwiseParallel._prepare_output_fn(
                output_layouts, use_local_output, mod, outputs, device_mesh
            )

    class ByRows(ColwiseParallel):
        def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
            super()._partition_linear_fn(name, module, device_mesh)
            module.seen = name  # type: ignore[assignment]

    model = parallelize_module(seeded(MLP), mesh, {"up": ByRows(), "down": Doubled()})
    assert model.up.seen == ""
    assert model.up.weight.placements == (Shard(0),)
    plain = seeded(MLP)
    x = inputs()
    y = model.down(F.gelu(model.up(x)))
    torch.testing.assert_close(y, 2 * plain.down(F.gelu(plain.up(x))), rtol=1e-12, atol=1e-12)


def forms() -> list[tuple[str, nn.Module, Any, Any]]:
    split = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    gathered = {"output_layouts": Shard(0), "desired_output_layouts": Replicate()}
    return [
        ("colwise", nn.Linear(WIDTH, HIDDEN), ColwiseParallel, {"output_layouts": Replicate()}),
        (
            "colwise of rows",
            nn.Linear(WIDTH, HIDDEN),
            ColwiseParallel,
            {"input_layouts": Shard(0), "output_layouts": Replicate()},
        ),
        (
            "colwise without bias",
            nn.Linear(WIDTH, HIDDEN, bias=False),
            ColwiseParallel,
            {"output_layouts": Replicate()},
        ),
        ("rowwise", nn.Linear(WIDTH, HIDDEN), RowwiseParallel, {"input_layouts": Replicate()}),
        (
            "sequence",
            nn.LayerNorm(WIDTH),
            SequenceParallel,
            {"sequence_dim": 0, "use_local_output": True},
        ),
        ("input", nn.LayerNorm(WIDTH), PrepareModuleInput, {**split, "use_local_output": True}),
        ("output", nn.LayerNorm(WIDTH), PrepareModuleOutput, gathered),
        (
            "both",
            nn.LayerNorm(WIDTH),
            PrepareModuleInputOutput,
            {
                **split,
                "use_local_input": True,
                "output_layouts": Replicate(),
                "desired_output_layouts": Shard(0),
            },
        ),
    ]


@pytest.mark.parametrize("index", range(len(forms())), ids=[form[0] for form in forms()])
def test_torch_form_equals_ours(index: int) -> None:
    """`_apply` of torch's styles, as subclasses call it, gives the same values and gradients as the
    plan's own way.
    """

    @every_rank(2)
    def program(mesh: sm.DeviceMesh) -> None:
        torch.manual_seed(0)
        _, module, kind, options = forms()[index]
        module = module.double()
        subclass = type(
            "Subclass", (kind,), {"_apply": lambda self, m, mesh: kind._apply(self, m, mesh)}
        )
        results = []
        for style in (kind(**options), subclass(**options)):
            model = parallelize_module(copy.deepcopy(module), mesh, style)
            x = inputs()
            y = model(x)
            y.square().sum().backward()
            grads = [x.grad, *(p.grad for p in model.parameters())]
            results.append(
                [z.full_tensor() if isinstance(z, DTensor) else z for z in [y.detach(), *grads]]
            )
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    program()


@every_rank(2)
def test_embedding_and_kwargs_in_torch_form(mesh: sm.DeviceMesh) -> None:
    class Rows(RowwiseParallel):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return super()._apply(module, device_mesh)

    class Columns(ColwiseParallel):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return super()._apply(module, device_mesh)

    embedding, tokens = nn.Embedding(6, WIDTH), torch.tensor([0, 5, 3])
    for style in (Rows(input_layouts=Replicate()), Columns(output_layouts=Replicate())):
        model = parallelize_module(copy.deepcopy(embedding), mesh, style)
        torch.testing.assert_close(model(tokens), embedding(tokens))
    with pytest.raises(
        NotImplementedError, match=r"Rows._apply is for nn.Linear and nn.Embedding, got LayerNorm"
    ):
        parallelize_module(nn.LayerNorm(2), mesh, Rows())

    class Named(nn.Module):
        def forward(self, x: Any, scale: Any = None) -> Any:
            assert isinstance(x, DTensor)
            assert isinstance(scale, DTensor)
            return x * scale

    class Inputs(PrepareModuleInput):
        def _prepare_input_arg(
            self, input: Any, mesh: Any, input_layout: Any, desired_layout: Any
        ) -> Any:
            seen.append((tuple(input.shape), input_layout, desired_layout))
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    seen: list[Any] = []
    named = {"scale": Replicate()}
    style = Inputs(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        input_kwarg_layouts=named,
        desired_input_kwarg_layouts=named,
    )
    y = parallelize_module(Named(), mesh, style)(torch.ones(2, 3), scale=torch.ones(3))
    assert y.shape == (4, 3)
    assert seen == [((2, 3), Shard(0), Replicate()), ((3,), Replicate(), Replicate())]


@every_rank(2)
def test_a_desired_layout_of_its_own(mesh: sm.DeviceMesh) -> None:
    class Split(ColwiseParallel):
        def __init__(self) -> None:
            super().__init__(output_layouts=Replicate())
            self.desired_input_layouts = (Shard(0),)

    seen = []
    linear = seeded(lambda: nn.Linear(WIDTH, HIDDEN))
    model = parallelize_module(copy.deepcopy(linear), mesh, Split())
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0].placements))
    torch.testing.assert_close(model(inputs()), linear(inputs()), rtol=1e-12, atol=1e-12)
    assert seen == [(Shard(0),)]


@every_rank(1)
def test_hooks_without_the_module(mesh: sm.DeviceMesh) -> None:
    def input_fn(inputs: Any, device_mesh: Any) -> Any:
        return DTensor.from_local(inputs[0], device_mesh, [Replicate()])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = distribute_module(
            nn.Linear(WIDTH, WIDTH),
            mesh,
            input_fn=input_fn,
            output_fn=lambda y, device_mesh: y.to_local(),
        )
    assert [w.category for w in caught if "without the module" in str(w.message)] == [
        FutureWarning
    ] * 2
    assert model(torch.ones(1, WIDTH)).shape == (1, WIDTH)
    with pytest.raises(ValueError, match="input_fn takes 1 arguments"):
        distribute_module(nn.Linear(1, 1), mesh, input_fn=lambda x: x)


@every_rank(2)
def test_asynchronous_handles_are_tensors_when_used(mesh: sm.DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

    def coming() -> Any:
        return x.redistribute(placements=[Replicate()], async_op=True)

    assert coming().placements == (Replicate(),)
    assert coming().to_local().tolist() == list(range(8))
    assert coming().shape == (8,)
    weight = distribute_tensor(torch.ones(8, 2), mesh, [Replicate()])
    assert (coming() @ weight).full_tensor().tolist() == [28, 28]
    assert (2 * coming() + coming()).full_tensor().tolist() == [3 * i for i in range(8)]
    assert torch.add(coming(), 1).full_tensor().tolist() == list(range(1, 9))
    assert F.linear(coming(), weight.t()).full_tensor().tolist() == [28, 28]
    assert coming()[1:3].full_tensor().tolist() == [1, 2]
    with pytest.raises(AttributeError, match="no_such_name"):
        coming().no_such_name


def expert_parallel() -> None:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("ep",))
    model, expected = seeded(Mixture), seeded(Mixture)
    parallelize_module(
        model, mesh, {"experts": ExpertParallel(), "reorderer": ReordererSequenceParallel()}
    )
    assert model.experts.w1.to_local().shape[0] == 1
    count, rank = TOKENS // 4, mesh.get_local_rank()
    x, whole = inputs(), inputs()
    scores, indices = F.softmax(model.gate(x), -1).max(-1)
    top, positions, counts = model.reorderer(scores, indices)
    routed = model.experts(x[positions], counts) * top[:, None]
    out = DTensor.from_local(
        torch.zeros_like(x).index_add(0, positions, routed), mesh, [Partial()]
    ).full_tensor()
    out.square().sum().backward()
    reference = expected(whole)
    reference.square().sum().backward()
    torch.testing.assert_close(out, reference, rtol=1e-12, atol=1e-12)
    for name in ("w1", "w2"):
        sharded = getattr(model.experts, name).grad.full_tensor()
        one = getattr(expected.experts, name).grad
        torch.testing.assert_close(sharded, one, rtol=1e-12, atol=1e-12)
    assert positions.min() >= rank * count
    both = sm.init_device_mesh("cpu", (2, 2), axis_names=("ep", "etp"))
    experts, single = seeded(Mixture).experts, seeded(Mixture).experts
    parallelize_module(experts, both, ExpertTensorParallel())
    tokens = inputs()[2 * both.get_local_rank("ep") :][:2].detach().requires_grad_()
    given = torch.tensor([1, 0, 0, 1])
    y = DTensor.from_local(experts(tokens, given), both["etp"], [Partial()]).full_tensor()
    z = single(tokens.detach(), given)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)


def test_expert_parallel(world4: Pool) -> None:
    world4(expert_parallel)
