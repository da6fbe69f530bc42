"""Measuring blocks by running them as stages of a pipeline, on one device and one after the other."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from stageflow.graph import Bundle, StageProgram
from stageflow.plan.partition import Block, Tie
from stageflow.plan.profile import Profile
from stageflow.plan.profile_bytes import Counter, Sizes, crossing, optimizer_bytes
from stageflow.plan.profile_pieces import take_apart
from stageflow.plan.profile_settings import Settings, first_microbatch, moved
from stageflow.plan.progress import Bar
from stageflow.runtime.batch import MicroBatch
from stageflow.runtime.random import Generators
from stageflow.runtime.stage import Stage, StageOptions
from stageflow.split import ModelLike, Split
from stageflow.split.measure import smooth
from stageflow.transport.structure import flatten

KEY = (0, 0)  # of random draws: seed and step


def measure(model: ModelLike, example: Any, settings: Settings) -> Profile:
    """See `profile_model`."""
    microbatch, samples = first_microbatch(model, example, settings)
    with _threads(settings.threads), own_chance():
        name, split = take_apart(model, (microbatch.args, microbatch.kwargs), settings.split, settings.at_least)
        device = torch.device(settings.device) if settings.device is not None else _device_of(microbatch)
        line = Line(split, device, moved(microbatch, device, settings.dtype), settings)
        sizes = line.count()
        times = line.time(settings.rounds, settings.warm_up, settings.progress)
        blocks = make_blocks(split, line.programs, sizes, times, settings)
        return Profile(
            model=name,
            way=split.way,
            blocks=tuple(blocks),
            ties=tuple(find_ties(split)),
            device=_words(device),
            measured=True,
            samples=samples,
            rounds=settings.rounds,
            threads=torch.get_num_threads(),
        )


FORWARD_BACKWARD, SPLIT, RECOMPUTING = ("F", "B"), ("", "I", "W"), ("", "R")  # what steps are noted as


class Line:
    """All blocks of a model in this process, each run as a stage would be."""

    optional: tuple[tuple[str, ...], ...] = (SPLIT, RECOMPUTING)

    def __init__(self, split: Split, device: torch.device, microbatch: MicroBatch, settings: Settings) -> None:
        self._graph = split.graph
        self._microbatch = microbatch
        self._device = device
        self._loss = settings.loss_of
        generators = Generators(device)
        self.programs = [spec.build(device) for spec in split.specs]
        for program in self.programs:
            program.module.train()
            for tensor in (*program.parameters.values(), *program.buffers.values()):
                if settings.dtype is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.to(settings.dtype)
        options = {
            again: StageOptions(self._loss, "stage" if again else None, autocast=settings.autocast)
            for again in (False, True)
        }
        self._stages, self._recomputing = (
            [Stage(program, self._graph, device, options[again], generators) for program in self.programs]
            for again in (False, True)
        )
        for stage in self._stages:
            stage.prepare_split_backward()
        self._generators = generators
        self._autocast = settings.autocast
        self._kinds: list[object] = []
        self._steps = [FORWARD_BACKWARD, *filter(self._can, self.optional)]

    def _can(self, ways: tuple[str, ...]) -> bool:
        """Whether the model can be run like that: some ask for gradients in their forward, or change what they get."""
        try:
            with self._generators.preserved():
                self._step(ways)
        except Exception:
            for stage in (*self._stages, *self._recomputing):
                stage.clear()
            return False
        return True

    def count(self) -> list[Sizes]:
        """Bytes of each block."""
        for stage in self._stages:
            stage.put_off.splitting = SPLIT in self._steps
        counter = Counter(self._loss, self._generators.seeder(*KEY, 0, None))
        inbox: list[dict[int, Bundle]] = [{} for _ in self._stages]
        found: list[Sizes] = []
        with self._generators.preserved(), self._casting():
            for stage in self._stages:
                received = inbox[stage.index]
                self._kinds.append(_kind(stage.program, received))
                sizes = counter.count(stage.program, stage.put_off, self._microbatch, received, stage.is_output)
                for consumer, bundle in sizes.sent.items():
                    inbox[consumer][stage.index] = bundle
                found.append(sizes)
        return found

    def time(self, rounds: int, warm_up: int, progress: bool) -> dict[str, list[float]]:
        """Seconds of F, B, I, W and of recomputation ("again"), per block."""
        samples: dict[str, list[list[float]]] = {kind: [[] for _ in self._stages] for kind in ("F", "B", "I", "W", "R")}
        bar: Any = Bar(total=rounds + warm_up, unit="round", desc="measuring", leave=False, disable=not progress)
        with bar, self._generators.preserved(), _no_collection():
            for number in range(-warm_up, rounds):
                for ways in self._steps:
                    for kind, seconds in self._step(ways).items():
                        if number >= 0 and kind:
                            for stage, taken in enumerate(seconds):
                                samples[kind][stage].append(taken)
                bar.update()
        times = {kind: smooth(each, self._kinds) for kind, each in samples.items() if each[0]}
        return self._completed(times)

    def _completed(self, times: dict[str, list[float]]) -> dict[str, list[float]]:
        """With what was not run: a backward that can't be split is all I, and recomputation takes another forward."""
        forward, backward = times["F"], times["B"]
        times.setdefault("I", backward)
        times.setdefault("W", [0.0] * len(backward))
        with_recomputation = times.pop("R", [sum(both) for both in zip(forward, backward, strict=True)])
        times["again"] = [max(0.0, more - less) for more, less in zip(with_recomputation, backward, strict=True)]
        return times

    def _step(self, ways: tuple[str, ...]) -> dict[str, list[float]]:
        """One micro-batch through all blocks and back. ways: what to note the forward and the backwards as."""
        stages = self._recomputing if "R" in ways else self._stages
        split = "I" in ways
        taken: dict[str, list[float]] = {kind: [0.0] * len(stages) for kind in ways}
        inbox: list[dict[int, Bundle]] = [{} for _ in stages]
        for stage in stages:
            received = {producer: _copy(bundle) for producer, bundle in inbox[stage.index].items()}
            start = self._now()
            ran = stage.forward(0, self._microbatch, received, KEY, train=True, split=split)
            taken[ways[0]][stage.index] = self._now() - start
            for consumer, bundle in ran.bundles.items():
                inbox[consumer][stage.index] = bundle
        gradients: list[dict[int, Bundle]] = [{} for _ in stages]
        for stage in reversed(stages):
            backward = stage.backward_inputs if split else stage.backward
            start = self._now()
            back = backward(0, gradients[stage.index], 1.0)
            taken[ways[1]][stage.index] = self._now() - start
            for producer, bundle in back.items():
                gradients[producer][stage.index] = bundle
        for stage in stages if split else ():
            start = self._now()
            stage.backward_weights(0)
            taken["W"][stage.index] = self._now() - start
        return taken

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _casting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)


