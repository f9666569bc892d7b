"""Training steps of `compiled.py` on processes: layers of TP + SP, and FSDP, eager, under
torch.compile and under `sm.jit`.

The model, the data and the layers are those of `train.py`. Every implementation makes the same
first steps, whose losses are compared; then they take turns. Collectives and bytes of torch's are
counted at its dispatcher (train_counts.py), ours by `comm_budget`, which counts them the same way.
Memory is that of the allocator, by torch's profiler, so that what compiled code allocates counts.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Call, Times, interleaved, slowest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from train_counts import CountC10d
from train_implementations import (
    Setup,
    Training,
    loss_of_batch,
    our_fsdp,
    our_tensor_parallel,
    their_fsdp,
    their_tensor_parallel,
)
from train_model import Size, cross_entropy

import shardmesh as sm

TOLERANCE = 1e-4  # of losses, relative
FIRST_STEPS = 4  # two until the optimizer has its state and a graph is recorded, two that run it
EXPERTS = 8
OURS = "ours, eager"
EAGER_BACKEND = "ours, sm.jit, eager backend"
INDUCTOR = "ours, sm.jit, Inductor"
UNCHECKED = ", check_state=False"  # of the best backend that is measured


@dataclass(frozen=True)
class Form:
    """A form of parallelism.

    Attributes:
        ours: makes the training.
        theirs: implementations of torch, by name.
        peer: the one that `sm.jit` is compared with, and what the ratios of times to it and to
            ours, eager, should be.
        has_experts: whether the layers' MLPs are mixtures of experts.
    """

    name: str
    ours: Callable[[Setup], Training]
    theirs: dict[str, Callable[[Setup], Training]]
    peer: str
    goals: tuple[float, float]
    has_experts: bool = False


def compiled_tensor_parallel(setup: Setup) -> Training:
    """DTensor's tensor and sequence parallelism under torch.compile, as one graph: block by block,
    torch 2.13 fails in backward.
    """
    training = their_tensor_parallel(setup)
    training.model.compile()
    return training


DTENSOR, FSDP2 = "DTensor, torch.compile", "FSDP2, blocks under torch.compile"
FSDP2_EAGER = "FSDP2, eager"
_DTENSORS = {"DTensor, eager": their_tensor_parallel, DTENSOR: compiled_tensor_parallel}
_FSDP2S = {
    FSDP2_EAGER: lambda setup: their_fsdp(setup, True),
    FSDP2: lambda setup: their_fsdp(setup, True, compiled=True),
}
FORMS = (
    Form("TP + SP", our_tensor_parallel, _DTENSORS, DTENSOR, (0.5, 0.85)),
    Form("FSDP", lambda setup: our_fsdp(setup, True), _FSDP2S, FSDP2, (0.8, 0.9)),
    Form(
        "FSDP, mixture of experts",
        lambda setup: our_fsdp(setup, True),
        # torch.compile of torch 2.13 has no grouped products in float32
        {FSDP2_EAGER: _FSDP2S[FSDP2_EAGER]},
        FSDP2_EAGER,
        (0.8, 0.9),
        has_experts=True,
    ),
)


@dataclass(frozen=True)
class Found:
    """A implementation on one rank, or on all of them: the slowest rank of each round, and the most
    of any.

    Attributes:
        times: of a step.
        calls, received: collectives of a step, and the bytes that they bring.
        peak: the most bytes allocated in a step above what was before it.
        recording: of a graph, the seconds of the call that records it.
        start: seconds of the first steps, to the first that runs compiled code and one after it,
            above what as many later steps take: recording and compiling, with nothing on disk.
        is_wrong: whether the losses differ from those of torch in eager mode.
    """

    times: Times
    calls: int
    received: int
    peak: int
    recording: float = 0.0
    start: float = 0.0
    is_wrong: bool = False

    @staticmethod
    def of_ranks(each: list[Found]) -> Found:
        """Return what was found on all ranks."""
        most = {
            name: max(getattr(one, name) for one in each)
            for name in ("calls", "received", "peak", "recording", "start", "is_wrong")
        }
        return Found(slowest([one.times for one in each]), **most)


class Steps:
    """The steps of an implementation, one batch after the other; under `sm.jit` with these options
    if a backend is given.
    """

    def __init__(self, training: Training, backend: str | None = None, **options: Any) -> None:
        self._training, self._done, self._eager = training, 0, backend is None
        update = _updated(training.model, training.optimizer)
        self._update = (
            self._eagerly if backend is None else sm.jit(update, backend=backend, **options)
        )
        self.recording = 0.0

    def first(self) -> tuple[list[float], float]:
        """Make the first steps; return their losses and how many seconds they took."""
        start = time.perf_counter()
        losses = [loss_of_batch(self.step()) for _ in range(FIRST_STEPS)]
        return losses, time.perf_counter() - start

    def _eagerly(self, inputs: Any, targets: Any) -> Tensor:
        with self._training.context():
            return _updated(self._training.model, self._training.optimizer)(inputs, targets)

    def step(self) -> Tensor:
        """Make one step; return the loss."""
        inputs, targets = self._training.data(self._done)
        self._done += 1
        start, graphs = time.perf_counter(), 0 if self._eager else len(self._update.recorded)  # type: ignore[attr-defined]
        loss = self._update(inputs, targets)
        if not self._eager and len(self._update.recorded) > graphs:  # type: ignore[attr-defined]
            self.recording = time.perf_counter() - start
        return loss


def _updated(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Any, Any], Tensor]:
    def update(inputs: Any, targets: Any) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return update


def measure(
    form: Form, size: Size, ranks: int, rounds: int, inductor: bool, cache: str
) -> dict[str, Found]:
    """Measure all implementations of a form on this rank; all ranks call it.

    Args:
        cache: an empty folder, in which each implementation has one for what Inductor compiles.

    Raises: RuntimeError if losses of ours differ from those of torch in eager mode.
    """
    setup = Setup(replace(size, experts=EXPERTS) if form.has_experts else size, ranks)
    backends = {EAGER_BACKEND: "eager"} | ({INDUCTOR: "inductor"} if inductor else {})
    best, backend = list(backends.items())[-1]
    steps = {
        name: Steps(make(setup))
        for name, make in form.theirs.items()
        if inductor or name not in (DTENSOR, FSDP2)
    }
    steps |= {OURS: Steps(form.ours(setup))} | {
        name: Steps(form.ours(setup), backend) for name, backend in backends.items()
    }
    steps[best + UNCHECKED] = Steps(form.ours(setup), backend, check_state=False)
    losses, first = {}, {}
    for i, (name, one) in enumerate(steps.items()):
        folder = Path(cache) / f"{FORMS.index(form)}-{i}"  # Inductor's g++ takes no blanks
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        dist.barrier()
        losses[name], first[name] = one.first()
    wrong = names_with_wrong_losses(losses)
    if not wrong <= form.theirs.keys():
        raise RuntimeError(f"the losses of {', '.join(sorted(wrong))} are wrong: {losses}")
    peaks = {name: peak_of(one.step) for name, one in steps.items()}
    sent = {name: collectives_of(one.step, name in form.theirs) for name, one in steps.items()}
    calls: dict[str, Call] = {name: one.step for name, one in steps.items()}
    times = interleaved(calls, rounds=rounds, batch_s=0, together=dist.barrier)
    return {
        name: Found(
            times[name],
            *sent[name],
            peaks[name],
            one.recording,
            first[name] - FIRST_STEPS * times[name].median,
            name in wrong,
        )
        for name, one in steps.items()
    }


def names_with_wrong_losses(losses: dict[str, list[float]]) -> set[str]:
    """Return the implementations whose losses differ from those of the first, torch in eager
    mode.
    """
    expected, *_ = losses.values()
    return {
        name
        for name, by_step in losses.items()
        if any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(by_step, expected, strict=True))
    }


def collectives_of(call: Call, theirs: bool) -> tuple[int, int]:
    """Return how many collectives a call makes, and the bytes that they bring to this rank."""
    dist.barrier()
    if theirs:  # `sm.jit` records again under a dispatch mode
        with CountC10d() as counted:
            call()
        return counted.calls, counted.received
    with sm.debug.comm_budget() as used:
        call()
    return sum(calls for calls, _ in used.by_op.values()), sum(
        received for _, received in used.by_op.values()
    )


def peak_of(call: Call) -> int:
    """Return the most bytes that are allocated during a call, above those before it; the least of
    several calls, since gloo's threads may release buffers late."""
    return min(_peak_of_one(call) for _ in range(10))


def _peak_of_one(call: Call) -> int:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [
        event
        for event in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # type: ignore[attr-defined]
        most = max(most, now)
    return most


def on_process(
    size: Size, rounds: int, inductor: bool, cache: str, forms: tuple[str, ...]
) -> dict[str, dict[str, Found]]:
    """Measure forms, as every process does; what was found on all of them."""
    # After DTensor, gloo's threads now and then abort a process that takes its interpreter down.
    atexit.register(os._exit, 0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    sm.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    results: dict[str, dict[str, Found]] = {}
    for form in FORMS:
        if form.name not in forms:
            continue
        measured = measure(form, size, dist.get_world_size(), rounds, inductor, cache)
        all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, measured)
        results[form.name] = {
            name: Found.of_ranks([each[name] for each in all_ranks]) for name in measured
        }
        torch.compiler.reset()
    return results
