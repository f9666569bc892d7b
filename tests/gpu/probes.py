"""Short answers of one GPU to what only it can tell: `python -m tests.gpu.probes DEVICE NAME...`
prints a line of JSON for each.

`run.py` starts this with a limit for each probe, and again with the rest after one that fails or
hangs, since an error of CUDA stays in the process. On the CPU the probes that need CUDA say so, and
the others run there as they do on a GPU, so that this file is tested without.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.kernels.copy import compile_pack, pack_many
from shardmesh.kernels.symmetric.peers import simulated_peers
from shardmesh.mesh.comm.current_world import current_world
from tests.gpu.delayed import delayed_collectives

NOT_RUN = "not run: no CUDA device"
_CYCLES_PER_MS = 2_000_000  # of `torch.cuda._sleep`, at about 2 GHz


@dataclass(frozen=True)
class Probe:
    """A question to the device.

    Attributes:
        ask: from the device type to what was found, in one line; raises if that is wrong.
        needs_cuda: whether it means nothing on a CPU.
        limit: seconds that it may take.
    """

    ask: Callable[[str], str]
    needs_cuda: bool = False
    limit: float = 60.0


def answer(probe: Probe, device: str) -> tuple[str, str]:
    """Return "ok", "failed" or "not run", and what was found."""
    if probe.needs_cuda and device != "cuda":
        return "not run", NOT_RUN
    try:
        text = probe.ask(device)
        if device == "cuda":
            torch.cuda.synchronize()  # an error of a kernel is this probe's
    except Exception as error:
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "ok", text


def check(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def microseconds(call: Callable[[], Any], count: int, device: str) -> tuple[float, float]:
    """Return the microseconds of a call on the host, and until the device has done its part."""
    for _ in range(3):
        call()
    sync(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    host = time.perf_counter() - start
    sync(device)
    return host / count * 1e6, (time.perf_counter() - start) / count * 1e6


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def replayed(call: Callable[[], Tensor], times: int) -> list[Tensor]:
    """Capture a call as a CUDA graph; return the results of its replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    results = []
    for _ in range(times):
        graph.replay()
        results.append(out.clone())
    return results


# -- the probes ------------------------------------------------------------------------------------


def optimizers(device: str) -> str:
    """Three steps of AdamW on a ShardedTensor, compared with a plain tensor: for each form of the
    optimizer.
    """
    mesh, answers = sm.init_device_mesh(device, (1,), axis_names=("dp",)), []
    forms: dict[str, dict[str, Any]] = {"fused": {"fused": True}}
    if device == "cuda":
        forms |= {
            "capturable": {"capturable": True},
            "fused and capturable": {"fused": True, "capturable": True},
        }
    for name, options in forms.items():
        value, grad = torch.randn(64, 8, device=device), torch.randn(64, 8, device=device)
        plain = nn.Parameter(value.clone())
        ours = nn.Parameter(sm.distribute_tensor(value.clone(), mesh, P("dp")))
        for param in (plain, ours):
            optimizer = torch.optim.AdamW([param], lr=0.1, **options)
            for _ in range(3):
                param.grad = (
                    grad.clone()
                    if param is plain
                    else sm.distribute_tensor(grad.clone(), mesh, P("dp"))
                )  # type: ignore[assignment]
                optimizer.step()
        apart = (ours.full_tensor() - plain).abs().max().item()  # type: ignore[attr-defined]
        check(apart < 1e-6, f"{name}: parameters differ from a plain tensor's by {apart:.2g}")
        answers.append(f"{name}: differs by {apart:.2g}")
    return "; ".join(answers)


def late_barrier(device: str) -> str:
    """Barriers of a NCCL group behind a kernel of 300 ms: the host polls, as the monitor does, and
    the communicator works after it.
    """
    group, waited = nccl_group(device), []
    for barrier in (group._barrier, lambda: poll(dist.barrier(async_op=True))):
        torch.cuda._sleep(300 * _CYCLES_PER_MS)
        start = time.perf_counter()
        barrier()
        waited.append(f"{(time.perf_counter() - start) * 1e3:.0f} ms")
    return f"waited {waited[0]}, polled {waited[1]}; {works(group, device)}"


