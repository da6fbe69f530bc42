import pytest

from stageflow.errors import InputError
from stageflow.plan.devices import ACCELERATORS, Accelerator, accelerator


@pytest.mark.parametrize("name", ["h100", "H100-SXM5-80GB", "H100 SXM5 80GB"])
def test_found_by_its_name_or_the_beginning_of_it(name: str):
    assert accelerator(name).name == "H100-SXM5-80GB"


def test_names_that_are_unknown_or_not_enough_are_refused():
    with pytest.raises(InputError, match="A100-SXM4-40GB, A100-SXM4-80GB"):
        accelerator("a100")
    with pytest.raises(InputError, match="is none of .* make an Accelerator of your own"):
        accelerator("abacus")
    with pytest.raises(InputError, match="is none of"):
        accelerator("")


def test_one_of_your_own():
    own = Accelerator("mine", "measured", half=2e12, single=1e12, memory=1e9, bandwidth=1e11, link=1e9)
    assert accelerator(own) is own
    device = own.as_device()
    assert (device.memory, device.bandwidth, device.speed) == (1e9, 1e9, 1.0)


@pytest.mark.parametrize("each", ACCELERATORS, ids=lambda each: each.name)
def test_the_table_is_plausible(each: Accelerator):
    assert each.source
    assert 3 < each.half / each.single < 20
    assert each.link < each.bandwidth < each.single
    assert each.rate(2) == each.half
    assert each.rate(4) == each.single
