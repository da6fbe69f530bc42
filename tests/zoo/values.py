"""Hand-written models whose difficulty is what kind of value travels between their blocks, in, or out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bricks import Attend, Mix, Reader, Sorter, attends, labelled_rows, mixes, next_token_loss, rows, text_only
from zoo.entry import BATCH, CLASSES, LENGTH, VOCAB, WIDTH, Entry, Made, classes, is_loss, own_loss, ramp_loss, tokens


class NestedDicts(nn.Module):
    """A dict of dicts in, a dict of dicts out, dicts between; numbers, strings and None among the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleDict({"sound": nn.Linear(9, WIDTH), "touch": nn.Linear(4, WIDTH)})
        self.blocks = nn.ModuleList(attends(5, causal=False))
        self.answers = nn.ModuleDict({"kind": nn.Linear(WIDTH, CLASSES), "size": nn.Linear(WIDTH, 1)})

    def forward(self, sample: dict[str, Any]) -> dict[str, Any]:
        seen = sample["senses"]
        state = {"x": torch.stack([self.readers[name](seen[name]) for name in sorted(seen)], 1), "log": {}}
        for number, block in enumerate(self.blocks):
            log = {**state["log"], f"block{number}": state["x"].std()}
            state = {"x": block(state["x"]), "log": log, "depth": number, "note": None}
        summary = state["x"].mean(1) * sample["options"]["gain"]
        answers = {name: head(summary) for name, head in self.answers.items()}
        truth = sample["truth"]
        loss = F.cross_entropy(answers["kind"], truth["kind"]) + (answers["size"] - truth["size"]).abs().mean()
        return {
            "loss": loss + 0.05 * torch.stack(list(state["log"].values())).mean(),
            "answers": answers,
            "about": {"depth": state["depth"], "unit": sample["options"]["unit"], "note": state["note"]},
        }


@dataclass
class Guess:
    """A plain dataclass that a model returns."""

    loss: Tensor
    scores: Tensor
    spread: Tensor | None = None
    label: str = "guess"


class ReturnsDataclass(Sorter):
    """The output is a dataclass with a tensor, None and a string."""

    def forward(self, rows: Tensor, labels: Tensor) -> Guess:
        x = self.inlet(rows)
        for block in self.blocks:
            x = block(x)
        scores = self.outlet(x)
        return Guess(F.cross_entropy(scores, labels), scores)


class Pair(NamedTuple):
    """What flows between the blocks of ``NamedPairs``."""

    x: Tensor
    speed: Tensor
    age: int


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.push, self.mix = nn.Linear(WIDTH, WIDTH), Mix()

    def forward(self, pair: Pair) -> Pair:
        speed = 0.8 * pair.speed + torch.tanh(self.push(pair.x))
        return Pair(self.mix(pair.x + speed / (pair.age + 1)), speed, pair.age + 1)


class NamedPairs(nn.Module):
    """Blocks take and give a NamedTuple; it holds an int that counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(PairBlock() for _ in range(6))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        pair = Pair(self.inlet(rows), torch.zeros(len(rows), WIDTH), 0)
        for block in self.blocks:
            pair = block(pair)
        return F.cross_entropy(self.outlet(pair.x) / pair.age, labels)


class TupleBlock(nn.Module):
    """Gives (value, None) or (value, (mean, None)) depending on a flag, as attention layers without weights do."""

    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.mix, self.tells = Mix(), tells

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, None] | None]:
        x = self.mix(x)
        return x, (x.mean(-1), None) if self.tells else None


class TuplesWithNone(nn.Module):
    """Blocks return tuples with None in them; so does the model, next to strings and the inputs' own flags."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(TupleBlock(tells=index % 2 == 1) for index in range(6))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, mode: str = "plain", scale: float = 1.0, extra: None = None) -> tuple[Any, ...]:
        x, told = self.inlet(rows), []
        for block in self.blocks:
            x, more = block(x)
            if more is not None:
                told.append(more[0])
        return self.outlet(x) * scale, None, extra, mode, torch.stack(told, -1)


class KeywordsOnly(nn.Module):
    """Every input is keyword-only, each read at another depth, and blocks are called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.early, self.late = nn.ModuleList(attends(3, causal=False)), nn.ModuleList(attends(3, causal=False))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(
        self, *, text: Tensor, early_mask: Tensor, late_mask: Tensor | None = None, shift: Tensor, labels: Tensor
    ) -> Tensor:
        x = self.words(text)
        for block in self.early:
            x = block(x=x, mask=early_mask)
        x = x + shift[:, None]
        for block in self.late:
            x = block(mask=late_mask, x=x)
        return F.cross_entropy(self.outlet(x.mean(1)), labels)


class WholeNumbers(Sorter):
    """int64 and bool tensors are made early and read late: places of the largest values, and signs."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        order, positive, count = x.argsort(-1), x > 0, (x > 1).sum()
        for block in self.blocks:
            x = block(x)
        x = x.gather(-1, order).where(positive, 0.3 * x) / (1 + count)
        return F.cross_entropy(self.outlet(x), labels)


