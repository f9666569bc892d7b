"""The whole model of a pipeline: its parameters, gradients and state, the same on every rank.

    tree        what each rank has by parameter   ->   one tree of the whole model
    own_tree    a tree of the whole model         ->   what this rank's parameters need of it

Checkpoints, norms and averages are made of these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....mesh.comm.agreement import gather_facts
from ....mesh.comm.recording.recorder import CommTag
from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.sharded_tensor import ShardedTensor, local_of
from .stage_tensors import LINEAGE, StageTensors, TensorMeta, WholeTree, as_stored
from .stages.stage import Stage

_GROUPS = CommTag("pipeline: parameter groups of optimizers")


class WholeModel:
    """The tensors of the whole model of a pipeline.

    Args:
        model: modules of other ranks' stages have their parameters on "meta".
        stages: of this rank.
        tensors: of the pipeline.
        tied_names: for each further name of a tied parameter or buffer its first one.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, Stage],
        tensors: StageTensors,
        tied_names: Mapping[str, str],
    ) -> None:
        self._model = model
        self._stages = stages
        self.tensors = tensors
        self.tied_names = dict(tied_names)
        self._tree: WholeTree | None = None
        self._layouts: dict[str, Layout] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages: see `Pipeline.named_parameters`."""
        for name, copies in self.copies().items():
            yield name, copies[0]

    def copies(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of this rank's stages by first name.

        There are several objects where several of the stages have a copy.
        """
        copies: dict[str, list[nn.Parameter]] = {}
        seen: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    copies.setdefault(self.first_name(name), []).append(parameter)
        return copies

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Give further copies of this rank the value of the first, which the optimizer steps.

        Communication: none if they have the same layout.
        """
        for first, *others in self.copies().values():
            for copy in others:
                copy.copy_(first)

    def names(self) -> list[str]:
        """Return the names of all parameters of the model. Communication: none."""
        return [name for name, _ in self._model.named_parameters() if name not in self.tied_names]

    def first_name(self, name: str) -> str:
        return self.tied_names.get(name, name)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model: see `Pipeline.state_dict`."""
        own, tree = self._state()
        return self._in_order(self.tensors.whole(own, tree))

    def _in_order(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries by first name under all names, in the order of the model's state."""
        names = {name: self.first_name(name) for name in self._model.state_dict()}
        ordered = {name: whole[first] for name, first in names.items() if first in whole}
        return ordered | {name: entry for name, entry in whole.items() if name not in ordered}

    def state_told(
        self, own: Mapping[str, Any], common: Mapping[str, Any], told: Mapping[int, Any]
    ) -> dict[str, Any]:
        """Return the state of the whole model, from what ranks have told each other before.

        Args:
            own: as of `own_state`, at that time.
            common: as of `common_state`, at that time.
            told: `tensors.describe(own)` of ranks of all stages, by rank.
        """
        tree = self.tensors.merge(told)
        own = self._with_common(own, common, tree)
        return self._in_order(self.tensors.whole(own, tree))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state of the whole model: see `Pipeline.load_state_dict`."""
        own, tree = self._state()
        values: dict[str, Any] = {}
        for name, value in state.items():
            values.setdefault(self.first_name(name), value)
        _check_state(values, tree, strict)
        loaded: dict[str, Any] = {}
        for name, holders in tree.holders.items():
            if name not in values:
                continue
            for place, meta in holders.items():
                value = values[name]
                if isinstance(value, Tensor):
                    layout = meta.layout(self.tensors.mesh.device_type)
                    value = self.tensors.part(value, layout)
                if place == self.tensors.place:
                    loaded[name] = value
        for name, value in loaded.items():
            if isinstance(value, Tensor):
                loaded[name] = as_stored(value, own[name])
        for stage in self._stages.values():
            entries = {name: loaded.get(self.first_name(name)) for name in stage.state_dict()}
            known = {name: entry for name, entry in entries.items() if entry is not None}
            stage.load_state_dict(known, strict=False)
        in_stages = {
            self.first_name(name) for s in self._stages.values() for name in s.state_dict()
        }
        common = {name: entry for name, entry in loaded.items() if name not in in_stages}
        self._model.load_state_dict(common, strict=False)

    def _state(self) -> tuple[dict[str, Any], WholeTree]:
        """Return the state of this rank by first name, and what all ranks have.

        What belongs to no stage is on every rank.

        Communication: one all_gather of small objects over the axis.
        """
        own = self.own_state()
        tree = self.tensors.exchange(own)
        own = self._with_common(own, self.common_state(own), tree)
        self._tree = None  # to be exchanged anew, by all ranks
        return own, tree

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank's stages by first name. Communication: none."""
        own: dict[str, Any] = {}
        for stage in self._stages.values():
            for name, x in stage.state_dict().items():
                own.setdefault(self.first_name(name), x)
        return own

    def common_state(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's state that is not in `own`, by first name: of no stage, or of others.

        Communication: none.
        """
        common: dict[str, Any] = {}
        for name, x in self._model.state_dict().items():
            first = self.first_name(name)
            if first not in own:
                common.setdefault(first, x)
        return common

    def _with_common(
        self, own: Mapping[str, Any], common: Mapping[str, Any], tree: WholeTree
    ) -> dict[str, Any]:
        """Return this rank's entries with those of no stage, which are added to the tree."""
        entries = dict(own)
        for name, x in common.items():
            if name not in tree.holders:
                entries[name] = x
                tree.holders[name] = self.tensors.everywhere(x)
        return entries

    # -- trees by parameter ------------------------------------------------------------------------

    def tree(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return trees of tensors by parameter for the whole model, as `state_dict` does.

        Args:
            own: trees by the names of this rank's parameters, such as averages or the state of an
                optimizer: with tensors laid out like the parameter, or the same on all ranks of the
                stage; tensors without dims that are plain are the same value on every rank.

        Communication: one all_gather of small objects over the axis.
        """
        entries = self.entries_of(own)
        tree = self.tensors.exchange(entries)
        return without_scalars(self.tensors.whole(entries, tree))

    def entries_of(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return trees of this rank's parameters by first name. Communication: none."""
        entries: dict[str, Any] = {}
        for name, entry in own.items():
            entries.setdefault(self.first_name(name), with_scalars(entry))
        return entries

    def tree_told(self, entries: Mapping[str, Any], told: Mapping[int, Any]) -> dict[str, Any]:
        """Return what `tree` does, from what ranks have told each other before.

        Args:
            entries: as of `entries_of`, at that time.
            told: `tensors.describe(entries)` of ranks of all stages, by rank.
        """
        return without_scalars(self.tensors.whole(entries, self.tensors.merge(told)))

    def own_tree(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this rank's parameters need of a result of `tree`, in their layouts.

        The result may be of any pipeline. Every rank calls it with the same tree.

        Raises:
            ValueError: on every rank, a name that is not a parameter's.

        Communication: the redistribution of tensors that are elsewhere; one all_gather of small
            objects over the axis, if it was not made before.
        """
        tree = self.parameters_of_all()
        unknown = [name for name in whole if self.first_name(name) not in tree.holders]
        if unknown:
            raise ValueError(
                f"the state has parameters {unknown[:3]} that the pipeline does not have; it has "
                f"{list(tree.holders)[:3]}"
            )
        named = {self.first_name(name): entry for name, entry in whole.items()}
        return self.tensors.own_entries(named, tree, dict(self.named_parameters()))

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the parameter groups of all stages' optimizers, by parameter name.

        Groups with the same settings are one.

        Communication: one all_gather of small objects over the axis.
        """
        return self.groups_told(gather_facts(self.tensors.group, list(groups), tag=_GROUPS))

    def groups_told(self, told: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Return what `groups` does, from the groups of ranks of all stages, by rank."""
        named: list[dict[str, Any]] = []
        for groups_of_rank in told.values():
            for group in groups_of_rank:
                names = [self.first_name(name) for name in group["params"]]
                named.append({**group, "params": names})
        return merged_groups(named)

    def parameters(self) -> dict[str, ShardedTensor]:
        """Return the parameters of the whole model, as in `state_dict`, each once.

        Communication: one all_gather of small objects over the axis, the first time.
        """
        tree = self.parameters_of_all()
        return self.tensors.whole(dict(self.named_parameters()), tree)

    def gradients(self) -> dict[str, ShardedTensor]:
        """Return the gradients of the whole model by parameter, laid out as in `state_dict`.

        A parameter without a gradient has zeros.

        Communication: one all_gather of small objects over the axis, the first time.
        """
        tree = self.parameters_of_all()
        own: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            grad = parameter.grad
            own[name] = _zeros_like(parameter) if grad is None else grad
        return self.tensors.whole(own, tree)

    def own_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's parameters that have one."""
        own = dict(self.named_parameters())
        return {name: x.grad for name, x in own.items() if x.grad is not None}

    def has_gradients(self) -> dict[str, Tensor]:
        """Return for each parameter of the whole model whether it has a gradient, as 1 or 0.

        The number is in a tensor as in `state_dict`.

        Communication: as `gradients`.
        """
        tree = self.parameters_of_all()
        own = dict(self.named_parameters())
        entries: dict[str, Tensor] = {}
        for name, whole in self.parameters().items():
            layout = Layout.of(whole._layout.mesh, P(), (1,), torch.float32)
            values: list[float] = []
            if tree.first_holder(name) == self.tensors.place:
                values.append(own[name].grad is not None)
            local = torch.tensor(values, dtype=torch.float32, device=self.tensors.mesh.device)
            entries[name] = ShardedTensor._make_guarded(local, layout, LINEAGE)
        return entries

    def parameters_of_all(self) -> WholeTree:
        """Return which rank has which parameter.

        Raises:
            RuntimeError: this rank's have changed since all ranks told each other.

        Communication: one all_gather of small objects over the axis, the first time.
        """
        own = dict(self.named_parameters())
        if self._tree is None:
            self._tree = self.tensors.exchange(own)
            self._layouts = {n: self.tensors.layout_of(x) for n, x in own.items()}
        for name, x in own.items():
            before, now = self._layouts.get(name), self.tensors.layout_of(x)
            if before is not now:
                raise RuntimeError(
                    f"pipeline: parameter {name} was {before or 'not there'} when the ranks told "
                    f"each other what they have, and is {now} now: apply "
                    "parallelize, fully_shard and materialize before the first step, or call "
                    "state_dict() of the pipeline on every rank afterwards"
                )
        return self._tree


def _zeros_like(x: Tensor) -> Tensor:
    """Return zeros without memory, laid out like a tensor."""
    local = local_of(x)
    zeros = local.new_zeros(()).expand(local.shape)
    return as_stored(zeros, x)


def _check_state(values: Mapping[str, Any], tree: WholeTree, strict: bool) -> None:
    """Raise a RuntimeError for a state that does not fit, the same on every rank."""
    problems: list[str] = []
    missing = [name for name in tree.holders if name not in values]
    unknown = [name for name in values if name not in tree.holders]
    if strict and missing:
        problems.append(f"the state has no {', '.join(missing)}")
    if strict and unknown:
        problems.append(f"the model has no {', '.join(unknown)}")
    for name, holders in tree.holders.items():
        meta = next(iter(holders.values()))
        value = values.get(name)
        if not isinstance(value, Tensor) or not isinstance(meta, TensorMeta):
            continue
        if tuple(value.shape) != meta.shape:
            shapes = f"{list(value.shape)} in the state and {list(meta.shape)} in the model"
            problems.append(f"{name} is {shapes}")
    if problems:
        raise RuntimeError(f"Pipeline.load_state_dict: {'; '.join(problems)}")


# -- optimizers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """A tensor without dims, such as a count of steps, which ranks tell each other as a value."""

    value: Tensor


def with_scalars(state: Any) -> Any:
    """Return optimizer state with its plain tensors without dims as `Scalar`s."""

    def convert(x: Tensor) -> Tensor | Scalar:
        return x if isinstance(x, ShardedTensor) or x.ndim else Scalar(x.cpu())

    return pytree.tree_map_only(Tensor, convert, state)


def without_scalars(state: Any) -> Any:
    """Return optimizer state with `Scalar`s as tensors."""
    return pytree.tree_map_only(Scalar, lambda scalar: scalar.value, state)


def merged_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups of all stages, by parameter name.

    Those with the same settings are one.
    """
    merged: list[dict[str, Any]] = []
    for group in groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        alike = (x for x in merged if x == {**settings, "params": x["params"]})
        same = next(alike, None)
        if same is None:
            same = {**settings, "params": []}
            merged.append(same)
        same["params"] = list(dict.fromkeys([*same["params"], *group["params"]]))
    return merged
