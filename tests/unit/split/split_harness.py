"""Runs a split by hand in one thread, as workers would, and compares it with the model it was made from."""

import copy

import cloudpickle
import torch
from torch import nn

from stageflow.graph import Bundle
from stageflow.split.deferred import as_model
from stageflow.transport.structure import flatten


def no_seed(layer):
    """For models without random draws."""


def keyed_seed(microbatch):
    return lambda layer: torch.manual_seed(1000 * microbatch + layer)


def build_programs(split, device="cpu"):
    """What the workers get: each spec travels on its own."""
    return [cloudpickle.loads(cloudpickle.dumps(spec)).build(torch.device(device)) for spec in split.specs]


def receive(bundle):
    """A bundle as it comes out of a transport: own memory, float tensors are leaves that require grad."""
    tensors = {}
    for name, tensor in bundle.tensors.items():
        arrived = tensor.detach().clone()
        tensors[name] = arrived.requires_grad_(arrived.is_floating_point() or arrived.is_complex())
    return Bundle(tensors, copy.deepcopy(bundle.meta))


def forward(split, programs, args, kwargs, seed=no_seed):
    """All stages on one micro-batch: (output, sent, received) with bundles by (producer, consumer)."""
    sent, received, output = {}, {}, None
    for stage, program in enumerate(programs):
        incoming = {p: received[p, stage] for p in split.graph.predecessors(stage)}
        result = program.forward(args, kwargs, incoming, seed)
        assert set(result.bundles) == set(split.graph.successors(stage))
        for consumer, bundle in result.bundles.items():
            sent[stage, consumer] = bundle
            received[stage, consumer] = receive(bundle)
        output = result.output
    return output, sent, received


def backward(split, sent, received, loss):
    """Whole backward by hand: each stage gets the gradients of what it sent."""
    loss.backward()
    for stage in reversed(range(split.n_stages - 1)):
        roots, gradients = [], []
        for consumer in split.graph.successors(stage):
            for name, leaf in received[stage, consumer].tensors.items():
                root = sent[stage, consumer].tensors[name]
                if root.requires_grad and leaf.grad is not None:
                    roots.append(root)
                    gradients.append(leaf.grad)
        if roots:
            torch.autograd.backward(roots, gradients)


def gradients_of(split, programs):
    """By name, over all stages, mirrors summed."""
    total = {}
    for stage, program in enumerate(programs):
        for name, parameter in program.parameters.items():
            assert stage == split.owners[name] or stage in split.mirrors.get(name, ())
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
    return total


def sgd(split, programs, lr):
    """A step of the owners on summed gradients, sent to the mirrors."""
    total = gradients_of(split, programs)
    with torch.no_grad():
        for program in programs:
            for name, parameter in program.parameters.items():
                if name in total:
                    parameter -= lr * total[name]
                parameter.grad = None


def default_loss(output):
    tensors = [t for t in flatten(output)[0].values() if t.is_floating_point()]
    return sum(t.double().square().mean() for t in tensors)


def check_equals_whole(split, model, microbatches, loss=default_loss, steps=3, seeded=False, rtol=1e-5):
    """Train the stages and the whole model side by side, comparing loss, gradients, buffers and parameters."""
    whole = copy.deepcopy(as_model(model))
    whole.train()
    programs = build_programs(split)
    for program in programs:
        program.module.train()
    names = check_ownership(split, whole, programs)
    for _ in range(steps):
        for index, (args, kwargs) in enumerate(microbatches):
            seed = keyed_seed(index) if seeded else no_seed
            output, sent, received = forward(split, programs, args, kwargs, seed)
            ours = loss(output)
            backward(split, sent, received, ours)
            if seeded:  # random draws are equal for any number of stages, not equal to the plain model's
                continue
            theirs = loss(whole(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
            theirs.backward()
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-7)
        if seeded:
            continue
        total = gradients_of(split, programs)
        for name, parameter in names.items():
            if parameter.grad is None:
                assert name not in total or not total[name].any(), name
            else:
                torch.testing.assert_close(
                    total[name], parameter.grad, rtol=rtol, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
                )
        sgd(split, programs, 0.05)
        with torch.no_grad():
            for parameter in names.values():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                parameter.grad = None
        compare_state(split, whole, programs, rtol)
    return programs


def check_ownership(split, whole, programs):
    names = dict(whole.named_parameters())
    buffers = dict(whole.named_buffers())
    assert set(split.owners) == set(names) | set(buffers)
    for name in names:
        assert name in programs[split.owners[name]].parameters
        for stage in split.mirrors.get(name, ()):
            assert name in programs[stage].parameters
    for name in buffers:
        assert name in programs[split.owners[name]].buffers
    return names


def compare_state(split, whole, programs, rtol):
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        owner = programs[split.owners[name]]
        mine = owner.parameters.get(name, owner.buffers.get(name))
        torch.testing.assert_close(mine, tensor, rtol=rtol, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def outputs_with_seeds(split, microbatches):
    """Losses and gradients of a run with keyed random draws."""
    programs = build_programs(split)
    losses = []
    for index, (args, kwargs) in enumerate(microbatches):
        output, sent, received = forward(split, programs, args, kwargs, keyed_seed(index))
        loss = default_loss(output)
        backward(split, sent, received, loss)
        losses.append(loss.detach())
    return torch.stack(losses), gradients_of(split, programs)


class Scale(nn.Module):
    """A small layer with a parameter of its own."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * self.weight