def timed_wait(device: str) -> str:
    """The same with a timeout of 10 ms, which the library never gives to a work of NCCL; the
    process may be ended by it.
    """
    group = nccl_group(device)
    torch.cuda._sleep(300 * _CYCLES_PER_MS)
    try:
        dist.barrier(async_op=True).wait(timedelta(milliseconds=10))  # type: ignore[union-attr]
        answer = "returns"
    except RuntimeError as error:
        answer = f"raises {type(error).__name__}"
    try:
        return f"the wait {answer}; {works(group, device)}"
    except RuntimeError as error:
        return f"the wait {answer}; an all_reduce after it raises {type(error).__name__}"


def nccl_group(device: str) -> Any:
    """Return the group of this rank, over NCCL alone."""
    if dist.is_initialized():  # by an earlier probe, with gloo for the host
        dist.destroy_process_group()
    sm.init_device_mesh(device, (1,), backend="nccl")
    group: Any = current_world().group([0])
    group._barrier()  # connects
    return group


def poll(work: Any) -> None:
    while not work.is_completed():
        time.sleep(0.001)


def works(group: Any, device: str) -> str:
    x = torch.ones(4, device=device)
    group._all_reduce(x, "sum", False)
    check(x.tolist() == [1.0] * 4, f"an all_reduce after it gives {x.tolist()}")
    return "an all_reduce after it is right"


def pinned_memory(device: str) -> str:
    """The memory of symmetric collectives while torch's default device is the GPU."""
    torch.set_default_device(device)
    try:
        peers = simulated_peers(2, 1 << 12, device)
    finally:
        torch.set_default_device(None)
    return f"allocated; errors are on {peers[0].error.device}, pinned: {peers[0].error.is_pinned()}"


def captured_dropout(device: str) -> str:
    """Replays of a captured dropout must not repeat their numbers, unless capturing is refused."""
    mesh = sm.init_device_mesh(device, (1,), axis_names=("dp",))
    x = sm.distribute_tensor(torch.ones(1 << 12, device=device), mesh, P("dp"))
    try:
        first, second = replayed(lambda: F.dropout(x, 0.5, True).to_local(), 2)  # type: ignore[attr-defined]
    except RuntimeError as error:
        return f"capturing is refused: {' '.join(str(error).split())[:150]}"
    check(not torch.equal(first, second), "two replays have the same random numbers")
    return "two replays have different numbers"


def captured_pack(device: str) -> str:
    """Two tensors packed in one launch, captured and replayed."""
    boxes = [((0, 64), (0, 32)), ((0, 64), (32, 64))]
    packs = [compile_pack((64, 64), boxes), compile_pack((64, 64), boxes, [4096, 6144])]
    tensors = [torch.randn(64, 64, device=device) for _ in packs]
    out = torch.zeros(8192, device=device)
    expected = pack_many(packs, tensors, torch.empty_like(out)).clone()
    (packed,) = replayed(lambda: pack_many(packs, tensors, out.zero_()), 1)
    check(torch.equal(packed, expected), "the replayed pack differs from the eager one")
    return "a replay equals the eager pack"


def aligned_products(device: str) -> str:
    """Time of a matrix product whose weights start at an odd byte of their buffer."""
    n = 4096 if device == "cuda" else 64
    x = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    buffer = torch.zeros(2 * n * n + 256, dtype=torch.uint8, device=device)
    answers = []
    for offset in (0, 2, 8, 128):
        w = buffer[offset : offset + 2 * n * n].view(torch.bfloat16).view(n, n)
        answers.append(f"{offset} bytes: {microseconds(lambda w=w: x @ w, 20, device)[1]:.0f} us")
    return f"bf16 {n} x {n} x {n}, weights start at {', '.join(answers)}"


def recomputed_block(device: str) -> str:
    """A checkpointed block that makes a tensor on the current mesh, which autograd's own thread
    recomputes.
    """
    mesh = sm.init_device_mesh(device, (1,), axis_names=("dp",))
    x = sm.distribute_tensor(torch.ones(4, device=device), mesh, P("dp")).requires_grad_()
    with mesh:
        y = checkpoint(lambda z: (z * sm.ones(4, placements=P("dp"))).exp(), x, use_reentrant=False)
    y.sum().backward()  # type: ignore[union-attr]
    grad = x.grad.full_tensor()  # type: ignore[union-attr]
    torch.testing.assert_close(grad, torch.full_like(grad, torch.e))
    return "recomputed outside the mesh's block, with the right gradient"


