"""Over torch.distributed: gloo between processes of any hosts, with NCCL for what lies on GPUs.

    endpoint.py   a worker's door: inbox, waits, abort messages
    lane.py       the two directions between this worker and one peer, over gloo
    device.py     the tensors of a message that lie on a GPU, over NCCL

Every message is a frame. Its first ``HEAD_BYTES`` go as one message of fixed size, for which receives are always posted
ahead; the rest, if any, as a second one. A listener thread per peer takes them in while the worker computes.
"""

from stageflow.transport.dist.endpoint import DistEndpoint

__all__ = ["DistEndpoint"]
