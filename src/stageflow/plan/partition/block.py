"""What a partition is made of: measured blocks, the devices they go to, and the weights that several of them share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from stageflow.errors import InputError


@dataclass(frozen=True)
class Block:
    """A piece of the model that stays in one stage, and what it costs per micro-batch.

    name: path of the module it starts with; a stage can start there.
    forward, backward: seconds of F and of a whole B.
    backward_input, backward_weight: seconds of I and W.
    recompute: seconds of a forward run again before a backward; None: as long as the forward.
    activation: bytes that F leaves for the backward. Of the block's input only what no earlier block keeps anyway.
    entry, exit: bytes kept on top where a stage begins, or ends, with this block: its whole input as received, and
        its output as sent.
    deferred: bytes that I leaves for W.
    boundary: bytes of its input, which is what a stage keeps that begins here and recomputes its activations.
    parameters, gradients, optimizer: bytes of parameters and buffers, of gradients, and of the optimizer's state.
    output: bytes that cross a cut right after this block: values made up to here that a later block uses.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    recompute: float | None = None
    activation: float = 0.0
    entry: float = 0.0
    exit: float = 0.0
    deferred: float = 0.0
    boundary: float = 0.0
    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    output: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (field.name == "recompute" and value is None):
                continue
            if not (isinstance(value, (int, float)) and 0.0 <= value < math.inf):
                raise InputError(
                    f"block {self.name!r}: {field.name} is {value!r}; it must be a number, finite and not negative"
                )

    @property
    def again(self) -> float:
        """Seconds of its forward run again."""
        return self.forward if self.recompute is None else self.recompute

    @property
    def static(self) -> float:
        """Bytes that stay for the whole step: parameters, gradients, optimizer state."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Device:
    """One worker's device, and its link to the next one.

    speed: how many times as fast as the device that the blocks were measured on; times are divided by it.
    memory: bytes that a stage may take.
    latency: seconds until the first byte is over at the next device. bandwidth: bytes per second after that, in each
        direction; values and gradients don't get into each other's way.
    """

    speed: float = 1.0
    memory: float = math.inf
    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 < self.speed < math.inf:
            raise InputError(f"the speed of a device is {self.speed}; it must be above zero and finite")
        if not self.memory > 0.0:
            raise InputError(f"the memory of a device is {self.memory} bytes; it must be above zero")
        if not 0.0 <= self.latency < math.inf:
            raise InputError(f"the latency of a link is {self.latency} s; it must be finite and not negative")
        if not self.bandwidth > 0.0:
            raise InputError(f"the bandwidth of a link is {self.bandwidth} bytes/s; it must be above zero")

    def transfer(self, size: float) -> float:
        """Seconds for so many bytes to be over at the next device; nothing is sent for none."""
        return self.latency + size / self.bandwidth if size else 0.0


@dataclass(frozen=True)
class Tie:
    """One weight that several blocks use, such as an embedding that is the head's weight as well.

    blocks: their numbers, ascending. The stage of the first one owns the weight, which is counted in that block; every
        further stage that holds a user keeps a copy, sends its gradient there once a step and gets the new value back.
    parameters, gradients: bytes of such a copy and of its gradient.
    """

    blocks: tuple[int, ...]
    parameters: float
    gradients: float = 0.0

    def __post_init__(self) -> None:
        if len(self.blocks) < 2 or list(self.blocks) != sorted(set(self.blocks)) or self.blocks[0] < 0:
            raise InputError(f"a tie joins two or more blocks, by their numbers in ascending order, got {self.blocks}")
        if not (0 <= self.parameters < math.inf and 0 <= self.gradients < math.inf):
            raise InputError(f"the bytes of a tie must be finite and not negative, got {self}")

    @property
    def bytes(self) -> float:
        """Of the copy with its gradient; as many travel once a step."""
        return self.parameters + self.gradients
