"""What there is to run workers on: cores, and which device each worker gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stageflow.errors import LaunchError


def choose_devices(size: int, devices: str | Sequence[str], count: Callable[[str], int] | None = None) -> list[str]:
    """One device name per worker.

    devices: "cpu" for all; an accelerator's name ("cuda"): worker r gets number r modulo how many there are; "auto":
        "cuda" where there is any, else "cpu"; or a list with one name for each worker ("cuda:0", "cuda:0", "cpu").
    count: how many devices of a kind there are; asks torch by default (and only for kinds other than "cpu").

    Raises LaunchError when there are too few or the list has another length.
    """
    count = count or _count
    if isinstance(devices, str):
        if devices == "auto":
            devices = "cuda" if count("cuda") else "cpu"
        if devices == "cpu" or ":" in devices:
            devices = [devices] * size
        else:
            found = count(devices)
            if not found:
                raise LaunchError(f"devices={devices!r}, but torch finds no {devices} device here: use devices='cpu'")
            devices = [f"{devices}:{rank % found}" for rank in range(size)]
    if len(devices) != size:
        raise LaunchError(f"{len(devices)} devices {list(devices)} given for {size} workers: give one for each")
    for rank, device in enumerate(devices):
        _check(rank, device, count)
    return list(devices)


def _check(rank: int, device: str, count: Callable[[str], int]) -> None:
    kind, colon, number = device.partition(":")
    if kind in ("cpu", "meta"):
        return
    if colon and not number.isdecimal():
        raise LaunchError(f"worker {rank}: {device!r} is no device name; write it like 'cuda:0' or 'cpu'")
    found = count(kind)
    if int(number or 0) >= found:
        raise LaunchError(f"worker {rank}: {device!r} asked for, but torch finds {found} {kind} devices here")


def _count(kind: str) -> int:
    import torch  # only where an accelerator was asked for: planning and supervising stay torch-free

    if kind == "cuda":
        return torch.cuda.device_count()  # counts without making a context, so workers can still be forked
    counter: Callable[[], int] | None = getattr(getattr(torch, kind, None), "device_count", None)
    return counter() if counter is not None else 0
