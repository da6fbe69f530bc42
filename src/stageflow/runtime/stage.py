"""One stage on its worker: forward, backward, and what is kept between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from stageflow.errors import InputError, PipelineError
from stageflow.graph import Bundle, StageGraph, StageProgram, StageResult
from stageflow.runtime.batch import MicroBatch
from stageflow.runtime.buffer_values import BufferValues
from stageflow.runtime.entry import enter
from stageflow.runtime.loss import LossFunction, compute_loss
from stageflow.runtime.put_off import Pending, PutOff, run_pending
from stageflow.runtime.random import Drawn, Generators, Turns
from stageflow.runtime.recompute import recompute_layers
from stageflow.runtime.saved_buffers import SavedBuffers

Recompute = Literal["stage", "layer"]


@dataclass(frozen=True)
class StageOptions:
    """What the user chose for all stages.

    loss: see `compute_loss`.
    recompute: "stage" drops all activations after F and computes them again in the backward; "layer" does so layer by
        layer; None keeps them. One for all stages, or a tuple with one per stage.
    check_finite: stop at the first value that is NaN or infinite.
    autocast: dtype for `torch.autocast`, None for none.
    """

    loss: LossFunction | None = None
    recompute: Recompute | tuple[Recompute | None, ...] | None = None
    check_finite: bool = False
    autocast: torch.dtype | None = None

    def recompute_of(self, stage: int) -> Recompute | None:
        """How one stage recomputes."""
        return self.recompute[stage] if isinstance(self.recompute, tuple) else self.recompute


@dataclass(slots=True)
class Kept:
    """What one micro-batch leaves between its F and the end of its backward.

    leaves: per predecessor, the received tensors that require grad.
    outputs: per successor, what was sent and requires grad.
    loss: on the output stage.
    again: with recomputation, runs the forward once more and gives the above.
    finish: to be called when autograd is through.
    pending: weight gradients between I and W.
    """

    leaves: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    outputs: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    loss: Tensor | None = None
    again: Callable[[], Kept] | None = None
    finish: Callable[[], None] | None = None
    pending: Pending = field(default_factory=list)


@dataclass(slots=True)
class Ran:
    """What one run of the program gave: messages, output and loss for others, and what its backward needs."""

    bundles: dict[int, Bundle]
    output: Any
    loss: Tensor | None
    kept: Kept


@dataclass(frozen=True, slots=True)
class Job:
    """All that a forward of one micro-batch depends on."""

    microbatch: int
    inputs: MicroBatch
    received: Mapping[int, Bundle]
    key: tuple[int, int]


class Stage:
    """Runs one stage's program, micro-batch by micro-batch.

    Messages between stages wrap the program's own meta: ``[meta, names of the tensors that require grad]``.
    """

    def __init__(
        self,
        program: StageProgram,
        graph: StageGraph,
        device: torch.device,
        options: StageOptions,
        generators: Generators,
        turns: Turns | None = None,
    ) -> None:
        """turns: for stages that share this process with others."""
        self.program = program
        self.index = program.index
        self.is_output = program.index == graph.output_stage
        self.options = options
        self.put_off = PutOff()
        self._predecessors = graph.predecessors(program.index)
        self._device = device
        self._generators = generators
        self._turns = turns
        self._drawn: dict[bool, Drawn] = {}  # by train/eval mode
        self._kept: dict[int, Kept] = {}
        self._recompute = options.recompute_of(self.index)
        if self._recompute == "layer":
            if program.layers is None:
                raise InputError(f"stage {self.index} has no layers to recompute one by one: use recompute='stage'")
            recompute_layers(program.layers)
        self._trains = any(p.requires_grad for p in program.parameters.values())
        self._takes_leaves = getattr(program, "takes_leaves", False)
        self._differentiate = _on_cpu if device.type == "cpu" else torch.autograd.backward
        self._prepared = False
        self._saved_buffers = SavedBuffers(program)
        self._buffer_values = BufferValues(program)
        self._losses = self._detached = 0  # in the backwards of this step; those without a gradient

    def prepare_split_backward(self) -> None:
        """Make the layers able to put weight gradients off; before the first schedule that has I and W."""
        if not self._prepared:
            self.put_off.install(self.program.module)
            self._prepared = True

    def forward(
        self,
        microbatch: int,
        inputs: MicroBatch,
        received: Mapping[int, Bundle],
        key: tuple[int, int],
        *,
        train: bool,
        split: bool = False,
    ) -> Ran:
        """F.

        received: bundle of each predecessor. key: (seed, step). train: keep what a backward needs.
        split: that backward will be an I and a W.
        """
        job = Job(microbatch, inputs, received, key)
        self.put_off.splitting = split
        if not train:
            with torch.no_grad():
                return self._run(job, want_loss=False)
        ran = self._run_forgetful(job) if self._recompute == "stage" else self._run(job, want_loss=True)
        self._kept[microbatch] = ran.kept
        return ran

    def loss_of(self, output: Any, target: Any) -> Tensor:
        """The loss of an output, for an evaluation."""
        with torch.no_grad(), self._autocast():
            return compute_loss(self.options.loss, output, target)

    def _run(self, job: Job, *, want_loss: bool) -> Ran:
        """The program's forward, and the loss after the output stage; keeps a graph where grad is enabled."""
        kept = Kept()
        entered: dict[int, Bundle] = {}
        for producer, bundle in job.received.items():
            meta, trained = bundle.meta
            tensors = bundle.tensors
            if trained and torch.is_grad_enabled():
                kept.leaves[producer], tensors = enter(tensors, trained, self._takes_leaves)
            entered[producer] = Bundle(tensors, meta)
        loss = None
        with self._autocast(), self._keeping_buffers():
            result = self._call(job, entered)
            if self.is_output and want_loss:
                loss = kept.loss = compute_loss(self.options.loss, result.output, job.inputs.target)
        if self.options.check_finite:
            self._check_finite(result, loss, job.microbatch)
        bundles = {consumer: self._outgoing(consumer, bundle, kept) for consumer, bundle in result.bundles.items()}
        return Ran(bundles, result.output, None if loss is None else loss.detach(), kept)

    def _outgoing(self, consumer: int, bundle: Bundle, kept: Kept) -> Bundle:
        """The message for a successor: values without their graph, and the names of those that have one."""
        trained = {name: tensor for name, tensor in bundle.tensors.items() if tensor.requires_grad}
        if not trained:
            return Bundle(bundle.tensors, [bundle.meta, []])
        kept.outputs[consumer] = trained
        tensors = {name: tensor.detach() for name, tensor in bundle.tensors.items()}
        return Bundle(tensors, [bundle.meta, list(trained)])

    def _run_forgetful(self, job: Job) -> Ran:
        """F with recomputation (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost): keeps inputs only."""
        # the stage may change what it is given in place, so the first run gets copies
        copies = {p: Bundle({n: t.clone() for n, t in b.tensors.items()}, b.meta) for p, b in job.received.items()}
        before = self._buffer_values.take()
        with torch.no_grad():
            ran = self._run(Job(job.microbatch, job.inputs, copies, job.key), want_loss=True)
        if not self._trains and not any(bundle.meta[1] for bundle in job.received.values()):
            return ran

        def again() -> Kept:
            # as they were then; the micro-batches since have moved them on, and none may count twice
            now = self._buffer_values.take()
            self._buffer_values.put(before)
            with torch.enable_grad():
                kept = self._run(job, want_loss=True).kept
            kept.finish = lambda: self._buffer_values.put(now)
            return kept

        # without a graph it can't be told which outputs have a gradient: any that can have one may
        bundles = {
            consumer: Bundle(b.tensors, [b.meta[0], [n for n, t in b.tensors.items() if _differentiable(t)]])
            for consumer, b in ran.bundles.items()
        }
        return Ran(bundles, ran.output, ran.loss, Kept(again=again))

    def _call(self, job: Job, received: Mapping[int, Bundle]) -> StageResult:
        """The program's forward under the random keys of this micro-batch."""
        inputs = job.inputs
        training = self.program.module.training
        drawn = self._drawn.get(training)
        # one that is not keyed may begin to draw at any step, so it is looked at anew in each
        if drawn is not None and (drawn.torch or job.microbatch != 0):
            seed = self._generators.seeder(*job.key, job.microbatch, drawn)
            with nullcontext() if self._turns is None else self._turns.forward(drawn):
                seed(-1)
                return self.program.forward(inputs.args, inputs.kwargs, received, seed)
        result: list[StageResult] = []

        def run(seed: Callable[[int], None]) -> None:
            seed(-1)
            result.append(self.program.forward(inputs.args, inputs.kwargs, received, seed))

        with nullcontext() if self._turns is None else self._turns.forward(None):
            seed = self._generators.seeder(*job.key, job.microbatch, None)
            seen = self._generators.watch(run, seed)
            # in a process of its own a stage is keyed even if it was not seen to draw: it may yet
            seen = seen if self._turns is not None else replace(seen, torch=True)
            self._drawn[training] = seen if drawn is None else seen | drawn
        return result[0]

    def backward(self, microbatch: int, gradients: Mapping[int, Bundle], weight: float) -> dict[int, Bundle]:
        """B: gradients of the inputs, for each predecessor, and of the weights, added to ``.grad``.

        weight: of this micro-batch's loss in the batch's.
        """
        return self._backward(self._kept.pop(microbatch), gradients, weight)

    def backward_inputs(self, microbatch: int, gradients: Mapping[int, Bundle], weight: float) -> dict[int, Bundle]:
        """I: as `backward`, but weight gradients of linear layers and convolutions wait for `backward_weights`."""
        kept = self._kept.pop(microbatch)
        self.put_off.splitting = True  # for a recomputation
        self.put_off.pending = kept.pending
        try:
            bundles = self._backward(kept, gradients, weight)
        finally:
            self.put_off.pending = None
        # what autograd kept is free now; only what W needs stays
        self._kept[microbatch] = Kept(pending=kept.pending)
        return bundles

    def backward_weights(self, microbatch: int) -> None:
        """W: the weight gradients that I put off."""
        with torch.no_grad():
            run_pending(self._kept.pop(microbatch).pending)

    def _backward(self, kept: Kept, gradients: Mapping[int, Bundle], weight: float) -> dict[int, Bundle]:
        if kept.again is not None:
            kept = kept.again()
        if kept.loss is not None:
            self._losses += 1
            self._detached += not kept.loss.requires_grad and (self._trains or any(kept.leaves.values()))
        roots: dict[int, tuple[Tensor, Tensor]] = {}  # a value that several stages use gets the sum
        for consumer, bundle in gradients.items():
            sent = kept.outputs.get(consumer, {})
            for name, gradient in bundle.tensors.items():
                tensor = sent.get(name)
                if tensor is not None:
                    before = roots.get(id(tensor))
                    roots[id(tensor)] = (tensor, gradient if before is None else before[1] + gradient)
        # with no weight it adds nothing, not even a NaN (a mean over no words)
        if kept.loss is not None and kept.loss.requires_grad and weight != 0.0:
            roots[id(kept.loss)] = (kept.loss, torch.full_like(kept.loss, weight))
        if roots:
            tensors, grads = zip(*roots.values(), strict=True)
            with nullcontext() if self._turns is None else self._turns.backward():
                self._differentiate(tensors, grads)
        if kept.finish is not None:
            kept.finish()
        bundles = {}
        for producer in self._predecessors:
            leaves = kept.leaves.get(producer, {})
            bundles[producer] = Bundle({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
        return bundles

    def check_losses(self) -> None:
        """After a step's backwards: raise InputError if there was a gradient to be had and no loss gave one."""
        losses, detached, self._losses, self._detached = self._losses, self._detached, 0, 0
        if losses and losses == detached:
            raise InputError(
                "the loss depends on no parameter, so that nothing would be trained: expected a loss with a gradient "
                "(requires_grad) of the output; was it detached, made by .item() or torch.tensor(), or under no_grad?"
            )

    def _check_finite(self, result: StageResult, loss: Tensor | None, microbatch: int) -> None:
        values = {
            f"{self.program.origin(name)}, for stage {c},": t
            for c, b in result.bundles.items()
            for name, t in b.tensors.items()
        }
        if loss is not None:
            values["the loss"] = loss
        for what, tensor in values.items():
            if _differentiable(tensor) and not bool(torch.isfinite(tensor.detach()).all()):
                raise PipelineError(
                    f"stage {self.index}, micro-batch {microbatch}: {what} holds NaN or infinity (check_finite=True); "
                    "everything before this stage was finite"
                )

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are kept now."""
        return len(self._kept)

    def clear(self) -> None:
        """Drop what an interrupted step left behind."""
        self._kept.clear()
        self._losses = self._detached = 0
        self.put_off.pending = None

    def _keeping_buffers(self) -> AbstractContextManager[Any]:
        if not torch.is_grad_enabled():
            return nullcontext()
        return self._saved_buffers.protected(self.program.module.training)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.options.autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.options.autocast)


def _on_cpu(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """As `torch.autograd.backward`, without a look at what is known to fit, which takes as long as a small layer."""
    torch.autograd.Variable._execution_engine.run_backward(
        tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