class OddLayouts(Sorter):
    """Between blocks the value is transposed, expanded, strided or narrowed without a copy."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        wide = x[:, None].expand(-1, 3, -1)
        for index, block in enumerate(self.blocks):
            x = block(x)
            wide = [wide.transpose(0, 1), wide.transpose(0, 1).flip(1)[:, ::1], wide][index % 3]
            x = x.t().mul(0.9).t()
        wide = wide if wide.shape[0] == len(rows) else wide.transpose(0, 1)
        return F.cross_entropy(self.outlet(x + wide.sum(1)), labels)


class ByColumns(Mix):
    """Takes a view of its input that exists only where that lies column by column, and gives such a value."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.t().view(-1)
        mixed = super().forward(x) + torch.tanh(flat[: len(x)].mean())
        return mixed.t().contiguous().t()


class ColumnMajor(Sorter):
    """What lies between blocks is a transposed matrix, and blocks count on it."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows).t().contiguous().t()
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.outlet(x), labels)


class PointsAndVoids(Sorter):
    """0-d tensors and empty tensors cross: a learned temperature made early, a running norm, an empty memory."""

    def __init__(self) -> None:
        super().__init__(mixes(6))
        self.heat = nn.Parameter(torch.tensor(0.3))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        heat = self.heat.exp()
        x = self.inlet(rows)
        memory, size = x.new_zeros(0, WIDTH), x.new_zeros(())
        for block in self.blocks:
            x = block(x)
            size = size + x.norm() * 0.01
        memory = torch.cat([memory, x])
        return F.cross_entropy(self.outlet(memory) * heat, labels) + 0.1 * size


class ComplexWaves(nn.Module):
    """Half of the blocks work on a spectrum: complex tensors and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(mixes(4))
        self.filters = nn.ParameterList(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64) for _ in range(4))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.inlet(rows))
        for block, weights in zip(self.blocks, self.filters, strict=True):
            mixed = block(torch.fft.irfft(spectrum, n=WIDTH))
            spectrum = torch.fft.rfft(mixed) + 0.3 * spectrum * weights
        return F.cross_entropy(self.outlet(torch.fft.irfft(spectrum, n=WIDTH)), labels)


class MixedPrecision(Sorter):
    """Values cross as float64, bfloat16 and float32; the parameters stay float32."""

    def between(self, index: int, x: Tensor) -> Tensor:
        kinds = [torch.float64, torch.bfloat16, torch.float32]
        return x.to(kinds[index % 3]).mul(0.95).float()


class EveryLayerOut(Reader):
    """Returns each block's output in a list, the first made in the first stage, with the loss."""

    def forward(self, text: Tensor) -> dict[str, Any]:
        x = self.words(text)
        hidden = [x]
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        loss = next_token_loss(self.head(x), text)
        return {"loss": loss + 0.1 * torch.stack([h.square().mean() for h in hidden]).sum(), "hidden": tuple(hidden)}


class PackedBlock(nn.Module):
    """An ``Attend`` that takes (x, options) with options = {"mask": ..., "scale": ...}."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attend()

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        return self.inner(x, options["mask"]) * options["scale"]


class OptionsToBlocks(Reader):
    """One dict of options with a tensor and numbers goes to every block."""

    def forward(self, text: Tensor) -> Tensor:
        x, options = self.words(text), {"mask": text > 8, "scale": 0.9, "unused": ("a", None, slice(0, 2))}
        options["mask"][:, 0] = True
        for block in self.blocks:
            x = block(x, options)
        return next_token_loss(self.head(x), text)


def nested_dicts() -> Made:
    sample = {
        "senses": {"sound": torch.randn(BATCH, 9), "touch": torch.randn(BATCH, 4)},
        "truth": {"kind": classes(), "size": torch.rand(BATCH, 1)},
        "options": {"gain": 1.25, "unit": "cm"},
    }
    return NestedDicts(), {"sample": sample}


def keywords_only() -> Made:
    masks = torch.rand(2, BATCH, LENGTH) < 0.7
    masks[:, :, 0] = True
    return KeywordsOnly(), {"text": tokens(BATCH, LENGTH), "early_mask": masks[0], "late_mask": masks[1].float(),
                            "shift": torch.randn(BATCH, WIDTH), "labels": classes()}


def tuples_with_none() -> Made:
    return TuplesWithNone(), {"rows": rows(), "mode": "loud", "scale": 0.6, "extra": None}


ENTRIES = [
    Entry("nested_dicts", "values", nested_dicts, own_loss),
    Entry("returns_dataclass", "values", lambda: (ReturnsDataclass(mixes(5)), labelled_rows())),
    Entry("named_pairs", "values", lambda: (NamedPairs(), labelled_rows()), is_loss),
    Entry("tuples_with_none", "values", tuples_with_none, ramp_loss),
    Entry("keywords_only", "values", keywords_only, is_loss),
    Entry("whole_numbers", "values", lambda: (WholeNumbers(mixes(6)), labelled_rows()), is_loss),
    Entry("odd_layouts", "values", lambda: (OddLayouts(mixes(6)), labelled_rows()), is_loss),
    Entry("column_major", "values", lambda: (ColumnMajor([ByColumns() for _ in range(6)]), labelled_rows()), is_loss),
    Entry("points_and_voids", "values", lambda: (PointsAndVoids(), labelled_rows()), is_loss),
    Entry("complex_waves", "values", lambda: (ComplexWaves(), labelled_rows()), is_loss),
    Entry("mixed_precision", "values", lambda: (MixedPrecision(mixes(6)), labelled_rows()), is_loss),
    Entry("every_layer_out", "values", lambda: (EveryLayerOut(attends(4)), text_only())),
    Entry("options_to_blocks", "values", lambda: (OptionsToBlocks([PackedBlock() for _ in range(4)]), text_only()),
          is_loss),
]
