"""The schedules that have a name: who builds each, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stageflow.schedule.actions import Orders
from stageflow.schedule.builders.controllable_memory import v_half, v_min
from stageflow.schedule.builders.forward_only import forward_only
from stageflow.schedule.builders.gpipe import gpipe, looped_bfs
from stageflow.schedule.builders.greedy import greedy
from stageflow.schedule.builders.interleaved import interleaved_1f1b, interleaved_zb
from stageflow.schedule.builders.one_f_one_b import eager_1f1b, one_f_one_b
from stageflow.schedule.builders.pipedream_2bw import pipedream_2bw
from stageflow.schedule.builders.two_way import chimera, dualpipe, dualpipe_v
from stageflow.schedule.builders.zero_bubble import zb_h1, zb_h2
from stageflow.schedule.builders.zero_bubble_v import zb_v


@dataclass(frozen=True)
class Family:
    """A named schedule, built by ``build(graph, placement, microbatches, **options)``.

    idle: seconds in which the worker with the longest span (first start to last end) idles in it, without hops.
    peak: the most activations of a stage that worker d keeps.
        Both for p workers with v stages each where the schedule puts them by default, m micro-batches (at least p),
        groups of N, and a stage's times F, I, W (B = I + W); e as the builder says.
    needs: what counts it takes.
    source: where it comes from.
    options: the names of its builder's own arguments.
    placement: where stages go by default.
    chunks: usual stages per worker.
    copies: how many times the model is there; more than one takes each worker's stages of all copies.
    versions: how many versions of the weights each stage keeps.
    """

    build: Callable[..., Orders]
    idle: str
    peak: str
    needs: str
    source: str
    options: tuple[str, ...] = ()
    placement: str = "contiguous"
    chunks: int = 1
    copies: int = 1
    versions: int = 1

    @property
    def runs(self) -> bool:
        """Whether workers can run it: they keep one copy of the weights, in one version."""
        return self.copies == self.versions == 1


_ANY = "any"
_V = "two stages per worker in a V"

FAMILIES = {
    "gpipe": Family(gpipe, "(p-1)(F+B)", "m", _ANY, "Huang et al. 2019, GPipe, section 2.3"),
    "1f1b": Family(
        one_f_one_b,
        "(p-1)(F+B)",
        "min(m, p-d)",
        _ANY,
        "Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, section 3",
        options=("costs",),
    ),
    "eager_1f1b": Family(
        eager_1f1b,
        "(p-1)(F+B)",
        "min(m, 2(p-1-d)+1)",
        _ANY,
        "Zhuang et al. 2023, On Optimizing the Communication of Model Parallelism, section 4",
        options=("costs",),
    ),
    "interleaved_1f1b": Family(
        interleaved_1f1b,
        "(p-1)(F+B)",
        "min(mv, (v-1)N+2(p-1-d)+1)",
        "any; group N >= p",
        "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, section 2.2",
        options=("group", "costs"),
        placement="loop",
        chunks=2,
    ),
    "looped_bfs": Family(
        looped_bfs,
        "(p-1)(F+B)",
        "mv",
        _ANY,
        "Lamy-Poirier 2022, Breadth-First Pipeline Parallelism, section 4",
        placement="loop",
        chunks=2,
    ),
    "zb_h1": Family(
        zb_h1,
        "(p-1)(F+I-W) if W <= F",
        "p",
        _ANY,
        "Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 2.1",
        options=("memory", "costs"),
    ),
    "zb_h2": Family(
        zb_h2,
        "(p-1)(F+I-2W) if W <= F, 2W <= F+I, m >= 2p",
        "2p-1",
        _ANY,
        "Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 2.1",
        options=("costs",),
    ),
    "interleaved_zb": Family(
        interleaved_zb,
        "(p-1)(F+I-W) if W <= F, m a multiple of p",
        "(v-1)N+p",
        "any; group N >= p",
        "torch.distributed.pipelining, ScheduleInterleavedZeroBubble, after Qi et al. 2024",
        options=("group", "costs"),
        placement="loop",
        chunks=2,
    ),
    "zb_v": Family(
        zb_v,
        "0 if F = I = W, m >= 2p-1",
        "2p",
        _ANY,
        "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, section 3",
        options=("costs",),
        placement="fold",
        chunks=2,
    ),
    "v_half": Family(
        v_half,
        "(7(p-1)+e)F/2 if F = I = W",
        "2 floor((p+2)/2)",
        _V,
        "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, section 3",
        placement="fold",
        chunks=2,
    ),
    "v_min": Family(
        v_min,
        "(4p-5+e)F if F = I = W, p >= 2",
        "2 floor((p+4)/3)",
        _V,
        "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, section 3",
        placement="fold",
        chunks=2,
    ),
    "dualpipe": Family(
        dualpipe,
        "(p/2-1)(F+I-W) if W <= I <= F <= B",
        "p+1",
        "p even, m even, m >= 2p; two copies of the weights: not run",
        "DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.2.1",
        copies=2,
    ),
    "dualpipe_v": Family(
        dualpipe_v,
        "(p-1)(F+I-W) if W <= I <= F <= B",
        "2p+1",
        f"{_V}, m >= 2p",
        "Sea AI Lab 2025, DualPipe could be better without the Dual",
        placement="fold",
        chunks=2,
    ),
    "chimera": Family(
        chimera,
        "(p-2)F if B = F, m a multiple of p",
        "p/2+1+min(d, p-1-d)",
        "p even, m even; two copies of the weights: not run",
        "Li and Hoefler 2021, Chimera, section 3",
        copies=2,
    ),
    "pipedream_2bw": Family(
        pipedream_2bw,
        "(p-1)(F+B), once for all steps",
        "p-d",
        "m >= p; two versions of the weights, gradients one step late: not run",
        "Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, section 3.1",
        options=("steps",),
        versions=2,
    ),
    "greedy": Family(
        greedy,
        "depends on the times",
        "the memory it is given, or that of 1f1b",
        _ANY,
        "list scheduling",
        options=("split", "memory", "costs"),
    ),
    "forward_only": Family(forward_only, "(p-1)F", "0", _ANY, "for evaluation and prediction"),
}
