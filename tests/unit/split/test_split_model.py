import threading

import pytest
import torch
from torch import nn

from stageflow.errors import InputError, SplitError
from stageflow.graph import StageGraph
from stageflow.split import LayerInfo, Split, StageSpec, split_model
from stageflow.split.state import TensorInfo, take_census

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def mlp(layers=3):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])


def test_auto_takes_the_sequence_and_says_so():
    split = split_model(mlp(), (X,), stages=2)
    assert split.way == "sequence"
    assert split.reason.startswith("Sequential of 3 layers")


def test_when_no_way_works_each_says_why():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight if x.sum() > 0 else x

    with pytest.raises(SplitError) as caught:
        split_model(One(), (X,), stages=3)
    lines = str(caught.value).splitlines()
    assert lines[0] == "One can't be cut into 3 stages:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["sequence", "blocks", "export"]


@pytest.mark.parametrize(
    "example", [(X,), [X], X, {"input": X}, ((X,), {}), ((), {"input": X})], ids=lambda e: type(e).__name__
)
def test_an_example_may_come_in_several_forms(example):
    assert split_model(mlp(), example, stages=2, split="sequence").unit == "s"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "stages must be a whole number of at least 1, got 0"),
        ({"stages": "2"}, "got '2'"),
        ({"stages": 2, "split": "magic"}, "split must be one of auto, sequence, blocks, export, got 'magic'"),
        ({"stages": 2, "balance": "flops"}, "balance must be one of time, parameters, got 'flops'"),
        ({"stages": 3, "boundaries": ["1"]}, "3 stages have 2 boundaries between them"),
        ({"stages": 2, "example": 5}, "example must be a tuple of arguments"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        split_model(mlp(), **options)


def test_what_is_no_model_is_refused():
    with pytest.raises(SplitError, match="expected an nn.Module"):
        split_model([nn.Linear(2, 2), "not a module"], stages=1)


def test_a_model_without_values_is_refused_with_what_to_do():
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(SplitError, match=r"'0\.weight' is on the meta device .* pass the function that builds"):
        split_model(model, stages=2)


def test_a_model_on_several_devices_is_refused_by_name():
    model = mlp()
    model[1] = nn.Linear(4, 4, device="meta")
    with pytest.raises(SplitError, match=r"'1\.weight' is on the meta device"):
        split_model(model, stages=2)


def test_lazy_parameters_are_refused_by_name():
    with pytest.raises(SplitError, match=r"parameter '0\.weight' is lazy"):
        split_model(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), stages=2, split="sequence")


def test_two_parameters_over_one_memory_are_refused():
    model = mlp()
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(SplitError, match=r"'0\.weight' and '1\.weight' are two objects over the same memory"):
        split_model(model, stages=2, split="sequence")
    flat = torch.zeros(32)
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    split_model(model, stages=2, split="sequence")


def test_a_census_tells_state_that_is_not_stored():
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("computed", torch.zeros(2, dtype=torch.int64), persistent=False)
    model.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.again = model.frozen
    census = take_census(model)
    assert list(census.tensors) == ["frozen", "kept", "computed"]
    assert census.aliases == {"again": "frozen"}
    assert census.tensors["computed"] == TensorInfo("buffer", (2,), torch.int64, False, False)
    assert census.tensors["computed"].nbytes == 16


class Spec(StageSpec):
    def __init__(self, index):
        self.index = index

    def build(self, device, dtype=None):
        raise AssertionError


def a_split(**changes):
    weight = TensorInfo("parameter", (2, 3), torch.float32, True, True)
    fields = {
        "graph": StageGraph.chain(2),
        "way": "sequence",
        "reason": "test",
        "specs": [Spec(0), Spec(1)],
        "owners": {"a": 0, "b": 1},
        "mirrors": {"a": (1,)},
        "aliases": {"c": "a"},
        "inputs_used": [None, None],
        "layers": [LayerInfo("x", 1.0, 0), LayerInfo("y", 3.0, 1)],
        "tensors": {"a": weight, "b": weight},
    }
    return Split(**{**fields, **changes})


def test_a_split_knows_names_and_costs():
    split = a_split()
    assert split.parameter_names(1) == ["b"]
    assert split.mirrored_names(1) == ["a"]
    assert split.layer_names(0) == ["x"]
    assert split.costs() == [1.0, 3.0]
    assert "slowest stage has 1.50 x the mean cost (by measured time)" in split.describe()
    assert "tied copies" in split.describe()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"specs": [Spec(1), Spec(0)]}, r"numbered \[1, 0\]"),
        ({"inputs_used": [None]}, "inputs_used has 1"),
        ({"owners": {"a": 0}}, "no stage owns 'b'"),
        ({"owners": {"a": 0, "b": 1, "d": 0}}, "nothing named 'd'"),
        ({"owners": {"a": 0, "b": 2}}, "'b' is in stage 2 of 2"),
        ({"mirrors": {"a": (0,)}}, "mirrors of 'a' are"),
        ({"mirrors": {"a": (7,)}}, "'a' is in stage 7"),
        ({"mirrors": {"z": (1,)}}, "'z' is mirrored but is no parameter"),
        ({"aliases": {"c": "z"}}, "'c' is tied to 'z', which nobody owns"),
        ({"aliases": {"b": "a"}}, "'b' is owned twice"),
    ],
)
def test_a_split_that_loses_or_doubles_anything_is_refused(changes, problem):
    with pytest.raises(SplitError, match=problem):
        a_split(**changes)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        raise KeyError("boom")


@pytest.mark.parametrize("split", ["auto", "blocks", "export"])
def test_a_model_that_fails_on_the_example_is_told_as_such_with_its_own_exception(split):
    with pytest.raises(
        SplitError, match=r"(?s)Failing( on the example failed|.*fails on the example): .*boom"
    ) as caught:
        split_model(Failing(), (torch.ones(2, 4),), stages=2, split=split)
    assert type(caught.value.__cause__) is KeyError
    assert "nothing was cut and no stage has started" in str(caught.value) or split == "export"


def test_a_layer_of_a_sequence_that_fails_is_named():
    layers = [nn.Linear(4, 4), nn.Linear(5, 4)]
    with pytest.raises(SplitError, match=r"running ListedModules .* \(layer '1' fails on the example: mat1") as caught:
        split_model(layers, (torch.ones(2, 4),), stages=2)
    assert isinstance(caught.value.__cause__, RuntimeError)


class Threaded(nn.Module):
    """Runs its middle in a thread that it starts itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        x = first(x)
        found = []
        work = {"layers": lambda: third(torch.relu(second(x))), "glue": lambda: x * 2.0}[self.what]
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
        thread.join()
        return last(found[0])


@pytest.mark.parametrize(
    ("what", "words"),
    [("layers", "it calls 'layers.1' in a thread of its own"), ("glue", "that no call of torch in this thread made")],
)
def test_a_forward_with_a_thread_of_its_own_is_refused_by_name(what, words):
    with pytest.raises(SplitError, match=f"can't be taken apart: .*{words}"):
        split_model(Threaded(what), (torch.ones(2, 4),), stages=2, split="blocks")


@pytest.mark.parametrize("what", ["layers", "glue"])
def test_a_part_with_a_thread_of_its_own_stays_in_one_piece(what):
    model = nn.Sequential(nn.Linear(4, 4), Threaded(what), nn.Linear(4, 4))
    found = split_model(model, (torch.ones(2, 4),), stages=3, split="blocks")
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
