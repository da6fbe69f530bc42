"""Schedules made here, run by torch.distributed.pipelining's own runtime. This file is also the program of its
processes: ``python FILE FOLDER``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import stageflow as sf

WORKERS, STAGES, MICROBATCHES, SAMPLES = 2, 4, 4, 8
CASES = [
    ("interleaved_1f1b", "compute_only"),
    ("interleaved_zb", "compute_comms"),
    ("zb_v", "compute_comms"),
    ("v_half", "compute_only"),
    ("dualpipe_v", "compute_comms"),
]


def build() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(3)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(STAGES)]
    return list(stages), torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6)


def take_part(folder: Path) -> None:
    """One rank: every case in turn, its stages' gradients against those of one device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, form in CASES:
        whole, x, y = build()
        F.mse_loss(nn.Sequential(*whole)(x), y).backward()
        schedule = sf.build_schedule(name, stages=STAGES, microbatches=MICROBATCHES, workers=WORKERS)
        modules, x, y = build()
        mine = schedule.stages_of(rank)
        stages = [PipelineStage(modules[stage], stage, STAGES, torch.device("cpu")) for stage in mine]
        for stage in stages:  # else each looks for its neighbours where a loop would put them
            stage.stage_index_to_group_rank = dict(enumerate(schedule.placement))
        runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=F.mse_loss)
        runtime._load_csv(str(folder / f"{name}.csv"), format=form)
        inputs = (x,) if 0 in mine else ()
        if STAGES - 1 in mine:
            losses: list[Tensor] = []
            runtime.step(*inputs, target=y, losses=losses)
            assert len(losses) == MICROBATCHES
        else:
            runtime.step(*inputs)
        for stage in mine:
            for got, want in zip(modules[stage].parameters(), whole[stage].parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, msg=lambda text, name=name: f"{name}: {text}")
        print(name, *mine)
    dist.destroy_process_group()


@pytest.mark.timeout(330)
def test_torch_trains_with_it(tmp_path: Path) -> None:
    for name, form in CASES:
        schedule = sf.build_schedule(name, stages=STAGES, microbatches=MICROBATCHES, workers=WORKERS)
        schedule.to_csv(tmp_path / f"{name}.csv", form=form)  # type: ignore[arg-type]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=common | {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)},
        )
        for rank in range(WORKERS)
    ]
    try:
        said = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, (out, err)) in enumerate(zip(ranks, said, strict=True)):
        assert process.returncode == 0, err
        assert [line.split()[0] for line in out.splitlines()] == [name for name, _ in CASES], rank


if __name__ == "__main__":
    take_part(Path(sys.argv[1]))
