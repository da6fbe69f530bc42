"""How many bytes a block keeps between its forward and its backward, counted by memory, not by tensor.

Autograd tells what it saves by way of hooks. Memory that several tensors share counts once; parameters, buffers and
the batch itself don't count, as they are there anyway. What one block made and the next one saves counts where it was
saved first, so that the sum over the blocks of a stage is what the stage saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stageflow.graph import Bundle, StageProgram, StageResult
from stageflow.runtime.batch import MicroBatch
from stageflow.runtime.entry import enter
from stageflow.runtime.loss import LossFunction, compute_loss
from stageflow.runtime.put_off import PutOff
from stageflow.transport.structure import flatten


@dataclass(frozen=True)
class Sizes:
    """Bytes, as the fields of a `Block` of the same names; sent: the block's own messages."""

    activation: int
    entry: int
    exit: int
    deferred: int
    boundary: int
    sent: dict[int, Bundle]


@dataclass
class Memory:
    """Pieces of memory and their bytes. Holds on to the tensors, so that no address is used twice."""

    sizes: dict[int, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.tensors.append(tensor.detach())

    def __sub__(self, other: Memory) -> Memory:
        return Memory({key: size for key, size in self.sizes.items() if key not in other.sizes})

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class _Ran:
    """What a watched forward showed: memory that autograd saved, that is kept as its inputs, and that arrived."""

    saved: Memory
    leaves: Memory
    arrived: Memory
    sent: dict[int, Bundle]
    loss: Tensor | None


@dataclass
class Counter:
    """Counts block after block, in order.

    seed: sets the random generators, as given to a program. counted: what earlier blocks saved.
    """

    loss: LossFunction | None
    seed: Callable[[int], None]
    counted: Memory = field(default_factory=Memory)

    def count(
        self,
        program: StageProgram,
        put_off: PutOff,
        inputs: MicroBatch,
        received: Mapping[int, Bundle],
        is_output: bool,
    ) -> Sizes:
        """Run one block's forward, and its backward up to the point where W is left.

        put_off: installed in the program's layers, and splitting unless the model can't.
        received: as `Stage` sends, ``[meta, names of trained tensors]``.
        """
        ours = Memory()
        ours.add([*program.parameters.values(), *program.buffers.values()])
        ours.add(flatten((inputs.args, inputs.kwargs, inputs.target))[0].values())
        # a stage learns from its first run whether it changes what it was given, and copies it
        self._forward(program, inputs, _copies(received))
        ran = self._run(program, inputs, received, is_output)
        roots = [tensor for bundle in ran.sent.values() for tensor in bundle.tensors.values() if tensor.requires_grad]
        outputs = Memory()
        outputs.add(roots)
        if ran.loss is not None and ran.loss.requires_grad:
            roots.append(ran.loss)
        new = ran.saved - ours - self.counted
        input_saved = {key: size for key, size in ran.arrived.sizes.items() if key in ran.saved.sizes}
        deferred = self._put_off(put_off, roots) - ours
        self.counted.sizes.update(new.sizes)
        self.counted.tensors += [*ran.saved.tensors, *ran.arrived.tensors]
        return Sizes(
            activation=new.total,
            entry=(Memory({**ran.leaves.sizes, **input_saved}) - new).total,
            exit=(outputs - ran.saved - ran.arrived).total,
            deferred=deferred.total,
            boundary=ran.arrived.total,
            sent={consumer: _outgoing(bundle) for consumer, bundle in ran.sent.items()},
        )

    def _run(self, program: StageProgram, inputs: MicroBatch, received: Mapping[int, Bundle], is_output: bool) -> _Ran:
        """One forward, watched."""
        arrived, leaves, saved = Memory(), Memory(), Memory()
        entered: dict[int, Bundle] = {}
        for producer, bundle in received.items():
            meta, trained = bundle.meta
            tensors = bundle.tensors
            arrived.add(tensors.values())
            if trained:
                leaf, tensors = enter(tensors, trained, getattr(program, "takes_leaves", False))
                leaves.add(leaf.values())
            entered[producer] = Bundle(tensors, meta)

        def pack(tensor: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():  # a block may be watching torch calls itself
                if torch._C._has_storage(tensor):
                    saved.add([tensor])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = self._forward(program, inputs, entered)
            loss = compute_loss(self.loss, result.output, inputs.target) if is_output else None
        return _Ran(saved, leaves, arrived, result.bundles, loss)

    def _forward(self, program: StageProgram, inputs: MicroBatch, received: Mapping[int, Bundle]) -> StageResult:
        """With the random draws of a real run, which a model may decide by."""
        self.seed(-1)
        return program.forward(inputs.args, inputs.kwargs, received, self.seed)

    def _put_off(self, put_off: PutOff, roots: list[Tensor]) -> Memory:
        """What an I leaves for its W."""
        pending: list[Any] = []
        put_off.pending = pending
        try:
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        finally:
            put_off.pending = None
        left = Memory()
        for _, arguments in pending:
            left.add(tensor for tensor in arguments if isinstance(tensor, Tensor))
        return left


def _copies(received: Mapping[int, Bundle]) -> dict[int, Bundle]:
    return {p: Bundle({name: t.clone() for name, t in b.tensors.items()}, b.meta[0]) for p, b in received.items()}


def _outgoing(bundle: Bundle) -> Bundle:
    trained = [name for name, tensor in bundle.tensors.items() if tensor.requires_grad]
    return Bundle({name: tensor.detach() for name, tensor in bundle.tensors.items()}, [bundle.meta, trained])


def crossing(sent: list[dict[int, Bundle]]) -> list[int]:
    """Bytes that cross a cut after each block: values made up to it that a later block uses, each once.

    sent: per block, what it sends to each later one.
    """
    last_use: dict[tuple[int, tuple[int, ...], int], tuple[int, int, int]] = {}
    for producer, bundles in enumerate(sent):
        for consumer, bundle in bundles.items():
            for tensor in bundle.tensors.values():
                key = (tensor.untyped_storage()._cdata, tuple(tensor.shape), int(tensor.storage_offset()))
                first, latest, size = last_use.get(key, (producer, consumer, tensor.nbytes))
                last_use[key] = (min(first, producer), max(latest, consumer), size)
    return [sum(size for first, latest, size in last_use.values() if first <= cut < latest) for cut in range(len(sent))]


def optimizer_bytes(parameters: Sequence[Tensor], optimizer: Any) -> int:
    """Bytes of the state that an optimizer keeps for these parameters after a step."""
    if optimizer is None or not parameters:
        return 0
    stand_ins = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    made = optimizer(stand_ins)
    made.step()
    state = Memory()
    state.add(t for held in made.state.values() for t in held.values() if isinstance(t, Tensor))
    return state.total
