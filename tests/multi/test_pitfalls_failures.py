"""What goes wrong while a pipeline runs is told within two seconds, by name, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import troubles
from launch_services import still_running
from one_device import Call, close, pipeline, plainly, seeded, sgd
from torch import nn
from troubles import BOUNDARIES, WIDTH, build, mean_square

import stageflow as sf
from stageflow.errors import InputError, PipelineClosed, SplitError, StageFailed, WorkerDied, WorkerHung
from stageflow.testing.leaks import descendants

SAMPLES = 10
BOTH = pytest.mark.parametrize("launch", ["threads", "processes"])
PLANS = pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zb_h1", 4)])


def batch(mark: int = 0, bad_target: bool = False) -> Call:
    """10 samples, of which the 7th and 8th are the third micro-batch."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, WIDTH + 1, generator=generator)
    y = torch.randn(SAMPLES, 2, generator=generator)
    x[:, -1] = 0
    x[7, -1] = mark
    if bad_target:
        y[6] = 1000
    return Call((x,), target=y)


def pipe_of(model: Any, schedule: str, stages: int, launch: str, **options: Any) -> sf.Pipeline:
    return pipeline(
        model, (schedule, stages, stages), options.pop("loss", mean_square),
        launch=launch, boundaries=BOUNDARIES[stages], example=batch().args, **options,
    )  # fmt: skip


def step(pipe: sf.Pipeline, call: Call) -> float:
    return pipe.train_step(*call.args, target=call.target).item()


@contextmanager
def told_within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# -------------------------------------------------------------------------------------------- code of the user fails


@BOTH
@PLANS
def test_what_a_stage_raises_is_told_with_its_place_and_the_pipeline_goes_on(
    schedule: str, stages: int, launch: str
) -> None:
    model = seeded(lambda: build(1, stages, forward=troubles.raises, backward=troubles.raises))
    cases = [
        (1, "F", batch(troubles.IN_FORWARD)),
        (1, "I" if schedule == "zb_h1" else "B", batch(troubles.IN_BACKWARD)),
        (stages - 1, "F", batch(bad_target=True)),  # in the loss
    ]
    want = plainly(build, [batch()] * 4, mean_square)
    with pipe_of(model, schedule, stages, launch) as pipe:
        losses = [step(pipe, batch())]
        for stage, kind, bad in cases:
            with told_within(2.0), pytest.raises(StageFailed, match="ValueError: out of luck") as caught:
                step(pipe, bad)
            error = caught.value
            assert (error.worker, error.stage, error.microbatch, error.action) == (stage, stage, 2, f"{stage}{kind}2")
            assert type(error.__cause__) is ValueError
            if launch == "processes":
                assert "in raises" in "".join(error.__cause__.__notes__)
            assert pipe.usable
            losses.append(step(pipe, batch()))  # the failed step changed nothing
        assert losses == pytest.approx(want.losses, rel=1e-4)
        close(pipe.state_dict(), want.state)


@BOTH
def test_an_optimizer_that_fails_leaves_a_pipeline_that_says_so(launch: str) -> None:
    with pipe_of(build(), "1f1b", 2, launch, optimizer=troubles.fails_later) as pipe:
        step(pipe, batch())
        with told_within(2.0), pytest.raises(StageFailed, match=r"worker 1 .*during update") as caught:
            step(pipe, batch())
        assert type(caught.value.__cause__) is ValueError
        assert not pipe.usable
        with pytest.raises(PipelineClosed, match="optimizer failed.*load a saved state"):
            step(pipe, batch())


@BOTH
def test_a_failure_in_evaluation(launch: str) -> None:
    with pipe_of(build(1, 2, forward=troubles.raises), "1f1b", 2, launch) as pipe:
        for run in (lambda call: pipe.evaluate(*call.args, target=call.target), lambda call: pipe.predict(*call.args)):
            run(batch())
            with told_within(2.0), pytest.raises(StageFailed, match="worker 1 .* during 1F2"):
                run(batch(troubles.IN_FORWARD))
            run(batch())
        assert step(pipe, batch()) == pytest.approx(step(pipe, batch()), rel=0.5)


