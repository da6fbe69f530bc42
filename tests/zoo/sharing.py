"""Hand-written models whose difficulty is which weights are used where: twice, far apart, by name, without a module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bricks import Attend, Reader, attends, labelled_rows, mixes, next_token_loss, rows, text_only
from zoo.entry import BATCH, CLASSES, LENGTH, VOCAB, WIDTH, Entry, Made, is_loss, ragged, ramp_loss, tokens


class Repeated(nn.Module):
    """The same modules stand at several places of one list, far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        one, two = Attend(), Attend()
        self.blocks = nn.ModuleList([one, two, Attend(), one, Attend(), two, one])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(text))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


class Looped(Reader):
    """A block that is called as often as its position says, as in a recurrent-depth model."""

    def forward(self, text: Tensor) -> Tensor:
        x = start = self.words(text)
        for turns, block in enumerate(self.blocks, start=1):
            for _ in range(turns):
                x = block(x + 0.2 * start)
        return next_token_loss(self.head(x), text)


class Tied(Reader):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__(attends(4))
        nn.init.normal_(self.words.weight, std=0.3)
        self.head.weight = self.words.weight


class TiedByFunction(nn.Module):
    """There is no head: the embedding's weight is used directly, and once more in the middle as a soft lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.words.weight, std=0.3)
        self.first = nn.ModuleList(attends(2))
        self.second = nn.ModuleList(attends(3))

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.first:
            x = block(x)
        x = x + F.linear(x, self.words.weight).softmax(-1) @ self.words.weight
        for block in self.second:
            x = block(x)
        return next_token_loss(F.linear(x, self.words.weight), text)


class NamedExperts(nn.Module):
    """A string among the inputs picks the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.trunk = nn.ModuleList(mixes(3))
        self.experts = nn.ModuleDict({name: nn.Sequential(*mixes(2)) for name in ["rain", "snow", "wind"]})
        self.tail = nn.ModuleList(mixes(2))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, weather: str, scale: float = 1.0) -> Tensor:
        x = self.inlet(rows)
        for block in self.trunk:
            x = block(x)
        x = self.experts[weather](x) * scale
        for block in self.tail:
            x = block(x)
        return self.outlet(x)


class Bare(nn.Module):
    """No child modules: raw parameters, used in plain arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Parameter(torch.randn(6, WIDTH) / 3)
        for index in range(6):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.randn(WIDTH, WIDTH) / 6))
            self.register_parameter(f"shift_{index}", nn.Parameter(torch.randn(WIDTH) / 6))
        self.leave = nn.Parameter(torch.randn(WIDTH, CLASSES) / 6)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = rows @ self.enter
        for index in range(6):
            x = x + torch.tanh(x @ getattr(self, f"weight_{index}") + getattr(self, f"shift_{index}"))
        return F.cross_entropy(x @ self.leave, labels)


class Recurrent(nn.Module):
    """LSTM and GRU layers one over the other; their states leave as tuples and come back as inputs further up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.lstms = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.deep = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, text: Tensor) -> Tensor:
        x, state = self.words(text), None
        for layer in self.lstms:
            step, state = layer(x, state)
            x = x + step
        x, _ = self.deep(x, torch.cat(state))
        return next_token_loss(self.head(x), text)


def repeated() -> Made:
    return Repeated(), {"text": tokens(BATCH, LENGTH), "mask": ragged()}


ENTRIES = [
    Entry("repeated_modules", "sharing", repeated, ramp_loss),
    Entry("looped_blocks", "sharing", lambda: (Looped(attends(3)), text_only()), is_loss),
    Entry("tied_head", "sharing", lambda: (Tied(), text_only()), is_loss),
    Entry("tied_by_function", "sharing", lambda: (TiedByFunction(), text_only()), is_loss),
    Entry("experts_by_name", "sharing", lambda: (NamedExperts(), {"rows": rows(), "weather": "snow", "scale": 0.7}),
          ramp_loss),
    Entry("recurrent", "sharing", lambda: (Recurrent(), text_only()), is_loss),
    Entry("bare_parameters", "sharing", lambda: (Bare(), labelled_rows()), is_loss),
]
