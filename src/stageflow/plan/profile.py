"""What the blocks of a model cost, measured or counted: the figures that plans are made of.

Free of torch but for `profile_model`, so that a stored profile can be read anywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.plan import profile_file
from stageflow.plan.partition import Block, Tie
from stageflow.plan.words import size_words, table, time_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from stageflow.plan.devices import Accelerator
    from stageflow.runtime.loss import LossFunction
    from stageflow.split import ModelLike


@dataclass(frozen=True)
class Profile:
    """The blocks of one model for one size of micro-batch.

    model: its class. way: how it was taken apart: "sequence", "blocks" or "export".
    blocks: in order; between any two of them a stage may begin. Their names can be given as ``boundaries``.
    ties: weights that several blocks use.
    device: what the figures are for, in words. measured: by running; False: counted, see `profile_model`.
    samples: of the micro-batch; 0 where no input has a batch dimension. rounds: of which the medians were taken.
    threads: that torch computed with; 0 where nothing ran.
    """

    model: str
    way: str
    blocks: tuple[Block, ...]
    ties: tuple[Tie, ...]
    device: str
    measured: bool
    samples: int
    rounds: int
    threads: int

    @property
    def forward(self) -> float:
        """Seconds of the whole model's forward for one micro-batch."""
        return sum(block.forward for block in self.blocks)

    @property
    def backward(self) -> float:
        """Seconds of the whole model's backward for one micro-batch."""
        return sum(block.backward for block in self.blocks)

    def to_json(self, path: str | Path | None = None) -> str:
        """The profile as JSON, which `from_json` reads back exactly; written to ``path`` if given."""
        text = profile_file.to_json(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Profile:
        """Read a profile from a file, or from its text (a string that begins with a brace).

        Raises InputError for a file of another kind or version, or one that was changed or cut off.
        """
        return profile_file.from_json(source)

    def describe(self) -> str:
        """A table: per block times, what it keeps, its weights, and what crosses a cut after it."""
        columns = ("F", "B", "I", "W", "again")
        rows = [("block", *columns, "kept", "for W", "input", "weights", "gradients", "optimizer", "crosses")]
        rows += [_row(block) for block in self.blocks]
        names = [field.name for field in dataclasses.fields(Block) if field.name not in ("name", "recompute")]
        sums: dict[str, Any] = {name: sum(getattr(block, name) for block in self.blocks) for name in names}
        again = sum(block.again for block in self.blocks)
        last = _row(Block("together", recompute=again, **sums))
        rows.append((*last[:8], "", *last[9:12], ""))
        of = f"{self.samples} samples" if self.samples != 1 else "1 sample"
        how = f"measured, medians of {self.rounds} rounds, {self.threads} threads" if self.measured else "counted"
        lines = [f"{self.model} by {self.way}, micro-batches of {of}, on {self.device} ({how})", *table(rows, 1)]
        for tie in self.ties:
            users = ", ".join(self.blocks[block].name for block in tie.blocks)
            lines.append(f"one weight of {size_words(tie.parameters)} is shared by {users}")
        return "\n".join(lines)

    __str__ = describe


def _row(block: Block) -> tuple[str, ...]:
    times = (block.forward, block.backward, block.backward_input, block.backward_weight, block.again)
    sizes = (
        block.activation,
        block.deferred,
        block.boundary,
        block.parameters,
        block.gradients,
        block.optimizer,
        block.output,
    )
    return (block.name, *map(time_words, times), *map(size_words, sizes))


def profile_model(
    model: ModelLike,
    example: Any,
    *,
    target: Any = None,
    loss: LossFunction | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    microbatch: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    split: str = "auto",
    at_least: int = 1,
    on: Accelerator | str | None = None,
    efficiency: float = 0.5,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    threads: int = 1,
    rounds: int = 10,
    warm_up: int = 2,
    progress: bool = False,
) -> Profile:
    """Take a model apart into blocks and measure what each costs.

    model: as for `split_model`: a module, a list of modules, or a function that builds one. It is not changed.
    example: inputs of one call, as for `split_model`. target, loss: as for `Pipeline`; without a loss, and where the
        model's output holds none, the mean of the output stands in for it.
    optimizer: as for `Pipeline`, to see how many bytes it keeps per parameter; None: no optimizer.
    microbatch: samples of a micro-batch; must divide the example's batch. None: the example is one micro-batch.
    batch_dims: as for `Pipeline`.
    split: how to take the model apart, as for `split_model`. at_least: how many blocks there should be; models that
        are followed module by module are opened up until there are.
    on: an accelerator that is not at hand, or its name (see `stageflow.plan.devices`): floating-point operations and
        bytes are counted, on the meta device where the model needs no values, and times follow from what the
        accelerator does at most (its roofline), times `efficiency`.
    device: to measure on, default where the example is. dtype, autocast: as for `Pipeline`; floating-point inputs are
        given that dtype, too.
    threads: for torch to compute with meanwhile: as many as a worker of the pipeline will have.
    rounds, warm_up: how often everything is run for the medians, and before.
    progress: show a bar on standard error.

    Blocks are run by the code that runs stages: F, B, the split backward's I and W, and a backward with recomputation,
    in rounds of the whole model; this takes the memory of training it on one micro-batch. Raises InputError for
    arguments that make no sense, SplitError for a model that can't be taken apart.
    """
    from stageflow.plan.profile_measured import measure
    from stageflow.plan.profile_settings import Settings

    settings = Settings(
        target, loss, optimizer, microbatch, dict(batch_dims or {}), split, at_least, device, dtype, autocast, threads,
        rounds, warm_up, progress,
    )  # fmt: skip
    if on is not None:
        from stageflow.plan.profile_counted import count

        return count(model, example, settings, on, efficiency)
    return measure(model, example, settings)
