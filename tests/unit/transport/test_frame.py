import random

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from stageflow.errors import FrameError
from stageflow.graph import Bundle
from stageflow.transport import descriptors, frame
from stageflow.transport.base import Tag
from stageflow.transport.descriptors import ALIGNMENT
from stageflow.transport.frame import PREFIX_SIZE, Decoder, Encoder, read_header

TAG = Tag(3, "F", 0, 1, 7)


def to_bytes(bundle, tag=TAG, encoder=None):
    made = (encoder or Encoder()).encode(tag, bundle)
    memory = np.zeros(made.size, np.uint8)
    made.copy_to(memory.ctypes.data)
    return memory


def through(bundle, tag=TAG):
    return Decoder().decode(to_bytes(bundle, tag))


def values(dtype):
    """A 3 x 4 tensor of random bits."""
    draw = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 4 * dtype.itemsize), generator=draw)
    return bits.to(torch.uint8).view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", list(descriptors._CODES), ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype):
    x = values(dtype)
    _, back = through(Bundle({"x": x}))
    assert back.tensors["x"].dtype is dtype
    assert back.tensors["x"].shape == x.shape
    assert torch.equal(back.tensors["x"].view(torch.uint8), x.view(torch.uint8))


class Named(torch.Tensor):
    """An ordinary subclass."""


ODD = {
    "subclass": torch.ones(2).as_subclass(Named),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0),
    "empty with shape": torch.empty(3, 0, 2, dtype=torch.int64),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "expanded": torch.arange(3.0).expand(4, 3),
    "strided": torch.arange(10)[::3],
    "offset": torch.arange(10)[3:5],
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative view": torch.tensor([1 + 2j]).conj().imag,
    "requires grad": torch.ones(2, requires_grad=True) * 2,
    "many dimensions": torch.ones([1] * 12 + [2]),
}


@pytest.mark.parametrize("name", list(ODD))
def test_odd_tensors_come_back_without_gaps_and_in_their_order(name):
    _, back = through(Bundle({"x": ODD[name]}))
    x = back.tensors["x"]
    assert torch.equal(x, ODD[name])
    assert x.shape == ODD[name].shape
    assert x.dim() == 1 or x.stride() == torch.empty_like(ODD[name]).stride()
    assert not x.requires_grad
    assert type(x) is torch.Tensor


def test_all_at_once_with_names_tag_and_meta():
    meta = {"a": [1, None, True, 2.5, "ü", -(2**80)], "b": {"": []}}
    tag = Tag(-5, "abort", -1, 2**31 - 1, 2**62)
    back_tag, back = through(Bundle(dict(ODD) | {"": torch.ones(1), "ünï": torch.zeros(1)}, meta), tag)
    assert back_tag == tag
    assert back.meta == meta
    assert list(back.tensors) == [*ODD, "", "ünï"]
    for name, x in ODD.items():
        assert torch.equal(back.tensors[name], x)


def test_an_empty_bundle():
    assert through(Bundle()) == (TAG, Bundle())


def test_tensors_are_aligned_views_of_the_memory():
    memory = to_bytes(Bundle({"a": torch.ones(3), "b": torch.ones(5, dtype=torch.uint8)}))
    _, back = Decoder().decode(memory)
    for x in back.tensors.values():
        assert (x.data_ptr() - memory.ctypes.data) % ALIGNMENT == 0
    back.tensors["a"].fill_(7)
    assert torch.equal(Decoder().decode(memory)[1].tensors["a"], torch.full((3,), 7.0))


def test_repeated_shapes_are_not_described_anew():
    encoder, decoder = Encoder(), Decoder()
    for i in range(3):
        x = torch.full((2, 2), float(i))
        _, back = decoder.decode(to_bytes(Bundle({"x": x}, [i]), encoder=encoder))
        assert torch.equal(back.tensors["x"], x)
        assert back.meta == [i]
    assert len(encoder._forms) == len(decoder._forms) == 3  # one a meta


