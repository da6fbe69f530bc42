"""One file of tensors: every kind of tensor comes back as it was, or is refused by name."""

import errno
import os
import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from stageflow.checkpoint import write_shard
from stageflow.checkpoint.disk import record
from stageflow.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8]
DTYPES += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (3, 0, 2)], ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    entry = write_shard(tmp_path, "model", 0, 1, {"x": tensor, "y": torch.ones(5)})
    back = load_file(tmp_path / entry.file)
    assert back["x"].dtype == dtype
    assert back["x"].shape == shape
    assert back["x"].view(torch.uint8 if shape else dtype).equal(tensor.view(torch.uint8 if shape else dtype))
    assert entry.tensor_bytes == tensor.nbytes + 20


def test_views_and_shared_memory_are_stored_as_values(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    given = {
        "whole": base,
        "transposed": base.t(),
        "row": base[1],
        "column": base[:, 2],
        "expanded": torch.tensor([5.0]).expand(3, 4),
        "flipped": torch.complex(base, -base).conj(),
        "parameter": nn.Parameter(base * 2),
        "again": base,
    }
    expected = {name: tensor.detach().clone().resolve_conj() for name, tensor in given.items()}
    entry = write_shard(tmp_path, "model", 0, 1, given)
    back = load_file(tmp_path / entry.file)
    assert back.keys() == given.keys()
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), name
    assert torch.equal(base, torch.arange(24.0).reshape(4, 6))


def test_many_empty_tensors_share_no_memory_worth_refusing(tmp_path):
    entry = write_shard(tmp_path, "model", 0, 1, {"a": torch.empty(0), "b": torch.empty(0, 4)})
    back = load_file(tmp_path / entry.file)
    assert back["a"].shape == (0,)
    assert back["b"].shape == (0, 4)


def test_a_shard_without_tensors_is_a_file_too(tmp_path):
    entry = write_shard(tmp_path, "model", 1, 3, {})
    assert entry.file == "model-00002-of-00003.safetensors"
    assert entry.names == ()
    assert load_file(tmp_path / entry.file) == {}


def test_the_entry_describes_the_file(tmp_path):
    entry = write_shard(tmp_path, "optimizer", 0, 2, {"w/step": torch.tensor(3.0)})
    path = tmp_path / "optimizer-00001-of-00002.safetensors"
    assert entry.record == record(path)
    assert entry.record.bytes == path.stat().st_size
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses files without it


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2).as_subclass(Marked), "Marked"),
    ],
    ids=["sparse", "meta", "complex128", "subclass"],
)
def test_what_has_no_form_is_refused_by_name_before_writing(tmp_path, tensor, reason):
    with pytest.raises(CheckpointError, match=f"'bad' can't be saved.*{reason}"):
        write_shard(tmp_path, "model", 0, 1, {"good": torch.ones(1), "bad": tensor})
    assert list(tmp_path.iterdir()) == []


def test_a_plain_part_that_is_not_plain_is_refused_by_its_place(tmp_path):
    with pytest.raises(CheckpointError, match=r"optimizer state\['scheduler'\]\['rule'\] is a .*function"):
        write_shard(tmp_path, "optimizer", 0, 1, {}, {"scheduler": {"rule": lambda step: 1.0}})


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors could not be written.*No space left"):
        write_shard(tmp_path, "model", 0, 1, {"w": torch.ones(2)})


def test_a_write_that_the_system_stops_half_way(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors could not be written.*too large"):
            write_shard(tmp_path, "model", 0, 1, {"w": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
