"""A pipeline that is used wrongly says so, at once and without harm; workers are threads here."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import stageflow as sf
from stageflow.errors import InputError, LaunchError, PipelineClosed, SplitError, StageFailed, StageflowError

X, Y = torch.ones(4, 4), torch.zeros(4, 4)


def make(model: Any = None, **options: Any) -> sf.Pipeline:
    torch.manual_seed(0)
    options = {
        "microbatches": 2,
        "loss": F.mse_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "launch": "threads",
    } | options
    return sf.Pipeline(model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": "2"},
        {"workers": True},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": "1"},
        {"batch_dims": 3},
        {"batch_dims": {"input": -1}},
        {"batch_dims": {"input": "0"}},
        {"device": None},
        {"device": torch.device("cpu")},
        {"dtype": "float32"},
        {"dtype": torch.int64},
        {"autocast": "bfloat16"},
        {"seed": None},
        {"seed": 1.5},
        {"threads": 0},
        {"timeout": float("nan")},
        {"timeout": None},
        {"schedule": "forward_only"},
    ],
    ids=str,
)
def test_options_that_can_not_be_are_refused_by_name(options):
    with pytest.raises(InputError, match=next(iter(options))):
        make(**options)


@pytest.mark.parametrize("boundaries", [3, "1", ["0", "1"]])
def test_boundaries_are_a_list_of_one_less_than_stages(boundaries):
    with make(boundaries=boundaries) as pipe, pytest.raises(InputError, match="1 boundaries"):
        pipe.train_step(X, target=Y)


@pytest.mark.parametrize(
    "amount", [lambda target: "x", torch.clone, lambda target: float("inf")], ids=["word", "vector", "infinity"]
)
def test_a_reduction_that_gives_no_weight_is_refused(amount):
    with make(reduction=amount) as pipe, pytest.raises(InputError, match="reduction gave"):
        pipe.train_step(X, target=Y)


def test_a_state_that_does_not_fit_is_refused_whole():
    with make(example=(X,)) as pipe:
        good = pipe.state_dict()
        for bad, words in (
            (None, "must map names to tensors"),
            ({**good, "0.weight": [[1.0]]}, "0.weight is a list"),
            ({**good, "0.weight": torch.empty(4, 4, device="meta")}, "0.weight is a meta Tensor"),
            ({**good, "0.weight": good["0.weight"].to(torch.complex64)}, "0.weight is real"),
            ({**good, 3: X}, "unknown: 3"),
        ):
            with pytest.raises(InputError, match=words):
                pipe.load_state_dict({"1.bias": X[0], **bad} if bad else bad)  # type: ignore[arg-type]
        assert torch.equal(pipe.state_dict()["1.bias"], good["1.bias"])


def test_tied_names_with_two_values_are_refused():
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    with make(tied, example=(X,)) as pipe:
        pipe.load_state_dict({"0.weight": X, "1.weight": X.clone()})
        with pytest.raises(InputError, match="one tied tensor"):
            pipe.load_state_dict({"0.weight": X, "1.weight": Y})


@pytest.mark.parametrize("stage", [2, -1, "0", 0.5])
def test_there_is_no_such_stage(stage):
    with make(example=(X,)) as pipe, pytest.raises(InputError, match="no stage"):
        pipe.parameters_of(stage)


def test_who_calls_while_a_step_runs_is_refused_and_the_step_goes_on():
    inside, go_on = threading.Event(), threading.Event()
    losses: list[Tensor] = []

    def amount(target: Tensor) -> int:  # called by the step, in its own thread
        inside.set()
        assert go_on.wait(30.0)
        return len(target)

    with make(reduction=amount) as pipe, make() as same:
        step = threading.Thread(target=lambda: losses.append(pipe.train_step(X, target=Y)))
        step.start()
        assert inside.wait(30.0)
        for call in (partial(pipe.train_step, X, target=Y), partial(pipe.predict, X), pipe.state_dict, pipe.zero_grad):
            with pytest.raises(InputError, match=r"while train_step\(\) of the same pipeline runs"):
                call()
        go_on.set()
        step.join()
        assert losses == [same.train_step(X, target=Y)]
        assert pipe.train_step(X, target=Y) == same.train_step(X, target=Y)
        assert pipe.steps == 2


def test_a_loss_that_calls_its_own_pipeline_does_not_hang():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return pipe.predict(output).sum()

    with make(loss=loss) as pipe:
        with pytest.raises(StageFailed, match="a pipeline does one thing at a time"):
            pipe.train_step(X, target=Y)
        assert pipe.usable


class _Arrays(nn.Module):
    """Reads a numpy array between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, amounts: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x) + float(amounts.sum())
        return x


