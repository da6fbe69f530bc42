"""Hand-written models whose difficulty is what is connected to what."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bricks import Mix, Reader, Sorter, attends, labelled_rows, mixes, next_token_loss, text_only
from zoo.entry import (
    BATCH,
    CLASSES,
    HEADS,
    LENGTH,
    VOCAB,
    WIDTH,
    Entry,
    Made,
    classes,
    is_loss,
    pixels,
    ragged,
    tokens,
)


class Hourglass(nn.Module):
    """A U-Net: every resolution on the way down is read again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 8, 12, 16]
        self.enter = nn.Conv2d(3, widths[0], 3, padding=1)
        self.shrink = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(2, b), nn.GELU())
            for a, b in pairwise(widths)
        )
        self.grow = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a + b, a, 3, padding=1), nn.GroupNorm(2, a), nn.GELU())
            for a, b in pairwise(widths)
        )
        self.leave = nn.Conv2d(widths[0], 3, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> dict[str, Tensor]:
        levels = [self.enter(noisy)]
        for step in self.shrink:
            levels.append(step(levels[-1]))
        x = levels.pop()
        for step in reversed(self.grow):
            skip = levels.pop()
            x = step(torch.cat([skip, F.interpolate(x, size=skip.shape[-2:], mode="nearest")], dim=1))
        image = self.leave(x) + noisy
        return {"loss": (image - clean).pow(2).mean(), "image": image}


class Diamond(nn.Module):
    """Two branches of different depth leave one value and meet again, together with the value itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, WIDTH), *mixes(2))
        self.left = nn.Sequential(*mixes(3))
        self.right = Mix()
        self.gate = nn.Linear(3 * WIDTH, WIDTH)
        self.top = nn.Sequential(*mixes(2), nn.Linear(WIDTH, CLASSES))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        stem = self.stem(rows)
        left, right = self.left(stem), self.right(stem)
        met = left * torch.sigmoid(self.gate(torch.cat([stem, left, right], -1))) + right
        return F.cross_entropy(self.top(met), labels)


class DenseLinks(Sorter):
    """Each block reads the mean of all values before it, back to the first."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        seen = [self.inlet(rows)]
        for block in self.blocks:
            seen.append(block(torch.stack(seen).mean(0)))
        return F.cross_entropy(self.outlet(sum(seen) / len(seen)), labels)


class Branching(nn.Module):
    """Which blocks run, and how often, hangs on the values of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.before = nn.ModuleList(mixes(3))
        self.odd, self.even = Mix(), Mix()
        self.after = nn.ModuleList(mixes(3))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(rows)
        for block in self.before:
            x = block(x)
        total = int(labels.sum())
        x = self.odd(x) if total % 2 else self.even(x)
        for _ in range(total % 3):
            x = torch.tanh(x) + x
        if x.mean() > 0:
            x = x * 1.5
        for block in self.after:
            x = block(x)
        return F.cross_entropy(self.outlet(x), labels)


class EarlyExits(Sorter):
    """A head after every block; their losses add up, later ones counting more."""

    def __init__(self) -> None:
        super().__init__(mixes(6))
        self.exits = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(6))

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Any]:
        x, losses, scores = self.inlet(rows), [], None
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            scores = leave(x)
            losses.append(F.cross_entropy(scores, labels))
        weighted = sum(weight * loss for weight, loss in enumerate(losses, start=1))
        return {"loss": weighted / 6 + 0.1 * F.cross_entropy(self.outlet(x), labels), "each": losses, "scores": scores}


class TorchTransformer(nn.Module):
    """torch's own encoder-decoder, with causal and padding masks made in the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 2, 2, dim_feedforward=48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, wanted: Tensor, source_mask: Tensor) -> Tensor:
        size = wanted.shape[1]
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        padding = source_mask == 0
        x = self.body(
            self.source(source),
            self.target(wanted),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return next_token_loss(self.head(x), wanted)


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with norms first, under a classifier that reads the first place."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.outlet(self.stack(self.inlet(series))[:, 0]), labels)


class Messages(nn.Module):
    """A graph network: messages along edges are summed into nodes; all graphs of the batch share the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, WIDTH)
        self.send = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(5))
        self.keep = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        start, end = edges
        x = self.inlet(nodes)
        for send, keep in zip(self.send, self.keep, strict=True):
            message = torch.tanh(send(torch.cat([x[:, start], x[:, end]], -1)))
            x = x + F.silu(keep(torch.zeros_like(x).index_add(1, end, message)))
        return F.cross_entropy(self.outlet(x.mean(1)), labels)


class MaskInGlue(Reader):
    """Blocks take a mask that the glue makes from the tokens once, and a bias that it changes between blocks."""

    def forward(self, text: Tensor) -> Tensor:
        mask = text.ne(text[:, :1]) | torch.arange(text.shape[1]).eq(0)
        x = self.words(text)
        slope = torch.linspace(0, 0.3, text.shape[1])[:, None]
        for index, block in enumerate(self.blocks):
            x = block(x, mask) + slope * (index + 1)
        return next_token_loss(self.head(x), text)


class Tower(nn.Module):
    """A very deep and very thin stack in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(48) for layer in (nn.Linear(8, 8), nn.Tanh())))
        for layer in self.body[::2]:  # as large as keeps a signal alive through 48 layers
            nn.init.orthogonal_(layer.weight, gain=1.3)
        self.outlet = nn.Linear(8, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.outlet(self.body(F.pad(rows, (0, 2)))), labels)


