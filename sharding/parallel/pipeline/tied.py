"""Parameters that several stages use, such as an embedding that is the head as well.

    stage 0    embed.weight   its gradient  g0   ->  g0 + g3         the same on both, so that the
    stage 3    head.weight    its gradient  g3   ->  g0 + g3         optimizers keep them equal

Each stage has a copy. In a step each copy collects its own gradient, apart from what `.grad` had
before; then the gradients are summed over the copies and added to `.grad`. Of several copies of one
rank only the first is a parameter of the pipeline; the others get its value before each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ....mesh.comm.recording.recorder import CommTag
from ...layout.layout import Layout
from ...tensor.sharded_tensor import ShardedTensor, local_of
from .stage_tensors import LINEAGE, TensorMeta
from .state import WholeModel

_SUM = CommTag("pipeline: gradients of tied parameters")


def tied_names(model: nn.Module | Sequence[nn.Module]) -> dict[str, str]:
    """Return for each further name of a parameter or buffer its first one.

        {"embed.weight": w, "head.weight": w}   ->   {"head.weight": "embed.weight"}

    Args:
        model: the whole model, before it is divided; or a list of modules, one per stage.
    """
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    first: dict[int, str] = {}
    earlier_names: dict[str, str] = {}
    tensors: dict[str, Tensor] = dict(whole.named_parameters(remove_duplicate=False))
    tensors |= dict(whole.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        first_name = first.setdefault(id(tensor), name)
        if first_name != name:
            earlier_names[name] = first_name
    return earlier_names


class TiedParameters:
    """The copies of parameters that this rank's stages share with others.

    Args:
        whole: the whole model of the pipeline.

    Communication: one all_gather of small objects over the axis, if it was not made before.
    """

    def __init__(self, whole: WholeModel) -> None:
        self._tensors = whole.tensors
        by_name = whole.copies()
        self._copies: dict[str, Sequence[nn.Parameter]] = {}
        self._metas: dict[str, Mapping[int, TensorMeta]] = {}
        for name, metas in whole.parameters_of_all().holders.items():
            if self._tensors.place in metas and (len(metas) > 1 or len(by_name[name]) > 1):
                self._copies[name] = by_name[name]
                self._metas[name] = {
                    place: self._tensors.in_own_pipeline(meta) for place, meta in metas.items()
                }

    @torch.no_grad()
    def make_equal(self) -> None:
        """Give the copies of all ranks the value of the first one.

        Communication: for each parameter, its redistribution from the first copy to those of other
            ranks.
        """
        for name, copies in self._copies.items():
            first, *others = self._metas[name]
            value = self._at(first, name, copies[0])
            for place in others:
                part = self._tensors.part(value, self._layout(name, place))
                if place == self._tensors.place and part is not None:
                    local_of(copies[0]).copy_(part)

    @contextmanager
    def sum_gradients(self) -> Iterator[None]:
        """Sum the gradients of copies that are computed in the block, and add them to `.grad`.

        Where a rank has several copies, they are added to that of the first.

        An exception leaves the gradients as before the block.

        Communication: one all_reduce for parameters of the same stages and dtype; where the copies
            have different layouts, the redistribution of each gradient to the others.
        """
        trained = {name: copies for name, copies in self._copies.items() if copies[0].requires_grad}
        before: list[tuple[nn.Parameter, Tensor | None]] = []
        for copies in trained.values():
            before += [(copy, copy.grad) for copy in copies]
        for copy, _ in before:
            copy.grad = None
        try:
            yield
        except BaseException:
            for copy, grad in before:
                copy.grad = grad
            raise
        with torch.no_grad():
            self._sum(trained)
            for _, *others in trained.values():
                for copy in others:
                    copy.grad = None
            for copy, grad in before:
                if grad is not None:
                    copy.grad = grad if copy.grad is None else grad.add_(copy.grad)

    def _sum(self, trained: Mapping[str, Sequence[nn.Parameter]]) -> None:
        buckets: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name, copies in trained.items():
            metas = self._metas[name]
            if all(meta.has_layout_of(metas[self._tensors.place]) for meta in metas.values()):
                buckets.setdefault((tuple(metas), copies[0].dtype), []).append(name)
            else:
                self._sum_by_redistribution(name, copies)
        for (places, _), names in buckets.items():
            self._sum_together(places, {name: trained[name] for name in names})

    def _sum_together(
        self, places: Sequence[int], bucket: Mapping[str, Sequence[nn.Parameter]]
    ) -> None:
        """Sum gradients of parameters whose copies have the same layout, in one buffer."""
        own = {name: _sum_of_copies(copies) for name, copies in bucket.items()}
        parts: list[Tensor] = []
        for name, copies in bucket.items():
            local, grad = local_of(copies[0]), own[name]
            parts.append((torch.zeros_like(local) if grad is None else grad).reshape(-1))
        # for each parameter how many copies have a gradient: without any, it stays None
        parts.append(parts[0].new_tensor([grad is not None for grad in own.values()]))
        buffer = torch.cat(parts)
        if len(places) > 1:
            self._tensors.group_of(places).all_reduce(buffer, tag=_SUM)
        *sums, counts = buffer.split([part.numel() for part in parts])
        for number, (name, copies) in enumerate(bucket.items()):
            # only ranks without a gradient read the count, for which the host waits
            if own[name] is not None or counts[number].item():
                _set_grad(copies[0], sums[number].view(local_of(copies[0]).shape))

    def _sum_by_redistribution(self, name: str, copies: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of copies with different layouts, in each of these."""
        own = _sum_of_copies(copies)
        local = torch.zeros_like(local_of(copies[0])) if own is None else own
        total: Tensor | None = None
        for source in self._metas[name]:
            value = self._at(source, name, copies[0], local)
            for destination in self._metas[name]:
                part = self._tensors.part(value, self._layout(name, destination))
                if destination == self._tensors.place and part is not None:
                    total = part.clone() if total is None else total.add_(part)
        if total is not None:
            _set_grad(copies[0], total)

    def _layout(self, name: str, place: int) -> Layout:
        return self._metas[name][place].layout(self._tensors.mesh.device_type)

    def _at(
        self, place: int, name: str, copy: nn.Parameter, local: Tensor | None = None
    ) -> ShardedTensor:
        """Return the copy of the ranks at a place; with `local`, another tensor laid out like it.

        On other ranks it is one of which they hold nothing.
        """
        if place != self._tensors.place:
            return self._tensors.elsewhere(self._metas[name][place])
        layout = self._layout(name, place)
        part = local_of(copy).detach() if local is None else local
        return ShardedTensor._make_guarded(part, layout.replace(dtype=part.dtype), LINEAGE)


def _sum_of_copies(copies: Sequence[nn.Parameter]) -> Tensor | None:
    """Return the local part of the sum of this rank's copies' gradients.

    It is laid out as the first copy; None if no copy has a gradient.
    """
    first = copies[0]
    total: Tensor | None = None
    for copy in copies:
        grad = copy.grad
        if grad is None:
            continue
        if isinstance(grad, ShardedTensor) and isinstance(first, ShardedTensor):
            grad = grad.redistribute(first.mesh, first._layout.grad.spec)
        part = local_of(grad)
        total = part if total is None else total + part
    return total


def _set_grad(parameter: nn.Parameter, part: Tensor) -> None:
    """Set a gradient from its local part."""
    if isinstance(parameter, ShardedTensor):
        layout = parameter._layout.grad.replace(dtype=part.dtype)
        parameter.grad = ShardedTensor._make_guarded(part, layout, LINEAGE)
    else:
        parameter.grad = part
