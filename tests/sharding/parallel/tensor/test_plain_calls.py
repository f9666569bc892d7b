"""Models under `parallelize` that are called with plain tensors: whole outputs are plain, split
ones take plain targets.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.errors import ReplicaError
from shardmesh.parallel import colwise, fully_shard, parallelize, prepare_outputs, rowwise
from tests.device import DEVICE, on_device
from tests.sharding.ranks import collectives

VOCAB, WIDTH, ROWS, LENGTH = 15, 6, 2, 5  # two ranks hold 8 and 7 logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)))


PLAN = {"*.up": colwise(), "*.down": rowwise()}
SPLIT_LOGITS = {**PLAN, "head": colwise()}
WHOLE_LOGITS = {**PLAN, "head": colwise(out=P())}


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def ids_of(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (2 * ROWS, LENGTH + 1), generator=generator)


def cross_entropy(logits: Any, ids: Tensor) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def distillation(logits: Any, ids: Tensor) -> Any:
    teacher = torch.linspace(-1, 1, VOCAB, dtype=torch.float64) * ids[:, 1:, None]
    return F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="sum") / ids.shape[0]


def masked_mse(logits: Any, ids: Tensor) -> Any:
    target = torch.cos(ids[:, :-1, None] + torch.arange(VOCAB, dtype=torch.float64))
    return (logits - target).square().mean()


def gathered(model: nn.Module, grads: bool) -> dict[str, Tensor]:
    values: dict[str, Any] = {n: p.grad if grads else p for n, p in model.named_parameters()}
    return {n: x.full_tensor() if isinstance(x, sm.ShardedTensor) else x for n, x in values.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        torch.testing.assert_close(x.cpu(), other[name].cpu(), rtol=1e-12, atol=1e-12, msg=name)


def on_fsdp_tp(shape: tuple[int, int], program: Any) -> list[Any]:
    """Run `program(mesh)` on every rank of a simulated mesh with axes fsdp and tp."""

    def rank() -> Any:
        with on_device():
            return program(sm.init_device_mesh(DEVICE, shape, axis_names=("fsdp", "tp")))

    return sm.simulate(shape[0] * shape[1])(rank)()


@pytest.mark.one_in(3, each=["plan", "loss_of", "shape"])
@pytest.mark.parametrize(
    "plan", [PLAN, WHOLE_LOGITS, SPLIT_LOGITS], ids=["no head", "whole", "split"]
)
@pytest.mark.parametrize("loss_of", [cross_entropy, distillation, masked_mse])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 3)])
def test_a_loss_outside_of_the_model_equals_one_process(plan, loss_of, shape) -> None:
    """Three AdamW steps under FSDP x TP, plain rows, the loss computed by the script."""
    reference = language_model()
    adam = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(3):
        adam.zero_grad()
        parts = ids_of(seed=step).chunk(shape[0])
        torch.stack([loss_of(reference(ids[:, :-1]), ids) for ids in parts]).mean().backward()
        adam.step()
    grads = gathered(reference, grads=True)

    def train(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh, plan)
        fully_shard(model, mesh, axes="fsdp", units=Block)
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            adam.zero_grad()
            ids = ids_of(seed=step).chunk(shape[0])[mesh.get_local_rank("fsdp")].to(DEVICE)
            logits = model(ids[:, :-1])
            is_whole = plan is not SPLIT_LOGITS or shape[1] == 1
            assert isinstance(logits, sm.ShardedTensor) != is_whole
            loss_of(logits, ids).backward()
            adam.step()
        assert_equal(gathered(model, grads=True), grads)
        assert_equal(gathered(model, grads=False), gathered(reference, grads=False))

    on_fsdp_tp(shape, train)


@pytest.mark.parametrize("plan", [PLAN, SPLIT_LOGITS], ids=["whole", "split"])
def test_parallelize_alone(plan) -> None:
    ids = ids_of()
    reference = language_model()
    expected = reference(ids[:, :-1])
    cross_entropy(expected, ids).backward()

    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh["tp"], plan)
        logits = model(ids[:, :-1].to(DEVICE))
        assert isinstance(logits, sm.ShardedTensor) == (plan is SPLIT_LOGITS)
        labels = ids.to(DEVICE)
        hits = (logits.argmax(-1) == labels[:, 1:]).double().mean()
        assert float(hits) == (expected.argmax(-1) == ids[:, 1:]).double().mean().item()
        cross_entropy(logits, labels).backward()
        assert_equal(gathered(model, grads=True), gathered(reference, grads=True))

    on_fsdp_tp((1, 2), run)


def test_split_logits_are_not_gathered() -> None:
    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh["tp"], SPLIT_LOGITS)
        ids = ids_of().to(DEVICE)
        cross_entropy(model(ids[:, :-1]), ids).backward()  # compares the labels once
        logits = model(ids[:, :-1])
        with collectives() as records:
            loss = cross_entropy(logits, ids).item()
        assert loss > 0
        assert records
        assert sum(record.bytes_received for record in records) < logits.to_local().nbytes

    on_fsdp_tp((1, 2), run)


def test_targets_that_differ_along_tp_are_an_error_on_every_rank() -> None:
    def run(mesh: sm.DeviceMesh) -> str:
        model = parallelize(language_model(), mesh["tp"], SPLIT_LOGITS)
        ids = ids_of().to(DEVICE)
        logits = model(ids[:, :-1])
        with pytest.raises(ReplicaError, match="next to") as raised:
            cross_entropy(logits, ids_of(seed=mesh.get_local_rank("tp")).to(DEVICE))
        return str(raised.value)

    texts = on_fsdp_tp((1, 2), run)
    assert texts[0] == texts[1]


def test_gradients_of_whole_outputs_that_differ_along_tp_are_an_error() -> None:
    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh["tp"], PLAN)
        ids = ids_of().to(DEVICE)
        logits = model(ids[:, :-1])
        assert type(logits) is Tensor
        loss = (logits * (1 + mesh.get_local_rank("tp"))).square().mean()
        with pytest.raises(RuntimeError, match="replicas"):
            loss.backward()

    on_fsdp_tp((1, 2), run)


def test_sharded_inputs_return_sharded_outputs_and_refuse_plain_targets() -> None:
    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh, WHOLE_LOGITS)
        ids = sm.distribute_tensor(ids_of().to(DEVICE), mesh, P("fsdp"))
        logits = model(ids[:, :-1])
        assert isinstance(logits, sm.ShardedTensor)
        assert logits.spec == P("fsdp", None, None)
        with pytest.raises(RuntimeError, match="mixes a plain tensor"):
            cross_entropy(logits, ids_of().to(DEVICE))

    on_fsdp_tp((2, 2), run)


def test_plain_operands_next_to_outputs_and_on_other_meshes() -> None:
    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh["tp"], SPLIT_LOGITS)
        logits = model(ids_of()[:, :-1].to(DEVICE))
        ones = torch.ones(VOCAB, dtype=torch.float64, device=DEVICE)
        assert (logits + ones).shape == logits.shape
        other = sm.distribute_tensor(ones, mesh, P("fsdp"), src_data_rank=None)
        with pytest.raises(RuntimeError, match="mixes a plain tensor"):
            torch.add(other, ones)
        written = torch.zeros_like(ones).add_(logits[0, 0])
        assert torch.equal(written, logits[0, 0].full_tensor())
        with pytest.raises(RuntimeError, match="mixes a plain tensor"):
            torch.zeros_like(ones).add_(other)

    on_fsdp_tp((2, 2), run)


class Pair(NamedTuple):
    hidden: Any
    logits: Any


@dataclasses.dataclass
class Output:
    logits: Any
    note: str = "kept"


class Cache:
    def __init__(self, x: Any) -> None:
        self.x = x


class Returns(nn.Module):
    """Return what a function makes of the logits of a language model."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.model, self.make = language_model(), make

    def forward(self, ids: Tensor) -> Any:
        return self.make(self.model(ids))


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list": (lambda x: [x, 1], lambda y: y[0]),
    "tuple": (lambda x: (None, x), lambda y: y[1]),
    "named tuple": (lambda x: Pair(x, x), lambda y: y.logits),
    "dict": (lambda x: {"a": {"b": x}}, lambda y: y["a"]["b"]),
    "OrderedDict": (lambda x: OrderedDict(a=x), lambda y: y["a"]),
    "dataclass": (Output, lambda y: y.logits),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_outputs_in_containers(kind) -> None:
    make, read = CONTAINERS[kind]

    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(Returns(make), mesh["tp"], PLAN)
        output = model(ids_of()[:, :-1].to(DEVICE))
        assert type(output) is type(make(torch.ones(1)))
        assert type(read(output)) is Tensor

    on_fsdp_tp((1, 2), run)