def _array_loss(output: Tensor, target: np.ndarray) -> Tensor:
    return F.mse_loss(output, torch.from_numpy(target))


@pytest.mark.parametrize("amounts", [np.ones(3), np.float64(2.0)], ids=["array", "scalar"])
def test_numpy_inputs_and_targets_reach_the_stages_that_read_them(amounts):
    model = _Arrays()
    with make(model, loss=_array_loss, optimizer=None) as pipe, torch.no_grad():
        for scale in (1.0, 2.0):
            expected = F.mse_loss(model(X, amounts * scale), Y)
            torch.testing.assert_close(pipe.train_step(X, amounts * scale, target=Y.numpy()), expected)


class _Layers(nn.Module):
    """Layers in a loop, which is cut as blocks."""

    def __init__(self, doubling: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.doubling = doubling

    def forward(self, x: Tensor) -> Tensor:
        if self.doubling:
            x.mul_(2.0)
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model: nn.Module, steps: int) -> list[Tensor]:
    """Losses of plain training, one micro-batch after the other."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = [F.mse_loss(model(x.clone()), y) / 2 for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
        sum(parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(sum(parts).detach())  # type: ignore[union-attr]
    return losses


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_model_that_writes_into_its_inputs(schedule):
    batch = X.clone()
    with make(_Layers(doubling=True), schedule=schedule) as pipe:
        losses = [pipe.train_step(batch, target=Y) for _ in range(2)]
    torch.testing.assert_close(losses, trained(_Layers(doubling=True), 2))
    assert torch.equal(batch, X)  # not even by the split, which runs the model


def _normed(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            parametrizations.weight_norm(module)
    return model


@pytest.mark.parametrize("build", [_Layers, lambda: nn.Sequential(*_Layers().layers)], ids=["blocks", "sequence"])
def test_parametrized_weights_travel(build):
    with make(_normed(build())) as pipe:
        losses = [pipe.train_step(X, target=Y) for _ in range(2)]
        assert pipe.split.way in ("blocks", "sequence")
    torch.testing.assert_close(losses, trained(_normed(build()), 2))


def test_a_first_predict_in_inference_mode_does_not_spoil_training():
    with make(_Layers()) as pipe:
        with torch.inference_mode():
            pipe.predict(X)
        torch.testing.assert_close([pipe.train_step(X, target=Y)], trained(_Layers(), 1))


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleDict({"a": nn.Linear(4, 4)})])
def test_containers_without_a_forward_are_refused(model):
    with pytest.raises(InputError, match="has no forward"):
        make(model)


@pytest.mark.parametrize("model", ["gpt2", Path("models/gpt2")], ids=repr)
def test_a_path_for_a_model_is_answered_with_what_to_give(model):
    with pytest.raises(InputError, match=r"is the path .*; give a function .*from_pretrained\("):
        make(model)


def _hooked() -> nn.Module:
    model = _Layers()
    model.layers[1].register_full_backward_hook(lambda *_: None)
    return model


def _scripted() -> Any:
    return torch.jit.script(nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (nn.Identity, "computes nothing"),
        (_hooked, "'layers.1' has backward hooks"),
        (_scripted, "is a scripted module"),
    ],
)
def test_models_that_can_not_be_cut_are_refused_by_name(build, words):
    with make(build()) as pipe, pytest.raises(SplitError, match=words):
        pipe.train_step(X, target=Y)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_can_not_be_copied_is_named():
    with (
        make(nn.Sequential(_scripted(), nn.Linear(4, 4))) as pipe,
        pytest.raises(LaunchError, match=r"stage 0\.weights\.modules\[0\]"),
    ):
        pipe.train_step(X, target=Y)


@pytest.mark.parametrize("example", [5, "x", object()], ids=lambda value: type(value).__name__)
def test_an_example_that_is_none_is_refused_at_once(example):
    with pytest.raises(InputError, match="example must be a tuple of arguments"):
        make(example=example)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__)
def test_a_pipeline_can_be_neither_copied_nor_pickled(way):
    with make() as pipe, pytest.raises(InputError, match="holds workers and can be neither copied nor pickled"):
        way(pipe)


def test_very_many_micro_batches_cost_nothing_until_a_batch_gives_so_many():
    began = time.monotonic()
    with make(microbatches=100_000) as pipe:
        with pytest.warns(UserWarning, match="4 samples gives 4 micro-batches, not 100000"):
            loss = pipe.train_step(X, target=Y)
        assert len(pipe.last_step.schedule.orders[0]) == 8
    assert time.monotonic() - began < 10.0  # to make and prove the schedule of 100,000 takes longer
    with make(microbatches=4) as same:
        assert same.train_step(X, target=Y) == loss


def test_ctrl_c_in_the_middle_of_a_save_leaves_the_one_before(tmp_path, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with make() as pipe:
        pipe.train_step(X, target=Y)
        pipe.save(tmp_path / "run")
        saved = pipe.state_dict()
        pipe.train_step(X, target=Y)
        with monkeypatch.context() as patch:
            patch.setattr("stageflow.train.crew.write_config", interrupted)
            with pytest.raises(KeyboardInterrupt) as caught:
                pipe.save(tmp_path / "run")
        assert "holds what it held before" in caught.value.__notes__[0]
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        pipe.load(tmp_path / "run")
        assert all(torch.equal(value, saved[name]) for name, value in pipe.state_dict().items())


def test_a_pipeline_whose_workers_ended_in_any_call_says_so_afterwards(monkeypatch):
    with make(example=(X,)) as pipe:
        pipe.state_dict()

        def ended(*_: Any) -> None:
            pipe._life._crew.close()  # type: ignore[union-attr]
            raise KeyboardInterrupt

        monkeypatch.setattr("stageflow.train.crew.DriverCrew.state", ended)
        with pytest.raises(KeyboardInterrupt):
            pipe.state_dict()
        with pytest.raises(PipelineClosed, match=r"ended after a failure in state_dict\(\) \(KeyboardInterrupt"):
            pipe.train_step(X, target=Y)


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_a_model_built_by_a_function_takes_its_weights_from_files(tmp_path, monkeypatch):
    stored = _build()
    save_file(stored.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    for path in ("model.safetensors", tmp_path):
        with make(_build, weights=path) as pipe:
            torch.testing.assert_close(pipe.predict(X), stored(X))
            held = [each["parameters"] for each in pipe.memory()]
            assert held == [80, 80]  # each worker its own part


@pytest.mark.parametrize(
    ("model", "weights", "words"),
    [
        (_build, "nowhere", "there is nothing at /"),
        (_build, 3, "must be the path of a safetensors file"),
        (_build(), "nowhere", "a module brings its own"),
    ],
)
def test_weights_that_can_not_be_are_refused_at_once(model, weights, words):
    with pytest.raises(InputError, match=words):
        make(model, weights=weights)


def test_stored_weights_that_do_not_fit_are_told_by_name(tmp_path):
    save_file({"0.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with (
        make(_build, weights=tmp_path) as pipe,
        pytest.raises(
            StageflowError, match="3 tensors of the model are not stored under their names, among them 0.bias"
        ),
    ):
        pipe.train_step(X, target=Y)


class _LooksBackWhenLong(nn.Module):
    """For long sequences it needs once more what its first layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x + first if x.shape[1] > 5 else x


