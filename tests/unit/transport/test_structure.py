import dataclasses
import enum
import json
import math
import threading
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from stageflow.errors import FrameError
from stageflow.transport.structure import flatten, unflatten

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Hidden:
    state: torch.Tensor
    scale: float = 1.0
    note: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: tuple


@dataclasses.dataclass
class Output(OrderedDict):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    states: tuple | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Colour(enum.Enum):
    RED = 1


class Loud:
    """Must never be built by an outline."""


@dataclasses.dataclass
class Explosive:
    a: int = 0

    def __post_init__(self):
        raise AssertionError("code of a class ran")


def through(value, classes=None):
    tensors, meta = flatten(value)
    return unflatten(json.loads(json.dumps(meta, allow_nan=False)), tensors, classes)


PLAIN = [
    None, True, 0, -(10**30), 1.5, 0.1, "text", "\ud800 lone", b"\x00\xff", 1 + 2j, complex(float("inf"), -0.0),
    [], [1, [2, [3]]], (), (1,), (1, (2, "a")), {}, {"a": 1}, {1: "a", (2, 3): None, "b": [1]},
    {1, 2}, frozenset({"a"}), slice(1, None, 2), range(3, 9, 2), torch.Size([2, 3]), torch.bfloat16,
    torch.device("cuda:1"), ..., OrderedDict([("z", 1), ("a", 2)]), Point(1, "b"), Frozen(1, (2,)), Colour.RED,
    {"tensor": "not one"}, {"tuple": [1]}, float("inf"), float("-inf"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN)
def test_plain_values_come_back_equal_and_of_the_same_type(value):
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back():
    assert math.isnan(through([float("nan")])[0])


def test_one_tensor():
    x = torch.ones(2)
    tensors, meta = flatten(x)
    assert tensors == {"0": x}
    assert unflatten(meta, tensors) is x


def test_tensors_keep_identity_and_place():
    a, b = torch.ones(2), torch.zeros(3)
    value = {"a": [a, None], "b": (b, a, 7)}
    tensors, _ = flatten(value)
    assert list(tensors) == ["0", "1"]
    back = through(value)
    assert back["a"][0] is a
    assert back["b"][1] is a
    assert back["b"][0] is b
    assert back["a"][1] is None


def test_dataclass_with_tensor_and_later_attribute():
    value = Hidden(torch.ones(2), note="n")
    value.extra = 3
    back = through(value)
    assert type(back) is Hidden
    assert back.state is value.state
    assert (back.scale, back.note, back.extra) == (1.0, "n", 3)


def test_ordered_dict_dataclass_is_both_again():
    value = Output(logits=torch.ones(2), states=(torch.zeros(1),))
    back = through(value)
    assert type(back) is Output
    assert back.loss is None
    assert list(back) == ["logits", "states"]
    assert back["logits"] is back.logits is value.logits


def test_transformers_output():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=torch.ones(1, 2))
    back = through(value)
    assert type(back) is type(value)
    assert back.to_tuple() == value.to_tuple()
    assert back.past_key_values is None
    assert back[1] is value.logits


def test_torch_result_type():
    value = torch.ones(2, 3).max(dim=1)
    back = through(value)
    assert type(back) is type(value)
    assert back.values is value.values


def test_numpy():
    value = {"a": np.arange(6).reshape(2, 3)[:, ::-1], "b": np.float64(2.5), "c": np.asarray(1)}
    back = through(value)
    assert np.array_equal(back["a"], value["a"])
    assert type(back["b"]) is np.float64
    assert back["b"] == 2.5
    assert back["c"].shape == ()


def test_parameter_and_subclass_travel_as_tensors():
    p = torch.nn.Parameter(torch.ones(1))
    assert through([p])[0] is p


def test_local_class_through_the_table():
    @dataclasses.dataclass
    class Local:
        a: int

    classes = {}
    tensors, meta = flatten(Local(3), classes)
    assert unflatten(meta, tensors, classes) == Local(3)
    with pytest.raises(FrameError, match=r"<locals>.Local' is not known in this process: define it at the top level"):
        unflatten(meta, tensors)