def make_blocks(
    split: Split, programs: list[StageProgram], sizes: list[Sizes], times: dict[str, list[float]], settings: Settings
) -> Iterator[Block]:
    """Put the figures of each block together."""
    outputs = crossing([each.sent for each in sizes])
    for number, (program, size) in enumerate(zip(programs, sizes, strict=True)):
        owned = {name: program.parameters[name] for name in split.parameter_names(number)}
        trained = [parameter for parameter in owned.values() if parameter.requires_grad]
        buffers = [program.buffers[name] for name in split.buffer_names(number)]
        yield Block(
            name=split.layer_names(number)[0],
            forward=times["F"][number],
            backward=times["B"][number],
            backward_input=times["I"][number],
            backward_weight=times["W"][number],
            recompute=times["again"][number],
            activation=size.activation,
            entry=size.entry,
            exit=size.exit,
            deferred=size.deferred,
            boundary=size.boundary,
            parameters=sum(tensor.nbytes for tensor in (*owned.values(), *buffers)),
            gradients=sum(parameter.nbytes for parameter in trained),
            optimizer=optimizer_bytes(trained, settings.optimizer),
            output=outputs[number],
        )


def find_ties(split: Split) -> Iterator[Tie]:
    """Weights that several blocks hold."""
    for name, mirrors in split.mirrors.items():
        tensor = split.tensors[name]
        yield Tie((split.owners[name], *mirrors), tensor.nbytes, tensor.nbytes if tensor.requires_grad else 0)


def _kind(program: StageProgram, received: Mapping[int, Bundle]) -> object:
    """Blocks of one kind should take equally long."""
    shapes = tuple((tuple(t.shape), t.dtype) for bundle in received.values() for t in bundle.tensors.values())
    layers = program.layers
    return program.index if layers is None else (tuple(map(repr, layers)), shapes)


def _copy(bundle: Bundle) -> Bundle:
    """As it would arrive: in memory of its own."""
    return Bundle({name: tensor.clone() for name, tensor in bundle.tensors.items()}, bundle.meta)


def _device_of(microbatch: MicroBatch) -> torch.device:
    tensors = flatten((microbatch.args, microbatch.kwargs))[0].values()
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() if device.type == "cpu" else str(device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def own_chance() -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would take its time out of somebody's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
