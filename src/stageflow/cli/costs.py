"""The flags that give a schedule's times and sizes, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageflow.errors import InputError

if TYPE_CHECKING:
    from stageflow.schedule import Costs, Footprint

PerStage = float | Sequence[float]

B_MEANS = (
    "whole backward (I plus W); with --w and without --i: the gradient of the inputs, as papers on zero bubble write "
    "F, B, W"
)
"""What is told of the flag --b."""


def add_times(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `costs_from` reads."""
    times = parser.add_argument_group("times, in any unit; one, or one per stage as 1,1,2")
    times.add_argument("--f", type=times_of, default=1.0, metavar="T", help="forward (1)")
    times.add_argument("--i", type=times_of, metavar="T", help="gradient of the inputs (1, or half of --b)")
    times.add_argument("--w", type=times_of, metavar="T", help="gradient of the weights (1, or half of --b)")
    times.add_argument("--b", type=times_of, metavar="T", help=B_MEANS)
    times.add_argument("--recompute", type=times_of, default=0.0, metavar="T", help="forward again before B or I (0)")
    times.add_argument("--hop", type=float, default=0.0, metavar="T", help="latency of a link (0)")
    times.add_argument("--transfer", type=float, default=0.0, metavar="T", help="a value occupies its link (0)")
    times.add_argument("--reduction", type=times_of, default=0.0, metavar="T", help="data-parallel, at the end (0)")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `Sizes.of` reads."""
    sizes = parser.add_argument_group("memory: plain numbers, or sizes as 2GiB; one, or one per stage")
    sizes.add_argument("--activation", metavar="SIZE", help="what a stage keeps of a micro-batch from F to B or I (1)")
    sizes.add_argument("--deferred", metavar="SIZE", help="what it keeps of that from I to W (all)")
    sizes.add_argument("--static", metavar="SIZE", help="parameters, gradients, optimizer (0)")
    sizes.add_argument("--memory", metavar="SIZE", help="what a worker has; zb_h1 and greedy are built to fit")


def times_of(text: str) -> float | list[float]:
    """``"2"`` is one time for all stages, ``"1,1,2"`` one per stage."""
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: expected a number, or one per stage as 1,1,2") from None
    return times[0] if len(times) == 1 else times


def backward_times(i: PerStage | None, w: PerStage | None, b: PerStage | None) -> tuple[PerStage, PerStage, PerStage]:
    """Times of I, W and B from what was given of them.

    All three are as given. B alone is halved into I and W. B and W without I are the gradients of the inputs and of
    the weights, as papers on zero bubble name them. B and I leave the rest of B for W. What else is missing is 1, and
    B is I plus W. Raises InputError for an I that takes longer than its B.
    """
    if i is None and b is not None:
        if w is None:
            half = _combine(b, 0.5, float.__mul__)
            return half, half, b
        i, b = b, None
    i = 1.0 if i is None else i
    if w is None:
        w = 1.0 if b is None else _rest(b, i)
    return i, w, _combine(i, w, float.__add__) if b is None else b


def costs_from(args: argparse.Namespace) -> Costs:
    """The costs that the flags of `add_times` give."""
    from stageflow.schedule import Costs

    i, w, b = backward_times(args.i, args.w, args.b)
    return Costs(
        forward=args.f,
        backward_input=i,
        backward_weight=w,
        backward=b,
        hop=args.hop,
        recompute=args.recompute,
        transfer=args.transfer,
        reduction=args.reduction,
    )


def costs_words(costs: Costs) -> str:
    """The times that were meant, in one line: ``F 1, I 1, W 1, B 2``."""
    named = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight, "B": costs.backward}
    more = {name: getattr(costs, name) for name in ("recompute", "hop", "transfer", "reduction")}
    named |= {name: times for name, times in more.items() if times}
    return "times: " + ", ".join(f"{name} {_words(times)}" for name, times in named.items() if times is not None)


def _words(times: PerStage) -> str:
    return ",".join(f"{time:g}" for time in times) if isinstance(times, Sequence) else f"{times:g}"


@dataclass(frozen=True)
class Sizes:
    """What stages keep and what a worker has.

    memory: of a worker; None: no limit.
    plain: whether the numbers count something else than bytes, such as activations.
    """

    footprint: Footprint
    memory: float | None
    plain: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Sizes:
        """The sizes that the flags of `add_sizes` give. Raises InputError for what is no size."""
        from stageflow.plan.words import bytes_of
        from stageflow.schedule import Footprint

        def size(name: str) -> PerStage | None:
            given = getattr(args, name)
            if given is None:
                return None
            sizes = [0.0 if word.strip() == "0" else bytes_of(word, f"--{name}") for word in given.split(",")]
            return sizes[0] if len(sizes) == 1 else sizes

        activation, static, memory = size("activation"), size("static"), size("memory")
        if isinstance(memory, Sequence):
            raise InputError(f"--memory {args.memory}: give one size; all workers have the same")
        footprint = Footprint(
            0 if static is None else static, 1 if activation is None else activation, deferred=size("deferred")
        )
        words = "".join(filter(None, (args.activation, args.deferred, args.static, args.memory)))
        return cls(footprint, memory, plain=not any(letter.isalpha() for letter in words))

    def words(self, size: float) -> str:
        """A size as people read it."""
        from stageflow.plan.words import size_words

        return f"{size:g}" if self.plain else size_words(size)

    def fits(self, peaks: Sequence[float]) -> bool:
        """Whether every worker has room for its peak."""
        return self.memory is None or max(peaks) <= self.memory


def _rest(whole: PerStage, part: PerStage) -> PerStage:
    """W where B and I are given."""
    rest = _combine(whole, part, float.__sub__)
    if min(rest if isinstance(rest, Sequence) else [rest]) < 0:
        raise InputError("--i is longer than --b, the whole backward of which it is a part: give --w instead of --b")
    return rest


def _combine(first: PerStage, second: PerStage, by: Callable[[float, float], float]) -> PerStage:
    """Two numbers, or a number for each stage where at least one side has that."""
    if not isinstance(first, Sequence) and not isinstance(second, Sequence):
        return by(float(first), float(second))
    stages = max(len(each) for each in (first, second) if isinstance(each, Sequence))
    listed = [each if isinstance(each, Sequence) else [each] * stages for each in (first, second)]
    if len(listed[0]) != len(listed[1]):
        raise InputError(f"times for {len(listed[0])} and for {len(listed[1])} stages: give one, or one per stage")
    return [by(float(a), float(b)) for a, b in zip(*listed, strict=True)]
