import pytest

from stageflow.errors import LaunchError
from stageflow.launch.devices import choose_devices


def two(kind):
    return {"cuda": 2}.get(kind, 0)


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ("cpu", ["cpu", "cpu", "cpu"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", ["cuda:1", "cuda:1", "cuda:1"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:0"]),
        (["cuda:1", "cpu", "cuda:0"], ["cuda:1", "cpu", "cuda:0"]),
    ],
)
def test_one_device_for_each_worker(devices, chosen):
    assert choose_devices(3, devices, two) == chosen


def test_auto_without_accelerator():
    assert choose_devices(2, "auto", lambda kind: 0) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu"], r"1 devices \['cpu'\] given for 3 workers"),
        (["cuda:0", "cuda:2", "cpu"], "worker 1: 'cuda:2' asked for, but torch finds 2 cuda devices"),
        ("xpu", "torch finds no xpu device here"),
        (["cuda:one", "cpu", "cpu"], "'cuda:one' is no device name"),
    ],
)
def test_what_is_not_there_is_refused_by_name(devices, message):
    with pytest.raises(LaunchError, match=message):
        choose_devices(3, devices, two)