# ------------------------------------------------------------------------------------------------- workers die or hang


@pytest.mark.parametrize(
    ("schedule", "stages", "mark", "actions"),
    [("1f1b", 2, troubles.IN_BACKWARD, {"1B2"}), ("zb_h1", 4, troubles.IN_FORWARD, {"1F2"})],
)
def test_a_worker_killed_in_the_middle_of_a_step_is_named(
    schedule: str, stages: int, mark: int, actions: set[str]
) -> None:
    model = build(1, stages, forward=troubles.killed, backward=troubles.killed)
    with pipe_of(model, schedule, stages, "processes") as pipe:
        step(pipe, batch())
        dies = pytest.raises(WorkerDied, match=r"worker 1 \(stage 1\) died of signal 9 .*during 1")
        with told_within(2.0), dies as caught:
            step(pipe, batch(mark))
        error = caught.value
        assert (error.worker, error.stage, error.microbatch) == (1, 1, 2)
        assert error.action in actions
        assert not pipe.usable
        with pytest.raises(PipelineClosed, match="died of signal 9"):
            step(pipe, batch())


def test_a_worker_killed_between_two_steps() -> None:
    with pipe_of(build(), "1f1b", 2, "processes") as pipe:
        step(pipe, batch())
        # the last descendant that was started is a worker
        os.kill(max(descendants(os.getpid())), signal.SIGKILL)
        with told_within(2.0), pytest.raises(WorkerDied, match="signal 9"):
            step(pipe, batch())
        assert not pipe.usable


def test_a_hang_names_what_each_worker_does_and_waits_for() -> None:
    with pipe_of(build(1, 3, forward=troubles.hangs), "1f1b", 3, "processes", timeout=3.0) as pipe:
        step(pipe, batch())
        with told_within(7.0), pytest.raises(WorkerHung) as caught:
            step(pipe, batch(troubles.IN_FORWARD))
        text = str(caught.value)
        assert "no worker made progress for 3 s" in text
        assert "worker 1: 1F2 " in text
        assert "worker 2: 2F2, waiting for 1F2 from worker 1," in text
        assert " in hangs" in text
        assert not pipe.usable


def script(tmp_path: Path, text: str) -> Path:
    here = str(Path(__file__).parent)
    path = tmp_path / "script.py"
    preface = f"""
    import sys
    sys.path.insert(0, {here!r})
    import torch
    import torch.nn.functional as F
    from torch import nn
    import stageflow as sf
    """
    path.write_text(textwrap.dedent(preface) + textwrap.dedent(text))
    return path