class Cache:
    """Holds state like a key-value cache does."""

    def __init__(self, layers):
        self.layers = layers
        self.kind = Loud
        self.size = len(layers)


def test_plain_objects_travel_only_with_a_table():
    value, classes = [Cache([torch.ones(2)])], {}
    tensors, meta = flatten(value, classes)
    back = unflatten(json.loads(json.dumps(meta)), tensors, classes)[0]
    assert type(back) is Cache
    assert back.layers[0] is value[0].layers[0]
    assert (back.kind, back.size) == (Loud, 1)
    with pytest.raises(FrameError, match="not in the table"):
        unflatten(meta, tensors)
    with pytest.raises(FrameError, match=r"value\[0\] is a .*Cache, which can't travel"):
        flatten(value)


def test_transformers_cache():
    utils = pytest.importorskip("transformers.cache_utils")
    cache, classes = utils.DynamicCache(), {}
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    tensors, meta = flatten({"cache": cache}, classes)
    assert len(tensors) == 2
    back = unflatten(meta, tensors, classes)["cache"]
    assert back.get_seq_length() == 3
    assert torch.equal(back.layers[0].keys, torch.ones(1, 2, 3, 4))


class Slotted:
    __slots__ = ("a",)


class Dying:
    def __del__(self):
        pass


@pytest.mark.parametrize(
    "value",
    [torch.nn.Linear(1, 1), Slotted(), Dying(), lambda: 0, ValueError(), iter([]), threading.Lock()],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_are_more_than_their_attributes_do_not_travel(value):
    with pytest.raises(FrameError, match="can't travel"):
        flatten(value, {})


def test_no_code_of_a_class_runs():
    value = object.__new__(Explosive)
    value.a = 4
    assert through(value).a == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, 1, Loud()]}, r"^output\['a'\]\[2\] is a .*Loud, which can't travel"),
        (Hidden(Loud()), r"^output\.state is a .*Loud"),
        ((lambda: 0,), r"^output\[0\] is a builtins\.function"),
        ({Loud(): 1}, r"^output\.keys\(\)\[0\] is a .*Loud"),
        ([np.array([object()])], r"^output\[0\] is a numpy array of object"),
    ],
)
def test_no_plain_form_names_the_place(value, message):
    with pytest.raises(FrameError, match=message):
        flatten(value, where="output")


def test_a_value_that_contains_itself():
    value = []
    value.append(value)
    with pytest.raises(FrameError, match=r"^output\[0\]\[0\].* contains itself"):
        flatten(value, where="output")


@pytest.mark.parametrize(
    "meta",
    [
        {"tensor": "9"}, {"tensor": []}, {"nonsense": 1}, {}, {"a": 1, "b": 2}, {"tuple": 5}, {"dict": []},
        {"dtype": "nn"}, {"dtype": "Tensor"}, {"device": "quantum"}, {"device": 3}, {"bytes": "*"}, {"slice": [1] * 4},
        {"range": ["a"]}, {"items": [[1]]}, {"items": [[[], 1]]}, {"set": [[1]]}, {"size": ["a"]}, {"complex": [1]},
        {"dataclass": ["os:system", {}]}, {"dataclass": [f"{__name__}:Loud", {}]}, {"dataclass": ["nowhere:X", {}]},
        {"dataclass": [f"{__name__}:Frozen", {"nope": 1}]}, {"namedtuple": [f"{__name__}:Point", [1]]},
        {"namedtuple": ["builtins:tuple", [1]]}, {"enum": [f"{__name__}:Colour", "BLUE"]}, {"enum": ["os:system", "x"]},
        {"output": [f"{__name__}:Hidden", {}, []]}, {"output": [f"{__name__}:Output", {}, ["x"]]},
        {"returned": ["builtins:print", []]}, {"dataclass": [5, {}]}, {"numpy": "0"}, {1, 2}, {"float": 1},
        {"object": [f"{__name__}:Loud", {}]}, {"class": "os:system"},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_outlines_are_refused(meta):
    with pytest.raises(FrameError):
        unflatten(meta, {})
