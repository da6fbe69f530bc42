"""How tensors move between two workers.

    base.py        the interface: Endpoint, Tag, Interrupt
    structure.py   nested Python values as named tensors and a plain outline
    frame.py       a message as self-describing bytes
    inbox.py       arrived messages, by tag
    inproc.py      between threads of one process
    shm/           between processes of one host, through shared memory
    dist/          over torch.distributed: gloo, NCCL
    probe.py       measures a link

Every transport passes the scenarios of `stageflow.testing.transport`.
"""
