"""The values that a stage's buffers have before each forward, for a recomputation to start from once more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stageflow.graph import StageProgram


class BufferValues:
    """Snapshots of the buffers of one stage, which share the values that did not change from one to the next.

    What a forward changes depends on more than train or eval mode, so every buffer is looked at every time: by its
    values, for batch norm does not count the version of its running statistics up.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._last: dict[str, Tensor] = {}
        self._moving: set[str] = set()  # seen to change; copied without a look, which costs more

    def take(self) -> dict[str, Tensor]:
        """What the buffers hold now. Not to be changed."""
        for name, buffer in self._program.buffers.items():
            last = self._last.get(name)
            if last is not None and name not in self._moving:
                if torch.equal(last, buffer):
                    continue
                self._moving.add(name)
            self._last[name] = buffer.detach().clone()
        return dict(self._last)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Let the buffers hold again what they held when it was taken."""
        with torch.no_grad():
            for name in self._moving:
                self._program.buffers[name].copy_(values[name])
