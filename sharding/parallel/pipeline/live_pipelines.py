"""The pipelines of a rank that exist.

By them, functions of plain lists of tensors know that a list has only those of this rank's stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from ....mesh.comm.world import World
from .state import WholeModel


class LivePipelines:
    """The whole models of a rank's pipelines."""

    def __init__(self, _: World) -> None:
        self._models: weakref.WeakSet[WholeModel] = weakref.WeakSet()

    def add(self, model: WholeModel) -> None:
        self._models.add(model)

    def owner_of(self, tensors: Iterable[Tensor]) -> WholeModel | None:
        """Return the model of which some of these tensors are parameters, or their gradients.

        None if there is no such model.
        """
        if not self._models:
            return None
        numbers = {id(x) for x in tensors}
        for model in self._models:
            for _, parameter in model.named_parameters():
                if id(parameter) in numbers or id(parameter.grad) in numbers:
                    return model
        return None
