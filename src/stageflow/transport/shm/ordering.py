"""What may be assumed about the order in which another process sees reads and writes.

Two things are assumed everywhere: a store or load of an aligned 8-byte word through a memoryview is one instruction
(CPython copies it with a fixed-size memcpy), and the compiler moves nothing across those calls, as each is a call
through a function pointer.

Beyond that, three orders are needed:
  * write a block, then publish it; see it published, then read it; read it, then mark it free (`in_order`);
  * store "published", then load "does the receiver sleep?", and the mirror image of it (`full_barrier`).

x86 keeps loads and stores in order except a load after a store, so `in_order` costs nothing there and `full_barrier`
is any locked instruction: taking a free lock is one. On other processors both are a system call that is a memory
barrier: membarrier(2) on Linux, OSMemoryBarrier on macOS.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import threading
from collections.abc import Callable

from stageflow.errors import LaunchError

_KEEPS_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "loongarch64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4


def in_order(keeps_order: bool = _KEEPS_ORDER) -> Callable[[], None] | None:
    """To be called between two accesses that must not change places; None where that never happens.

    The result may be called from any thread, also while another call of it is interrupted by garbage collection.
    Raises LaunchError on a machine where no such thing is known.
    """
    return None if keeps_order else _barrier_call()


def full_barrier(keeps_order: bool = _KEEPS_ORDER) -> Callable[[], None]:
    """To be called between a store and a later load that must not change places; one thread at a time."""
    if not keeps_order:
        return _barrier_call()
    lock = threading.Lock()

    def barrier() -> None:
        lock.acquire()
        lock.release()

    return barrier


def _barrier_call() -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        return libc.OSMemoryBarrier
    number = _MEMBARRIER.get(platform.machine())
    if number is None or libc.syscall(number, _REGISTER_GLOBAL_EXPEDITED, 0) != 0:
        reason = errno.errorcode.get(ctypes.get_errno(), "unknown processor")
        raise LaunchError(
            f"shared memory between workers needs membarrier(2) on {platform.machine()} and the system refuses it "
            f"({reason}): launch the workers with torchrun, which uses torch.distributed instead"
        )

    def barrier() -> None:
        libc.syscall(number, _GLOBAL_EXPEDITED, 0)

    return barrier