def test_a_remembered_meta_is_not_mistaken_for_an_equal_one():
    encoder, decoder = Encoder(), Decoder()
    metas = [[1, 0], [True, False], [1.0, 0.0], [1.0, -0.0], {"a": 1, "b": 2}, {"b": 2, "a": 1}, "é", [[], {}]]
    for _ in range(2):
        for meta in metas:
            _, back = decoder.decode(to_bytes(Bundle({}, meta), encoder=encoder))
            assert repr(back.meta) == repr(meta)
        for unlike in ((1, 0), {1: 2}, b"x", [bytearray(b"x")], {1, 0}):
            with pytest.raises(FrameError, match="are plain"):
                encoder.encode(TAG, Bundle({}, unlike))


def test_memory_of_shapes_is_bounded():
    encoder, decoder = Encoder(remember=4), Decoder(remember=4)
    for i in range(20):
        decoder.decode(to_bytes(Bundle({"x": torch.ones(i)}), encoder=encoder))
    assert len(encoder._forms) <= 4
    assert len(decoder._forms) <= 4


def test_pieces_put_together_are_the_frame():
    made = Encoder().encode(TAG, Bundle(dict(ODD), {"k": list(range(40))}))
    whole, pieces = np.zeros(made.size, np.uint8), np.zeros(made.size, np.uint8)
    made.copy_to(whole.ctypes.data)
    for start in range(0, made.size, 37):
        stop = min(start + 37, made.size)
        made.copy_piece(pieces.ctypes.data + start, start, stop)
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize(
    ("bundle", "message"),
    [
        (Bundle({"s": torch.eye(2).to_sparse()}), r"sparse.* shape \(2, 2\) can't travel"),
        (Bundle({"m": torch.ones(2, device="meta")}), "a meta tensor"),
        (Bundle({"t": TwoTensor(torch.ones(2), torch.ones(2))}), "a TwoTensor can't travel"),
        (Bundle({}, (1, 2)), r"holds a tuple .*use transport.structure.flatten"),
        (Bundle({}, {1: 2}), "str keys"),
        (Bundle({}, [object()]), "holds a object"),
    ],
    ids=["sparse", "meta", "wrapper", "tuple", "int key", "object"],
)
@pytest.mark.parametrize("make", [lambda b: Encoder().encode(TAG, b), lambda b: frame.portable_copy(TAG, b)])
def test_what_has_no_frame_is_refused(bundle, message, make):
    with pytest.raises(FrameError, match=message):
        make(bundle)


@pytest.mark.parametrize("kind", ["", "ninechars", "é", "a\0b"])
def test_kinds_are_short_ascii_words(kind):
    with pytest.raises(FrameError, match="1 to 8 printable ASCII"):
        Encoder().encode(TAG._replace(kind=kind), Bundle())


def test_numbers_too_large():
    with pytest.raises(FrameError, match="too large"):
        Encoder().encode(TAG._replace(source=2**40), Bundle())


@pytest.mark.parametrize("known", [False, True], ids=["new form", "known form"])
def test_every_damaged_byte_of_the_header_is_noticed(known):
    memory = to_bytes(Bundle({"x": torch.ones(4), "y": torch.ones(2, 3)}, {"a": 1}))
    decoder = Decoder()
    if known:
        decoder.decode(memory)
    header = read_header(memory[:PREFIX_SIZE].tobytes())
    for at in range(PREFIX_SIZE - 4 + header.descriptors + header.meta):
        if at in range(PREFIX_SIZE - 4, PREFIX_SIZE):
            continue  # padding
        damaged = memory.copy()
        damaged[at] ^= 0x55
        with pytest.raises(FrameError):
            decoder.decode(damaged)


@pytest.mark.parametrize("length", [0, 1, PREFIX_SIZE - 1, PREFIX_SIZE, 100, -1])
def test_cut_off_frames_are_refused(length):
    memory = to_bytes(Bundle({"x": torch.ones(40)}))
    decoder = Decoder()
    decoder.decode(memory)
    for reader in (Decoder(), decoder):
        with pytest.raises(FrameError):
            reader.decode(memory[:length])


def test_random_descriptors_never_crash():
    draw = random.Random(0)
    good, _ = descriptors.describe([("x", torch.float32, (2, 3), (1, 0)), ("y", torch.int64, (4,), None)])
    read = refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            for d in descriptors.parse_descriptors(2, 128, bytes(data)):
                assert d.offset + d.numel * d.dtype.itemsize <= 128
            read += 1
        except FrameError:
            refused += 1
    assert read
    assert refused > read
