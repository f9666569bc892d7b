"""Which dim of a value between stages has the rows of a microbatch, found by its shapes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .microbatches import Microbatch, with_own_rows
from .stage_meshes import RowRange, StageMeshes
from .stages.staged_model import StagedModel


class RowsOfStages:
    """The rows of this rank's microbatches, where stages have meshes of different shapes.

    Args:
        staged: the model.
        meshes: of the stages.
    """

    def __init__(self, staged: StagedModel, meshes: StageMeshes) -> None:
        self._staged = staged
        self._own = meshes.own_rows()
        # by signature of this rank's rows: those of all rows, and of a part of them
        self._probes: dict[Hashable, tuple[Hashable, Hashable]] = {}

    def own(self, batch: Microbatch) -> Microbatch:
        """Return this rank's rows of a microbatch that all ranks have whole.

        Raises:
            ValueError: see `with_own_rows`.
        """
        part = with_own_rows(batch, RowRange(0, 1, self._own.of))
        own = with_own_rows(batch, self._own)
        whole_signature = self._staged.signature(batch.args, batch.kwargs)
        part_signature = self._staged.signature(part.args, part.kwargs)
        own_signature = self._staged.signature(own.args, own.kwargs)
        self._probes[own_signature] = whole_signature, part_signature
        return own

    def dims(self, stage: int, signature: Hashable) -> Sequence[int | None]:
        """Return for each value that enters a stage the dim with the rows, None if it has none.

        Args:
            signature: of this rank's rows.

        Raises:
            RuntimeError: a value has another dependence on the number of rows.
        """
        if self._own.of == 1:
            whole = part = signature
        else:
            whole, part = self._probes[signature]
        dims: list[int | None] = []
        metas = zip(
            self._staged.boundary(whole, stage), self._staged.boundary(part, stage), strict=True
        )
        for number, (of_all, of_part) in enumerate(metas):
            sizes = list(enumerate(zip(of_all.shape, of_part.shape, strict=True)))
            different = [dim for dim, (one, other) in sizes if one != other]
            exact = [dim for dim, (one, other) in sizes if one == other * self._own.of]
            if len(different) > 1 or any(dim not in exact for dim in different):
                raise RuntimeError(
                    f"pipeline: value {number} passed into stage {stage} has shape "
                    f"{tuple(of_all.shape)} for all rows of a microbatch, and "
                    f"{tuple(of_part.shape)} for 1/{self._own.of} of them: between stages with "
                    "meshes of different shapes one dim must be in proportion to the rows"
                )
            dims.append(different[0] if different else None)
        return dims