def test_other_objects_and_containers_without_tensors_are_returned_themselves() -> None:
    def run(mesh: sm.DeviceMesh) -> None:
        values: list[Any] = []

        def make(x: Any) -> Any:
            values[:] = [Cache(x), [1, {"a": None}]]
            return tuple(values)

        model = parallelize(Returns(make), mesh["tp"], PLAN)
        output = model(ids_of()[:, :-1].to(DEVICE))
        assert output[0] is values[0]
        assert output[1] is values[1]
        assert isinstance(output[0].x, sm.ShardedTensor)

    on_fsdp_tp((1, 2), run)


def test_a_part_that_is_parallelized_inside_of_a_plain_model() -> None:
    ids = ids_of()
    reference = language_model()
    cross_entropy(reference(ids[:, :-1]), ids).backward()

    def run(mesh: sm.DeviceMesh) -> None:
        model = language_model()
        parallelize(model.block, mesh["tp"], {"up": colwise(), "down": rowwise()})
        cross_entropy(model(ids[:, :-1].to(DEVICE)), ids.to(DEVICE)).backward()
        assert_equal(gathered(model, grads=True), gathered(reference, grads=True))
        parallelize(model, mesh["tp"], {"head": colwise()})  # around the part
        model.zero_grad()
        cross_entropy(model(ids[:, :-1].to(DEVICE)), ids.to(DEVICE)).backward()
        assert_equal(gathered(model, grads=True), gathered(reference, grads=True))

    on_fsdp_tp((1, 2), run)


