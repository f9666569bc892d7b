"""`pipeline`: a model in stages over an axis of the mesh, run by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ....mesh.comm.agreement import gather_facts
from ....mesh.comm.null import NullWorld
from ....mesh.comm.recording.recorder import CommTag
from ....mesh.comm.thread_context import thread_context
from ....mesh.context import given_or_current
from ....mesh.device_mesh import DeviceMesh
from ....mesh.monitor.timeouts import keep_groups
from ....mesh.processes.process import ProcessWorld
from ...tensor.autograd.leaf_grads import accumulate_grads
from ...tensor.sharded_tensor import ShardedTensor
from ..data.unit import Unit, units_of
from ..data.wrap import Units
from .actions import Row, Rows
from .executor import DataRanks, StepRun, with_whole_backwards
from .forward_only import forward_rows
from .gathering import Gather, StepGathers
from .initial_values import materialize_stages
from .live_pipelines import LivePipelines
from .losses import LossFunction, MicrobatchLoss, Scales, Weight, microbatch_loss, total_weight
from .make_schedule import make_schedule, stages_per_rank_of
from .microbatches import Microbatch, microbatches_of
from .places import Places, places_along
from .random_numbers import StepRandom
from .schedule import Schedule
from .stage_layers import parallelize_stages, shard_stages
from .stage_meshes import StageMeshes, make_stage_meshes
from .stage_rows import RowsOfStages
from .stage_tensors import StageTensors
from .stages.precision import assume_for_others, merge_precisions, precision_of
from .stages.recording import Recorder
from .stages.split import Split, default_split
from .stages.stage import Stages
from .stages.staged_model import StagedModel
from .state import WholeModel
from .tied import TiedParameters, tied_names
from .transport import Transport
from .updates import ONE_UPDATED, Updates

MakeSchedule: TypeAlias = Callable[[int, int], Schedule]

_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LOSS = CommTag("pipeline: loss")
_WEIGHT = CommTag("pipeline: weights of microbatches")
_FACTS = CommTag("pipeline: is the step the same on all ranks")


def pipeline(
    model: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    axis: str = "pp",
    split: Split | None = None,
    schedule: str | Schedule | MakeSchedule = "1f1b",
    microbatches: int = 4,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    gather: Gather = "microbatch",
    static_shapes: bool = False,
    stage_meshes: Sequence[Mapping[str, int]] | None = None,
    data_axes: str | Sequence[str] = "dp",
) -> Pipeline:
    """pipeline(model, mesh, axis="pp") -> Pipeline: stages that pass microbatches to each other.

        rank 0   blocks 0 to 3   F0 F1 F2 .  .  B0--- .  B1--- ...       activations go down,
        rank 1   blocks 4 to 7   .  F0 F1 .  B0--- F2 B1--- ...          gradients up

    The model's code is not changed, and its forward runs on every rank: a submodule of another
    stage is not computed, its result comes from there. Parameters of other stages are on "meta".

    Args:
        model: any module, also on "meta" (see `Pipeline.materialize`); or a list of modules, one
            per stage, each of which takes what the one before returns.
        mesh: the mesh, by default that of `with mesh:`. Its other axes are for the layers inside of
            a stage: `fully_shard(stage, mesh["fsdp"])` for each of `pipe.stages.values()`.
        axis: the axis of the pipeline.
        split: where stages begin, as paths of submodules: ["blocks.4"] for two stages. Or "even",
            which divides the model by the cost of its blocks, or "auto", which divides it in the
            same way between the modules of its own plan, as models of Hugging Face have one
            (`model.pp_plan`). By default "auto" for models with such a plan, "even" for others.
        schedule: a name (see `make_schedule`), a `Schedule`, or a function of the numbers of ranks
            and microbatches that returns one.
        microbatches: the number of parts of a batch.
        example: arguments and keyword arguments of a forward, by which "even" and "auto" count
            costs; by default they go by the numbers of parameters.
        gather: how often `fully_shard` in a stage gathers parameters: for each "microbatch", as it
            is set up, or once a "step", which keeps parameters and gradients of the rank's stages
            whole for the step.
        static_shapes: raise an error if the shapes of a microbatch change.
        stage_meshes: for each place along the axis, the axes of its stages' own mesh with their
            sizes, where they differ: [{"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}]. The product of the
            sizes is that of the mesh's other axes. If the mesh has the pipeline's axis alone,
            stages may have different numbers of ranks, which divide it in order: [{"tp": 2},
            {"tp": 4}] for 6 ranks. See `Pipeline.stage_mesh`. Every rank passes the whole batch,
            and has the rows of its data rank.
        data_axes: with `stage_meshes`, the axes over which the rows of a microbatch are split.

    Raises:
        ValueError: an axis that the mesh lacks; stages that do not cover the model, or another
            number of them than the schedule has; numbers that the schedule does not take.

    Communication: none.

    Example:
        >>> pipe = sm.parallel.pipeline(model, mesh, split=["blocks.2"], microbatches=4)
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> loss = pipe.step(inputs, targets, loss_fn=F.cross_entropy)
        >>> optimizer.step()
    """
    mesh = given_or_current(mesh)
    if axis not in mesh.axis_names:
        raise ValueError(
            f"pipeline: {mesh} has no axis {axis!r}; name one of {mesh.axis_names} with axis="
        )
    meshes = None
    if stage_meshes is not None:
        meshes = make_stage_meshes(mesh, axis, stage_meshes, data_axes)
    places = places_along(mesh, axis) if meshes is None else meshes.places
    stages = None
    if not isinstance(model, nn.Module):
        stages = len(model)
    elif not isinstance(split, str) and isinstance(split, Sequence):
        stages = len(split) + 1
    schedules = _Schedules(schedule, places.count, stages)
    first = schedules.of(microbatches)
    own = [s for s, rank in enumerate(first.placement) if rank == places.own]
    if split is None and isinstance(model, nn.Module):
        split = default_split(model)
    names = tied_names(model)
    staged = StagedModel(model, split, first.stages, own, example=example)
    return Pipeline(
        staged, mesh, axis, schedules, microbatches, gather, static_shapes, names, places, meshes
    )


class _Schedules:
    """The schedules of a pipeline, by the number of microbatches."""

    def __init__(
        self, schedule: str | Schedule | MakeSchedule, ranks: int, stages: int | None
    ) -> None:
        self._make = self._maker(schedule, ranks, stages)
        self._ranks = ranks
        self._stages = stages
        self._by_count: dict[int, Schedule] = {}

    def of(self, microbatches: int) -> Schedule:
        """Return the checked schedule for a number of microbatches.

        Raises:
            ValueError: it is none for this number, or for other ranks or stages.
        """
        schedule = self._by_count.get(microbatches)
        if schedule is None:
            schedule = self._make(self._ranks, microbatches)
            self._check(schedule, microbatches)
            self._by_count[microbatches] = schedule
        return schedule

    @staticmethod
    def _maker(
        schedule: str | Schedule | MakeSchedule, ranks: int, stages: int | None
    ) -> MakeSchedule:
        if isinstance(schedule, Schedule):
            return lambda _, __: schedule
        if callable(schedule):
            return schedule
        per_rank = stages_per_rank_of(schedule, ranks, stages)
        return lambda p, m: make_schedule(schedule, p, m, stages_per_rank=per_rank)

    def _check(self, schedule: Schedule, microbatches: int) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"pipeline: schedule={schedule!r}: give a name, a Schedule, or a function of the "
                "numbers of ranks and microbatches that returns a Schedule"
            )
        for what, expected, actual in (
            ("ranks", self._ranks, schedule.ranks),
            ("microbatches", microbatches, schedule.microbatches),
            ("stages", schedule.stages if self._stages is None else self._stages, schedule.stages),
        ):
            if expected != actual:
                raise ValueError(
                    f"pipeline: schedule {schedule.name!r} is for {actual} {what}, not {expected}"
                )
        schedule.check()


class Pipeline:
    """A model in stages; made by `pipeline`.

    Attributes:
        model: the whole model. Modules of other ranks' stages have their parameters on "meta".
        stages: this rank's stages, by number: modules whose parameters have the model's own names.
            Apply `parallelize` and `fully_shard` to them, before the first step; then a stage may
            be compiled, `pipe.stages[0] = sm.jit(pipe.stages[0])`.
        mesh, axis: where the pipeline runs.
        schedule: of `microbatches` microbatches.
        microbatches: the number of parts of a batch.
        whole: the parameters, gradients and state of the whole model.
    """

    def __init__(
        self,
        staged: StagedModel,
        mesh: DeviceMesh,
        axis: str,
        schedules: _Schedules,
        microbatches: int,
        gather: Gather,
        static_shapes: bool,
        tied_names: Mapping[str, str],
        places: Places,
        stage_meshes: StageMeshes | None = None,
    ) -> None:
        self.mesh = mesh
        self.axis = axis
        self.microbatches = microbatches
        self._staged = staged
        self._schedules = schedules
        self._places = places
        self._stage_meshes = stage_meshes
        self._rows = None if stage_meshes is None else RowsOfStages(staged, stage_meshes)
        self._transport = Transport(places, mesh, stage_meshes)
        self._gather: Gather = gather
        self._static_shapes = static_shapes
        self._signature: Hashable | None = None
        self._run: StepRun | None = None
        self._checked: set[Hashable] = set()
        self._loss_dtype: torch.dtype | None = None  # known to all after the first step
        are_slices = places.count == mesh.size(axis)
        tensors = StageTensors(mesh, axis, None if are_slices else stage_meshes)
        self._updates = Updates(places.own, places.count)
        self.whole = WholeModel(staged.model, staged.stages, tensors, tied_names)
        self._has_tied = bool(staged.tied or tied_names)
        self._tied: TiedParameters | None = None
        mesh.world.state(LivePipelines).add(self.whole)

    def __repr__(self) -> str:
        return (
            f"Pipeline({self.schedule.name}, {self._staged.num_stages} stages over "
            f"{self.axis}={self._places.count}, {self.microbatches} microbatches)"
        )

    @property
    def schedule(self) -> Schedule:
        return self._schedules.of(self.microbatches)

    @property
    def stages(self) -> Stages:
        return self._staged.stages

    @property
    def model(self) -> nn.Module:
        return self._staged.model

    @property
    def stage_mesh(self) -> DeviceMesh:
        """The mesh of this rank's stages.

        It is the pipeline's without its own axis, or what `stage_meshes` gives.
        """
        return self._inner_mesh(None)

    # -- the modules -------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages under the model's own names, each once.

        A tied parameter has its first name in the model, also in the stage that uses it under
        another one. Where two stages of this rank have a copy, the first is the parameter, and the
        other one follows it.
        """
        yield from self.whole.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for an optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    # -- state of the whole model ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model under its own names, the same tree on every rank.

        Tensors of a stage are `ShardedTensor`s on the ranks of that stage; others hold nothing of
        them. Plain parameters are replicated there. A tied parameter is one tensor under all of
        its names. Tensors that belong to no stage, such as buffers of the model itself, are those
        of the first rank along the axis.

        Raises:
            ValueError: on every rank, a parameter on ranks of several stages.

        Communication: one all_gather of small objects over the axis.
        """
        return self.whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state of the whole model, of a pipeline with any stages or of none.

        Every rank calls it with the same tree: of plain tensors, or of `ShardedTensor`s on any
        meshes. All copies of a tied parameter get its value.

        Raises:
            RuntimeError: on every rank, before anything is changed: shapes that differ; with
                `strict`, names that are missing, or unknown ones.

        Communication: one all_gather of small objects over the axis; the redistribution of tensors
            that are not on the ranks of their stage, in its layout.
        """
        self.whole.load_state_dict(state, strict)

    def parallelize(
        self,
        plan: Mapping[str, Any] | str,
        mesh: DeviceMesh | None = None,
        *,
        src_data_rank: int | None = 0,
    ) -> Pipeline:
        """parallelize(plan) -> the pipeline, its stages laid out as `sm.parallel.parallelize` does.

        Args:
            plan: as for a whole model, also "auto"; a pattern must match somewhere in it.
            mesh: by default the pipeline's without its own axis.
            src_data_rank: as in `distribute_tensor`.

        Communication: as `sm.parallel.parallelize`, over this rank's slice of the mesh.

        Example:
            >>> pipe.parallelize({"*.up": colwise(), "*.down": rowwise()}, mesh["tp"])
        """
        mesh = self._inner_mesh(mesh)
        parallelize_stages(self.model, self.stages.values(), mesh, plan, src_data_rank)
        return self

    def fully_shard(
        self, mesh: DeviceMesh | None = None, *, units: Units | None = None, **options: Any
    ) -> Pipeline:
        """fully_shard(mesh) -> the pipeline, the parameters of its stages sharded (FSDP).

        Each stage is a unit of its own, and so are the modules in it that `units` matches. Call it
        after `parallelize`.

        Args:
            mesh: by default the pipeline's without its own axis.
            units, options: as for `sm.parallel.fully_shard` of the whole model.

        Communication: as `sm.parallel.fully_shard`, over this rank's slice of the mesh.
        """
        mesh = self._inner_mesh(mesh)
        last = self._staged.num_stages - 1
        shard_stages(self.model, self.stages, last, mesh, units, False, options)
        return self

    def data_parallel(
        self, mesh: DeviceMesh | None = None, *, units: Units | None = None, **options: Any
    ) -> Pipeline:
        """data_parallel(mesh) -> the pipeline, its stages data-parallel (DDP, ZeRO).

        Arguments and communication are as for `fully_shard`, options those of
        `sm.parallel.data_parallel`.
        """
        mesh = self._inner_mesh(mesh)
        last = self._staged.num_stages - 1
        shard_stages(self.model, self.stages, last, mesh, units, True, options)
        return self

    def materialize(self, init: Callable[[nn.Module], object] | None = None) -> Pipeline:
        """materialize() -> the pipeline, with memory and initial values for tensors on "meta".

            with torch.device("meta"): model = Model()        no memory
            pipe = pipeline(model, mesh)                      assigns modules to ranks
            pipe.fully_shard(mesh["fsdp"])                    and rows of their parameters
            pipe.materialize()                                makes them

        The values are those that `sm.parallel.materialize` gives to the whole model on any mesh, to
        the bit, for every split and schedule: each rank runs the initialisers of all modules in
        their order, those of other stages without memory, and so draws the same random numbers.

        Args:
            init: as in `sm.parallel.materialize`; called for the modules of a copy of the model.

        Raises:
            ValueError: as `sm.parallel.materialize`, on every rank.

        Communication: none for initialisers that work element by element; of a tied parameter with
            several copies on a rank, the redistribution to the layouts of the others.
        """
        materialize_stages(self._staged, self.whole.tensors, self.schedule.placement, init)
        return self

    def _inner_mesh(self, mesh: DeviceMesh | None) -> DeviceMesh:
        """Return the mesh of layers inside of a stage.

        Raises:
            ValueError: it has the pipeline's axis, or there is no other axis.
        """
        if mesh is None and self._stage_meshes is not None:
            return self._stage_meshes.mesh
        if mesh is None:
            names = tuple(name for name in self.mesh.axis_names if name != self.axis)
            if not names:
                raise ValueError(
                    f"{self.mesh} has only the pipeline's axis {self.axis!r}: make the mesh with "
                    "an axis for the layers inside of a stage"
                )
            return self.mesh[names]
        if self.axis in mesh.axis_names:
            raise ValueError(
                f"{mesh} has the pipeline's axis {self.axis!r}: pass the axes of the layer, such "
                'as mesh["fsdp"]'
            )
        return mesh

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode of the model, as `nn.Module.train` does."""
        self.model.train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's stages, as `nn.Module.zero_grad` does."""
        for stage in self.stages.values():
            stage.zero_grad(set_to_none)

    # -- running -----------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        loss_fn: LossFunction,
        weight: Weight | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """step(inputs, targets, loss_fn=F.cross_entropy) -> the loss; gradients are in `.grad`.

        The loss is the sum over all valid targets of all microbatches and data-parallel ranks,
        divided once by their number, as in one process: for `F.cross_entropy` and its relatives by
        the targets that are not `ignore_index`, for `F.mse_loss` and its relatives by the elements.
        Another function is taken for a mean over the rows of its microbatch, or over what `weight`
        counts.

        Args:
            inputs: the model's first argument; a tuple for several. Tensors are split along dim 0,
                and block masks of flex attention along their batch; those with one row, and other
                values, go to every microbatch. The same on all ranks of the pipeline.
            targets: what `loss_fn` gets next to the model's output, split alike. Needed on the rank
                of the last stage, and for `add_loss` on all.
            loss_fn: of output and target.
            weight: the number of what `loss_fn` is a mean over, from the target of a microbatch.
            kwargs: keyword arguments of the model's forward, split alike: each stage gets those of
                its microbatch.

        A list in place of any of these values has one value per microbatch, of any shapes.

        Returns:
            A 0-d tensor, the same on every rank.

        Raises:
            ValueError: rows that cannot be split; a number of microbatches that the schedule does
                not take; on every rank, ranks that differ in their calls.

        Warns:
            UserWarning: once, on every rank, if the parameters of some stages have changed since
                the step before, and those of others, which require gradients, have not.

        Communication: activations and gradients of neighbouring stages, in messages of their own; a
        small all_reduce of the loss; what the layers inside of the stages do.
        """
        updates = self._updates.since_last_step(self.parameters())
        loss = microbatch_loss(loss_fn, weight)
        batches = microbatches_of(inputs, kwargs, targets, self.microbatches)
        schedule = self._schedules.of(len(batches))
        with (
            torch.enable_grad(),
            self._sum_tied_gradients(),
            accumulate_grads(),
            self._staged.constant_flags(),
        ):
            run = self._start("step", batches, targets, loss)
            row = with_whole_backwards(schedule.rows[self._places.own])
            gathers = StepGathers(self.stages, row, self._gather)
            self._begin_transport(schedule.rows, run)
            with gathers.whole_step():
                self._execute(run, row, gathers)
        whole_loss, facts = self._whole_loss(run, updates)
        self._updates.end_step(self.parameters(), facts, schedule.placement)
        return whole_loss

    @torch.no_grad()
    def eval(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        loss_fn: LossFunction,
        weight: Weight | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """eval(inputs, targets, loss_fn=F.cross_entropy) -> the loss, without gradients.

        As `step`, with any number of microbatches. The mode of the model is the program's: see
        `train`.
        """
        loss = microbatch_loss(loss_fn, weight)
        batches = microbatches_of(inputs, kwargs, targets, self.microbatches)
        with self._staged.constant_flags():
            run = self._start("eval", batches, targets, loss)
            self._run_forward_only(run)
        return self._whole_loss(run)[0]

    @torch.no_grad()
    def forward(self, inputs: Any, **kwargs: Any) -> list[Any] | None:
        """forward(inputs) -> the model's results, one per microbatch, without gradients.

        Returns:
            A list on the rank of the last stage, None on the others.
        """
        batches = microbatches_of(inputs, kwargs, None, self.microbatches)
        with self._staged.constant_flags():
            run = self._start("forward", batches, None, None)
            self._run_forward_only(run)
        if self._staged.num_stages - 1 not in self.stages:
            return None
        return [run.outputs[number] for number in range(len(batches))]

    def add_loss(self, value: Tensor) -> None:
        """Add a loss of the stage that runs, such as the balance of experts; call it in a forward.

        The value counts as a mean over its microbatch, with the weight that the main loss has: the
        loss of the batch is the weighted mean of both. Outside of `step` and `eval` it is an error.

        Args:
            value: a tensor with one element, computed in a unit.

        Raises:
            RuntimeError: no stage runs; on every rank, the call is between units, which every stage
                computes; inside of a reentrant checkpoint; in what `sm.jit` has compiled.
        """
        recorder = thread_context.module_calls
        if isinstance(recorder, Recorder):
            if not recorder.units_around:
                raise RuntimeError(
                    "add_loss: called between units, which every stage computes; call it in the "
                    "forward of a module with parameters, such as a block"
                )
            if recorder.has_grad and not torch.is_grad_enabled():
                raise RuntimeError(
                    "add_loss: called without gradients, as inside of a reentrant checkpoint; "
                    "write checkpoint(..., use_reentrant=False)"
                )
            return
        if self._run is None:
            raise RuntimeError("add_loss: no stage runs; call it in the forward of the model")
        if thread_context.in_joined_function:
            raise RuntimeError(
                "add_loss: called in what sm.jit has compiled, whose graph would not add the loss; "
                "leave this block or stage uncompiled"
            )
        self._run.add_loss(value)

    # -- parts of a step ---------------------------------------------------------------------------

    def _start(
        self,
        kind: Literal["step", "eval", "forward"],
        batches: Sequence[Microbatch],
        targets: Any,
        loss: MicrobatchLoss | None,
    ) -> StepRun:
        """Check the call and return what runs it.

        Communication: at the first call of a kind, one all_gather of small objects; one small
        all_reduce over the data-parallel ranks.
        """
        if self._has_tied:
            self.whole.refresh_copies()
        if self._rows is not None:
            batches = [self._rows.own(batch) for batch in batches]
        data = self._data_ranks(batches)
        self._check_same(kind, len(batches), targets is not None, loss is not None, data)
        signatures = [self._staged.signature(batch.args, batch.kwargs) for batch in batches]
        self._check_static(signatures)
        scales: list[Scales] = []
        if loss is not None and targets is not None:
            scales = self._scales(loss, batches, data)
        return StepRun(
            self.stages,
            self._staged.num_stages - 1,
            batches,
            signatures,
            self._transport,
            loss,
            scales,
            data,
            self._random(),
            self.mesh.world,
        )

    def _random(self) -> StepRandom | None:
        """Return the random numbers of a step; None in evaluation mode, which draws none."""
        random = StepRandom(self.mesh.device) if self.model.training else None
        self._staged.after_unit = None if random is None else random.after_unit
        return random

    def _check_static(self, signatures: Sequence[Hashable]) -> None:
        for number, signature in enumerate(signatures):
            if self._static_shapes and self._signature not in (None, signature):
                raise ValueError(
                    f"static_shapes=True: microbatch {number} has {signature}, and the first one "
                    f"had {self._signature}"
                )
            self._signature = signature

    def _check_same(
        self, kind: str, count: int, has_targets: bool, has_loss: bool, data: DataRanks
    ) -> None:
        """Compare the ranks' calls and exchange the precision of stages, once per kind of call.

        Raises:
            ValueError: on every rank, if they differ, or the last stage has no targets.
        """
        if (kind, count) in self._checked:
            return
        last = self._staged.num_stages - 1
        precision = precision_of(self.stages.values())
        if isinstance(self.mesh.world, NullWorld):
            precision = assume_for_others(precision, self.stages.values(), self.model)
        is_averaged = True
        if self._stage_meshes is not None:
            is_averaged = data.size == self._stage_meshes.data_size(self._places.own)
        facts = kind, count, has_loss, has_targets, last in self.stages, is_averaged, precision
        told = gather_facts(self._places.group, facts, tag=_FACTS)
        calls = {rank: facts[:3] for rank, facts in told.items()}
        if len(set(calls.values())) > 1:
            text = ", ".join(
                f"rank {rank} calls {called} with {number} microbatches"
                for rank, (called, number, *_) in calls.items()
            )
            raise ValueError(f"pipeline: ranks differ: {text}")
        for rank, (called, _, loss, targets, is_last, averages, _) in told.items():
            if called == "step" and not averages:
                place = self._places.of(rank)
                raise ValueError(
                    f"pipeline: stage_meshes[{place}] splits rows over data_axes, but no layer of "
                    "its stages averages gradients over these: call pipe.fully_shard or "
                    "pipe.data_parallel with them"
                )
            if is_last and loss and not targets:
                raise ValueError(
                    f"pipeline: rank {rank} has the last stage, which computes the loss, and no "
                    "targets; pass targets at least there"
                )
        self._staged.set_precision(merge_precisions([facts[-1] for facts in told.values()]))
        self._checked.add((kind, count))

    def _data_ranks(self, batches: Sequence[Microbatch]) -> DataRanks:
        """Return the ranks over which plain inputs differ: the data axes of the stages' units."""
        values = (*batches[0].args, *batches[0].kwargs.values())
        if any(isinstance(value, ShardedTensor) for value in values):
            return DataRanks()  # the loss is that of the global batch already
        units: list[Unit] = []
        for stage in self.stages.values():
            units += units_of(stage)
        axes = {unit.plan.options.data_axes: unit.plan.options.mesh for unit in units}
        names = max(axes, key=len, default=())
        if not names:
            return DataRanks()
        mesh = axes[names]
        if mesh.size(names) == 1:
            return DataRanks()
        return DataRanks(mesh.group(names), mesh.size(names))

    def _scales(
        self, loss: MicrobatchLoss, batches: Sequence[Microbatch], data: DataRanks
    ) -> list[Scales]:
        """Return by what the losses of each microbatch are multiplied.

        Layers average gradients over data-parallel ranks, so the factors are that much larger.
        """
        weights = [_as_plain(loss.weight_of(batch.target)) for batch in batches]
        if loss.weight is None:
            total = torch.ones((), dtype=torch.float64, device=self.mesh.device)
        else:
            total = data.sum(total_weight(weights, self.mesh.device), _WEIGHT)
        means = [data.size * weight / total for weight in weights]
        if loss.is_sum:
            return [Scales(data.size / total, mean) for mean in means]
        return [Scales(mean, mean) for mean in means]

    def _execute(self, run: StepRun, row: Row, gathers: StepGathers | None = None) -> None:
        self._run = run
        try:
            run.run(row, gathers)
        except BaseException:
            if isinstance(self.mesh.world, ProcessWorld) and self.mesh.device.type == "cpu":
                # gloo's threads wait for messages of this step: `destroy_process_group` would, too
                keep_groups()
            raise
        finally:
            self._run = None

    def _begin_transport(self, rows: Rows, run: StepRun) -> None:
        batch_dims_of = None if self._rows is None else self._rows.dims
        self._transport.begin(rows, run.signatures, batch_dims_of)

    def _run_forward_only(self, run: StepRun) -> None:
        placement = self._schedules.of(self.microbatches).placement
        rows = forward_rows(placement, len(run.signatures))
        self._begin_transport(rows, run)
        self._execute(run, rows[self._places.own])

    def _whole_loss(self, run: StepRun, updates: int = 0) -> tuple[Tensor, Tensor]:
        """Return the loss of the batch on every rank, and the sum of all places' `updates`.

        Communication: one small all_reduce over the pipeline, and one over data-parallel ranks.
        """
        values = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if run.total is not None:
            values[0] = run.total
        if self._staged.num_stages - 1 in self.stages and run.loss_dtype is not None:
            values[1] = _LOSS_DTYPES.index(run.loss_dtype)
        values = run.data.sum(values, _LOSS) / run.data.size
        values[1] += updates
        if not self._places.represents:
            values.zero_()
        self._places.group.all_reduce(values, tag=_LOSS)
        if self._loss_dtype is None:
            if values.is_meta:  # the other ranks' is not known
                self._loss_dtype = run.loss_dtype or _LOSS_DTYPES[0]
            else:
                self._loss_dtype = _LOSS_DTYPES[int(values[1]) % ONE_UPDATED]
        return values[0].to(self._loss_dtype), values[1]

    def _sum_tied_gradients(self) -> AbstractContextManager[None]:
        """Sum the gradients of tied parameters' copies at the end of the block.

        Before the first step, make the copies equal.
        """
        if not self._has_tied:
            return nullcontext()
        if self._tied is None:
            self._tied = TiedParameters(self.whole)
            self._tied.make_equal()
        return self._tied.sum_gradients()


def _as_plain(weight: Tensor | float) -> Tensor | float:
    return weight.full_tensor() if isinstance(weight, ShardedTensor) else weight
