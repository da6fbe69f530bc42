"""`stageflow doctor` measures the link between two real worker processes."""

from stageflow.cli.links import SIZES, measure_links


def test_every_size_is_measured():
    links = measure_links()
    assert [link["bytes"] for link in links] == list(SIZES)
    assert all(1e-7 < link["seconds"] < 1 for link in links)
    assert links[0]["seconds"] < links[-1]["seconds"]
