"""Between processes of one host: tensors are copied once, into memory both sides map, and handed out where they lie.

    hub.py        made by the driver: one piece of unnamed memory and a doorbell per worker
    endpoint.py   a worker's door: waits, wakes, demultiplexes
    outlet.py     the sending half of one ordered pair of workers
    inlet.py      the receiving half
    extents.py    which parts of an arena are free
    layout.py     where everything lies in the shared memory
    ordering.py   what may be assumed about the order of reads and writes
    doorbell.py   wakes a sleeping worker
    pump.py       sends what had no room, while its worker computes

For each ordered pair of workers the memory holds a ring of offsets and an arena. To send, a worker takes a free block
of the arena, copies a frame into it and puts its offset in the ring. The receiver makes tensors upon that very block;
when the last of them is garbage it marks the block free with a single store, in any order and from any thread, and
the sender takes it back when it next looks. A receiver that holds more than half of an arena gets copies
instead, so that the other half always becomes free again and no receiver can starve a sender, however long it keeps
what it got. What finds no room waits in the sender's own memory.
"""

from stageflow.transport.shm.endpoint import ShmEndpoint
from stageflow.transport.shm.hub import ShmHub

__all__ = ["ShmEndpoint", "ShmHub"]