def test_ctrl_c_in_the_middle_of_a_step(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import troubles
        x, y = torch.zeros(8, troubles.WIDTH + 1), torch.zeros(8, 2)
        with sf.Pipeline(troubles.build(1, 2, forward=troubles.hangs), stages=2, microbatches=4, boundaries=["4"],
                         loss=troubles.mean_square) as pipe:
            pipe.train_step(x, target=y)
            print("busy", flush=True)
            pipe.train_step(x + 1, target=y)
        """,
    )
    shared = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        family = descendants(process.pid)
        assert len(family) >= 2
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=5)
    finally:
        process.kill()
        process.communicate()
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert still_running(family) == []
    assert set(os.listdir("/dev/shm")) <= shared


# --------------------------------------------------------------------------------------------------- how it is started


@pytest.mark.parametrize(("first", "second"), [("processes", "processes"), ("threads", "processes")])
def test_two_pipelines_in_one_process_are_independent(first: str, second: str) -> None:
    want = plainly(build, [batch()] * 2, mean_square).losses
    with pipe_of(seeded(build), "zb_h1", 2, second) as other:
        with pipe_of(seeded(build), "1f1b", 2, first) as one:
            mixed = [(step(one, batch()), step(other, batch())) for _ in range(2)]
        assert [loss for loss, _ in mixed] == pytest.approx(want, rel=1e-5)
        assert [loss for _, loss in mixed] == pytest.approx(want, rel=1e-5)
        assert step(other, batch()) < want[1]


PLAIN_SCRIPT = """
print("script runs")
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return torch.tanh(self.inner(x))
torch.manual_seed(0)
model = nn.Sequential(*[Own() for _ in range(4)])
x, y = torch.randn(8, 4), torch.randn(8, 4)
want = F.mse_loss(model(x), y).item()
weight = 1.0
with sf.Pipeline(model, stages=2, microbatches=4, loss=lambda output, target: weight * F.mse_loss(output, target),
                 optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as pipe:
    assert abs(pipe.train_step(x, target=y).item() - want) < 1e-5
print("done")
"""


@pytest.mark.parametrize("how", ["file", "standard input"])
def test_a_script_without_a_guard_with_lambdas_and_classes_of_its_own(tmp_path: Path, how: str) -> None:
    """On standard input there is no file to import, as in a notebook."""
    path = script(tmp_path, PLAIN_SCRIPT)
    command = [sys.executable, str(path) if how == "file" else "-"]
    done = subprocess.run(
        command, input=path.read_text(), capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "script runs\ndone\n"), done.stderr


def test_what_can_not_travel_is_named() -> None:
    class Holds(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.guard = threading.Lock()

    for launch in ("threads", "processes"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Holds())
        with (
            sf.Pipeline(model, stages=2, loss=F.mse_loss, launch=launch) as pipe,
            pytest.raises((sf.StageflowError, TypeError), match=r"guard can't travel|cannot pickle '_thread.lock'"),
        ):
            pipe.train_step(torch.zeros(4, WIDTH), target=torch.zeros(4, WIDTH))


# ------------------------------------------------------------------------------------------------- wrong in the numbers


@pytest.mark.parametrize(("schedule", "stages", "launch"), [("1f1b", 2, "processes"), ("zb_h1", 4, "threads")])
def test_the_first_nan_is_named_when_asked_for(schedule: str, stages: int, launch: str) -> None:
    call = batch()
    call.args[0][7, 0] = float("nan")
    with pipe_of(build(), schedule, stages, launch, check_finite=True) as pipe:
        step(pipe, batch())
        before = pipe.state_dict()
        said = r"stage 0, micro-batch 2: what .* gives.* NaN"
        with told_within(2.0), pytest.raises(StageFailed, match=said) as caught:
            step(pipe, call)
        assert (caught.value.stage, caught.value.microbatch) == (0, 2)
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
        assert torch.tensor(step(pipe, batch())).isfinite()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: (output - target).square().mean(1), r"shape \(3,\); expected one number"),
        (lambda output, target: 0.5, "float; expected a tensor with one number"),
        (lambda output, target: (output - target).abs().sum().long(), "torch.int64; expected a floating-point"),
        (None, "no loss function was given, and the model's output .Tensor of shape .3, 2.. holds no loss"),
    ],
    ids=["vector", "number", "whole number", "none"],
)
def test_a_loss_that_is_not_one_number(loss: Any, message: str) -> None:
    with pipe_of(build(), "1f1b", 2, "threads", loss=loss) as pipe:
        with pytest.raises(StageFailed, match=message) as caught:
            step(pipe, batch())
        assert isinstance(caught.value.__cause__, InputError)
        assert pipe.usable


# ------------------------------------------------------------------------------------------- refused before any work


def arguments(**changed: Any) -> dict[str, Any]:
    return {"model": build(), "stages": 2, "microbatches": 4, "loss": mean_square, "optimizer": sgd} | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": nn.Linear}, "model is a class; expected an nn.Module"),
        ({"model": 3}, "model is a int"),
        ({"model": []}, "empty list"),
        ({"stages": 0}, "stages must be a whole number >= 1"),
        ({"microbatches": 0}, "microbatches must be a whole number >= 1"),
        ({"schedule": "1f1b1"}, "unknown schedule '1f1b1'; known: "),
        ({"loss": 0.5}, "loss= must be a function"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "holds parameters already; give a function"),
        ({"reduction": "average"}, "expected 'mean', 'sum', or a function"),
        ({"launch": "forks"}, "launch='forks'; expected one of"),
        ({"timeout": 0}, "timeout must be positive"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_can_not_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.Pipeline(**arguments(**changed))
    assert descendants_started() == set()


def test_a_schedule_that_does_not_fit() -> None:
    schedule = sf.build_schedule("1f1b", stages=3, microbatches=4)
    with pytest.raises(InputError, match="is for 3 stages, stages=2"):
        sf.Pipeline(**arguments(schedule=schedule, microbatches=None))
    with pytest.raises(InputError, match="is for 4 micro-batches, microbatches=5"):
        sf.Pipeline(**arguments(schedule=schedule, microbatches=5, stages=3))


_before: set[int] = set()


def descendants_started() -> set[int]:
    return set(descendants(os.getpid())) - _before


@pytest.fixture(autouse=True)
def _count_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch.export, which is tried last, would leave its thread
    _before.clear()
    _before.update(descendants(os.getpid()))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda pipe, x, y: pipe.train_step(x, target=y[:7]), r"10 samples, but the target has shape \(7, 2\)"),
        (lambda pipe, x, y: pipe.train_step(x, target=torch.zeros(())), r"10 samples, but the target has shape \(\)"),
        (lambda pipe, x, y: pipe.train_step(x[:0], target=y[:0]), r"the batch is empty"),
        (lambda pipe, x, y: pipe.evaluate(x, target=y[:7]), r"10 samples, but the target has shape"),
    ],
    ids=["target", "scalar target", "empty", "evaluate"],
)
def test_batches_that_can_not_be(run: Callable[..., Any], message: str) -> None:
    call = batch()
    with sf.Pipeline(**arguments()) as pipe:
        with pytest.raises(InputError, match=message):
            run(pipe, *call.args, call.target)
        assert not pipe.is_built
        assert descendants_started() == set()


def overlapping() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memory = torch.zeros(32)
    model[0].weight = nn.Parameter(memory[:16].view(4, 4))
    model[1].weight = nn.Parameter(memory[8:24].view(4, 4))
    return model


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))


def hooked_and_tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (half_on_meta, {}, r"'1\.weight' is on the meta device and has no values: pass the function"),
        (overlapping, {}, r"'0\.weight' and '1\.weight' are two objects over the same memory"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), {}, r"'0\.weight' is lazy"),
        (lambda: nn.Linear(4, 4), {}, "can't be cut into 2 stages"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)),
            {"split": "sequence"},
            "layer '1' fails on the example: .*shapes",
        ),
        (hooked_and_tied, {}, r"'0\.weight' has a hook and is used by stages 0, 1"),
        (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2), {"boundaries": ["7"]}, "boundary '7' is none of the layers"),
    ],
    ids=["meta", "overlap", "lazy", "too small", "does not run", "hook on shared", "boundary"],
)
def test_models_that_can_not_be_split(model: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    x = torch.zeros(4, 4)
    with sf.Pipeline(**arguments(model=model(), loss=F.mse_loss, **options)) as pipe:
        with pytest.raises(SplitError, match=message):
            pipe.train_step(x, target=x)
        assert not pipe.is_built
        assert descendants_started() == set()


def test_a_closed_pipeline_says_so() -> None:
    pipe = pipe_of(build(), "1f1b", 2, "threads")
    step(pipe, batch())
    pipe.close()
    pipe.close()
    for use in (lambda: step(pipe, batch()), pipe.state_dict, lambda: pipe.save("nowhere")):
        with pytest.raises(PipelineClosed, match="it was closed"):
            use()
    assert "closed" in repr(pipe)


def test_parameters_shared_by_reference_are_one(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = build()
        model[5].linear.weight = model[1].linear.weight
        return model

    want = plainly(tied, [batch()] * 3, mean_square)
    with pipe_of(seeded(tied), "zb_h1", 2, "processes") as pipe:
        assert [step(pipe, batch()) for _ in range(3)] == pytest.approx(want.losses, rel=1e-5)
        close(pipe.state_dict(), want.state)


def test_a_model_of_meta_tensors_is_built_from_its_function() -> None:
    with pipe_of(lambda: build(), "1f1b", 2, "processes") as pipe:
        torch.manual_seed(7)
        first = step(pipe, batch())
    assert first == pytest.approx(plainly(build, [batch()], mean_square).losses[0], rel=1e-5)