def test_a_path_that_only_other_shapes_take_is_told_with_what_it_needs():
    short, long = torch.ones(4, 3, 4), torch.ones(4, 7, 4)
    with make(_LooksBackWhenLong(), example=(short,)) as pipe:
        first = pipe.train_step(short, target=short)
        words = r"stage 1: add in .* needs what 'layers.0' gives .* did not show, because of other values or shapes"
        with pytest.raises(StageFailed, match=words):
            pipe.train_step(long, target=long)
        assert pipe.train_step(short, target=short) < first
    with make(_LooksBackWhenLong(), example=(long,)) as pipe:
        assert pipe.evaluate(long, target=long).isfinite()
        assert pipe.train_step(short, target=short).isfinite()


@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_loss_without_a_gradient_is_refused_before_the_update(schedule: str, recompute: Any) -> None:
    """torch says so in backward(); silence would be a training that does nothing."""
    with make(loss=lambda o, t: F.mse_loss(o, t).detach(), schedule=schedule, recompute=recompute) as pipe:
        with pytest.raises(StageFailed, match="the loss depends on no parameter"):
            pipe.train_step(X, target=Y)
        assert pipe.usable
        assert pipe.evaluate(X, target=Y) > 0


def test_one_micro_batch_may_have_a_loss_without_a_gradient() -> None:
    """One that has no words to predict, say."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) if target.any() else torch.zeros(())

    target = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 4)
    with make(loss=loss) as pipe:
        pipe.train_step(X, target=target)
        assert all(gradient is not None for gradient in pipe.gradients().values())
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    with make(frozen) as pipe:
        assert pipe.train_step(X, target=target) > 0