class TwoStreams(nn.Module):
    """Two stacks that run side by side and look at each other at every step, like a two-stream video network."""

    def __init__(self) -> None:
        super().__init__()
        self.inlets = nn.ModuleList([nn.Linear(6, WIDTH), nn.Linear(6, WIDTH)])
        self.near, self.far = nn.ModuleList(mixes(4)), nn.ModuleList(mixes(4))
        self.cross = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, 4) for _ in range(4))
        self.lift = nn.Linear(4, WIDTH)
        self.outlet = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        near, far = (inlet(rows) for inlet in self.inlets)
        for near_block, far_block, cross in zip(self.near, self.far, self.cross, strict=True):
            shared = self.lift(torch.tanh(cross(near, far)))
            near, far = near_block(near) + shared, far_block(far) - shared
        return F.cross_entropy(self.outlet(torch.cat([near, far], -1)), labels)


class Reversible(nn.Module):
    """Two halves of the channels that update one another in turn, with the halves swapped in the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 2 * WIDTH)
        self.blocks = nn.ModuleList(mixes(6))
        self.outlet = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        left, right = self.inlet(rows).chunk(2, dim=-1)
        for block in self.blocks:
            left, right = right, left + block(right)
        return F.cross_entropy(self.outlet(torch.cat([left, right], -1)), labels)


def graph_inputs() -> dict[str, Any]:
    edges = torch.stack([torch.arange(10).repeat(3), torch.randint(0, 10, (30,))])
    return {"nodes": torch.randn(BATCH, 10, 4), "edges": edges, "labels": classes()}


def torch_transformer() -> Made:
    return TorchTransformer(), {
        "source": tokens(BATCH, LENGTH), "wanted": tokens(BATCH, 7), "source_mask": ragged()}


ENTRIES = [
    Entry("hourglass", "wiring", lambda: (Hourglass(), {"noisy": pixels(16), "clean": pixels(16)})),
    Entry("diamond", "wiring", lambda: (Diamond(), labelled_rows()), is_loss),
    Entry("dense_links", "wiring", lambda: (DenseLinks(mixes(6)), labelled_rows()), is_loss),
    Entry("branch_on_data", "wiring", lambda: (Branching(), labelled_rows()), is_loss),
    Entry("early_exits", "wiring", lambda: (EarlyExits(), labelled_rows())),
    Entry("torch_transformer", "wiring", torch_transformer, is_loss),
    Entry("torch_encoder", "wiring", lambda: (TorchEncoder(), {"series": torch.randn(BATCH, 7, 6),
          "labels": classes()}), is_loss),
    Entry("messages_on_graph", "wiring", lambda: (Messages(), graph_inputs()), is_loss),
    Entry("mask_in_glue", "wiring", lambda: (MaskInGlue(attends(4, causal=False)), text_only()), is_loss),
    Entry("thin_tower", "wiring", lambda: (Tower(), labelled_rows()), is_loss, lr=0.004),
    Entry("two_streams", "wiring", lambda: (TwoStreams(), labelled_rows()), is_loss, lr=0.004),
    Entry("reversible", "wiring", lambda: (Reversible(), labelled_rows()), is_loss, lr=0.004),
]