def test_recomputed_losses_and_no_grad() -> None:
    ids = ids_of()
    reference = language_model()
    cross_entropy(reference(ids[:, :-1]), ids).backward()

    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh["tp"], SPLIT_LOGITS)
        labels = ids.to(DEVICE)
        with torch.no_grad():
            cross_entropy(model(labels[:, :-1]), labels)
        logits = model(labels[:, :-1])
        checkpoint(cross_entropy, logits, labels, use_reentrant=False).backward()
        assert_equal(gathered(model, grads=True), gathered(reference, grads=True))

    on_fsdp_tp((1, 2), run)


def test_parallelize_twice_copies_and_pickles() -> None:
    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(language_model(), mesh["tp"], PLAN)
        parallelize(model, mesh["tp"], {"": prepare_outputs(P())})
        assert len(model._forward_hooks) == 2
        ids = ids_of()[:, :-1].to(DEVICE)
        expected = model(ids)
        assert type(expected) is Tensor
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(ids), expected)

    on_fsdp_tp((1, 2), run)


def test_an_auxiliary_loss_of_the_model_adds_to_a_plain_one() -> None:
    class WithAuxiliary(LanguageModel):
        def forward(self, ids: Tensor) -> Tensor:
            logits = super().forward(ids)
            self.auxiliary = logits.square().mean()
            return logits

    def make() -> WithAuxiliary:
        torch.manual_seed(0)
        return WithAuxiliary()

    ids = ids_of()
    reference = make()
    (cross_entropy(reference(ids[:, :-1]), ids) + reference.auxiliary).backward()

    def run(mesh: sm.DeviceMesh) -> None:
        model = parallelize(make(), mesh["tp"], PLAN)
        loss = cross_entropy(model(ids[:, :-1].to(DEVICE)), ids.to(DEVICE))
        (loss + model.auxiliary).backward()
        assert_equal(gathered(model, grads=True), gathered(reference, grads=True))

    on_fsdp_tp((1, 2), run)
