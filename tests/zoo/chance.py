"""Hand-written models that draw random numbers; their one-device run is stageflow's own with a single stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bricks import Mix, Reader, Sorter, attends, labelled_rows, mixes, next_token_loss, rows, text_only
from zoo.entry import WIDTH, Entry, is_loss


class Dropped(Mix):
    """A block with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class DropsLayers(Reader):
    """Skips whole blocks by a coin that Python code tosses, scaling the ones that stay."""

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            if torch.rand(()) < 0.7:
                x = x + (block(x) - x) / 0.7
        return next_token_loss(self.head(x), text)


class NoisyGlue(Sorter):
    """The glue itself draws: noise added between blocks, on top of dropout called as a function."""

    def between(self, index: int, x: Tensor) -> Tensor:
        return F.dropout(x + 0.1 * torch.randn_like(x), 0.2, self.training)


class DropsFirst(Mix):
    """A block with dropout on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class ColumnsFirst(Sorter):
    """Values lie column by column between blocks: torch hands out random numbers in the order of memory."""

    def between(self, index: int, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


class Sampled(nn.Module):
    """A latent drawn in the middle by the reparametrisation trick, with its divergence in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, WIDTH), *mixes(3))
        self.mean, self.spread = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.decode = nn.Sequential(nn.Linear(8, WIDTH), *mixes(3), nn.Linear(WIDTH, 6))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        x = self.encode(rows)
        mean, spread = self.mean(x), self.spread(x).tanh()
        image = self.decode(mean + torch.randn_like(mean) * spread.exp())
        divergence = (mean.square() + (2 * spread).exp() - 2 * spread - 1).sum(-1).mean() / 2
        return {"loss": (image - rows).square().mean() + 0.1 * divergence, "image": image}


ENTRIES = [
    Entry("dropout_in_blocks", "chance", lambda: (Sorter([Dropped() for _ in range(6)]), labelled_rows()), is_loss,
          random=True),
    Entry("drops_layers", "chance", lambda: (DropsLayers(attends(6)), text_only()), is_loss, random=True),
    Entry("noisy_glue", "chance", lambda: (NoisyGlue(mixes(6)), labelled_rows()), is_loss, random=True),
    Entry("dropout_by_columns", "chance", lambda: (ColumnsFirst([DropsFirst() for _ in range(6)]), labelled_rows()),
          is_loss, random=True),
    Entry("sampled_latent", "chance", lambda: (Sampled(), {"rows": rows()}), random=True),
]