def launches(device: str) -> str:
    """Host time of a launch: two small tensors packed, next to one addition of torch."""
    packs = [
        compile_pack((16, 16), [((0, 16), (0, 8))], [0]),
        compile_pack((16, 16), [((0, 16), (8, 16))], [128]),
    ]
    tensors = [torch.randn(16, 16, device=device) for _ in packs]
    out = torch.empty(256, device=device)
    ours, _ = microseconds(lambda: pack_many(packs, tensors, out), 500, device)
    theirs, _ = microseconds(lambda: out.add_(1), 500, device)
    return f"pack of two tensors: {ours:.1f} us of the host; torch's add_: {theirs:.1f} us"


def ring_attention(device: str) -> str:
    """Ring attention on four simulated ranks, compared with torch's attention on all of the
    sequence.
    """
    length, dtype = (2048, torch.bfloat16) if device == "cuda" else (32, torch.float32)
    shape = (2, 8, length, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @sm.simulate(4)
    def ring() -> Tensor:
        mesh = sm.init_device_mesh(device, (4,), axis_names=("cp",))
        parts = [
            sm.distribute_tensor(x, mesh, P(None, None, "cp"), src_data_rank=None)
            for x in (q, k, v)
        ]
        return sm.parallel.context_parallel_attention(*parts, is_causal=True).full_tensor()  # type: ignore[attr-defined]

    apart = (ring()[0].float() - expected.float()).abs().max().item()
    check(
        apart < (0.03 if dtype == torch.bfloat16 else 1e-5), f"differs from torch's by {apart:.2g}"
    )
    return f"differs by {apart:.2g}, {str(dtype).removeprefix('torch.')}"


def delayed_streams(device: str) -> str:
    """Twenty FSDP steps with collectives on a side stream behind a sleep of 5 ms: bit for bit those
    without.
    """

    def losses() -> list[Tensor]:
        return train(device, 20)

    expected = losses()
    with delayed_collectives(5 * _CYCLES_PER_MS) as count:
        delayed = losses()
    check(device != "cuda" or count[0] > 0, "no collective was delayed")
    check(
        all(map(torch.equal, delayed, expected)),
        "losses or parameters differ from those of undelayed steps",
    )
    return f"{count[0]} delayed collectives; losses and parameters are equal bit for bit"


def train(device: str, steps: int) -> list[Tensor]:
    """Return the losses of FSDP on two simulated ranks, and the parameters in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))).to(
        device
    )
    x = torch.randn(8, 32, device=device)

    @sm.simulate(2)
    def run() -> list[Tensor]:
        mesh = sm.init_device_mesh(device, (2,), axis_names=("dp",))
        own_model: nn.Module = copy.deepcopy(model)
        for block in own_model:  # type: ignore[attr-defined]
            sm.parallel.fully_shard(block, mesh, src_data_rank=None)
        sm.parallel.fully_shard(own_model, mesh, src_data_rank=None)
        optimizer, losses = torch.optim.AdamW(own_model.parameters(), lr=1e-2), []
        for _ in range(steps):
            loss = own_model(x.chunk(2)[mesh.get_local_rank()]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [torch.stack(losses), *(p.detach().full_tensor() for p in own_model.parameters())]  # type: ignore[attr-defined]

    return run()[0]


PROBES: dict[str, Probe] = {
    "AdamW, fused and capturable": Probe(optimizers),
    "barrier of a NCCL group behind a slow kernel": Probe(late_barrier, needs_cuda=True),
    "pinned memory under a default device": Probe(pinned_memory, needs_cuda=True),
    "replays of a captured dropout": Probe(captured_dropout, needs_cuda=True),
    "capture of a pack of two tensors": Probe(captured_pack, needs_cuda=True),
    "products with weights at odd bytes": Probe(aligned_products),
    "checkpointed block under a mesh": Probe(recomputed_block),
    "host time of a launch": Probe(launches),
    "ring attention and torch's": Probe(ring_attention),
    "FSDP steps with delayed collectives": Probe(delayed_streams),
    "timed wait for NCCL": Probe(timed_wait, needs_cuda=True),
}


def main(probes: Mapping[str, Probe], arguments: Sequence[str]) -> None:
    """Answer the probes in order, each with a line when it starts and one when it ends; end after
    one that failed.
    """
    device, *names = arguments
    for name in names:
        print(json.dumps({"probe": name}), flush=True)
        status, text = answer(probes[name], device)
        print(json.dumps({"probe": name, "status": status, "found": text}), flush=True)
        if status == "failed":
            sys.exit(1)


if __name__ == "__main__":
    main(PROBES, sys.argv[1:])
