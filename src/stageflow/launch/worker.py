"""A worker process, from its fork to its end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from stageflow.launch import zygote
from stageflow.launch.base import WorkerContext
from stageflow.launch.board import StatusBoard, stop_interrupt
from stageflow.launch.channel import Channel, Closed
from stageflow.launch.failure import Failure
from stageflow.launch.guard import unpacking
from stageflow.launch.servant import BUILD, Servant
from stageflow.launch.travel import pack, pack_failure, unpack
from stageflow.transport.base import Endpoint, Interrupt

FIXED_FDS = 6
"""control, board, stop, faults, stdout, stderr; what follows belongs to the wiring."""


def work(message: dict[str, Any], fds: list[int]) -> NoReturn:
    """Be worker ``message["rank"]``. Never returns."""
    control, board_fd, stop_fd, faults, out, err = fds[:FIXED_FDS]
    _take_over(message, out, err, faults)
    rank, size = message["rank"], message["size"]
    board = StatusBoard(size, board_fd)
    os.close(board_fd)
    context = WorkerContext(
        rank=rank,
        size=size,
        interrupt=stop_interrupt(board, stop_fd),
        board=board.writer(rank),
        device=message["device"],
    )
    channel = Channel(socket.socket(fileno=control))
    code = 0
    try:
        _serve(channel, context, fds[FIXED_FDS:])
    except Closed:
        code = 1  # the driver is gone
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_over(message: dict[str, Any], out: int, err: int, faults: int) -> None:
    """Look like the driver: its output, folder, environment and import path."""
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["env"])
    sys.path[:] = message["path"]
    faulthandler.enable(faults)
    faulthandler.register(zygote.STACKS_SIGNAL, faults, all_threads=True)
    torch.set_num_threads(message["threads"])


def _serve(channel: Channel, context: WorkerContext, fds: Sequence[int]) -> None:
    """Answer calls until told to close."""
    servant: Servant | None = None
    while True:
        method, *parts = channel.recv()
        name = method.decode()
        if name == "close":
            if servant is not None:
                servant.close()
            return
        try:
            if servant is None:
                servant = _make_servant(context, fds, *parts[2:])
            with unpacking():
                common, (args, kwargs) = unpack(parts[0]), unpack(parts[1])
        except BaseException as error:
            answer = None, Failure.of(context.rank, error, "unpacking what it was sent")
        else:
            answer = servant.run(name[1:], (*common, *args), kwargs)
        _answer(channel, context, name, *answer)
        del method, parts, answer


def _make_servant(context: WorkerContext, fds: Sequence[int], factory: bytes, opener: bytes) -> Servant:
    with unpacking():
        make, open_endpoint = unpack(factory), unpack(opener)
    if open_endpoint is not None:

        def connect(interrupt: Interrupt) -> Endpoint:
            return open_endpoint(list(fds), interrupt)

        context.connect = connect
    return Servant(context, make)


def _answer(channel: Channel, context: WorkerContext, name: str, result: Any, failure: Failure | None) -> None:
    if failure is None:
        try:
            payload = pack(result, f"the result of {name[1:] or BUILD} on worker {context.rank}")
        except Exception as error:
            failure = Failure.of(context.rank, error, name[1:])
        else:
            channel.send(b"result", payload)
            return
    channel.send(b"failed", pack_failure(failure))
