"""Look at, check and convert what a pipeline saved.

    stageflow checkpoint inspect runs/gpt                 what is in it
    stageflow checkpoint verify runs/gpt                  whether every file is what was saved
    stageflow checkpoint convert runs/gpt weights.pt      the weights alone, for the plain model

A folder of several checkpoints stands for all of them, and in `convert` for its newest good one. Weights that something
else saved as safetensors can be inspected and converted too. Every way takes --json.

Exit status 0 when all is well, 1 when something is damaged or can't be read.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from stageflow.checkpoint import Checkpoint

DTYPES = ("float32", "float16", "bfloat16")
_TORCH = (".pt", ".pth", ".bin")
_ONE_FILE = ".safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    ways = parser.add_subparsers(dest="way", metavar="WAY", title="ways", required=True)
    for way, line in (("inspect", "show what is in it"), ("verify", "compare every file with its checksum")):
        sub = ways.add_parser(way, help=line, description=line)
        sub.add_argument("path", type=Path, help="a checkpoint, or a folder of several")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    line = "write the weights alone, under the model's own names"
    sub = ways.add_parser("convert", help=line, description=line)
    sub.add_argument("path", type=Path, help="a checkpoint, or a folder of several")
    sub.add_argument("target", type=Path, help="NAME.safetensors, NAME.pt (for torch.load), or a new folder")
    sub.add_argument("--dtype", choices=DTYPES, help="of floating-point weights; default as they are")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; returns the exit status."""
    return {"inspect": _inspect, "verify": _verify, "convert": _convert}[args.way](args)


def _members(path: Path) -> list[Path]:
    """The checkpoints that a path stands for, oldest first."""
    from stageflow.checkpoint import Series
    from stageflow.checkpoint.series import is_series

    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}")
    return [member.path for member in reversed(Series(path).members())] if is_series(path) else [path]


# ------------------------------------------------------------------------------------------------------------ inspect


def _inspect(args: argparse.Namespace) -> int:
    found = [_describe(path) for path in _members(args.path)]
    if args.json:
        print(json.dumps({"path": str(args.path), "checkpoints": found}))
    else:
        print("\n\n".join(_tell(one) for one in found))
    return 1 if any("problem" in one for one in found) else 0


def _describe(path: Path) -> dict[str, Any]:
    from stageflow.checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(path, verify=False)
        shapes = checkpoint.shapes()
    except CheckpointError as error:
        return {"path": str(path), "problem": str(error)}
    facts: dict[str, Any] = {"path": str(path)}
    manifest = checkpoint.manifest
    if manifest is not None:
        facts |= {
            "step": manifest.step,
            "seed": manifest.seed,
            "saved_by": dict(manifest.versions),
            "optimizer": checkpoint.has_optimizer,
            "extra": dict(manifest.extra),
            "files": {name: file.bytes for name, file in sorted(manifest.files.items())},
        }
    return facts | {
        "parameters": sum(shape.numel() for shape, _ in shapes.values()),
        "weights": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in sorted(shapes.items())},
        "tied": dict(checkpoint.aliases),
    }


def _tell(facts: Mapping[str, Any]) -> str:
    lines = [facts["path"]]
    if "problem" in facts:
        return f"{facts['path']}\n  damaged: {facts['problem']}"
    if "step" in facts:
        saved_by = ", ".join(f"{name} {version}" for name, version in facts["saved_by"].items())
        lines.append(f"  step {facts['step']}, seed {facts['seed']}, saved by {saved_by}")
        lines.append(f"  optimizer state: {'yes' if facts['optimizer'] else 'no'}")
        if facts["extra"]:
            lines.append(f"  extra: {json.dumps(facts['extra'])}")
        lines += [f"  {size:>14,} B  {name}" for name, size in facts["files"].items()]
    else:
        lines.append("  weights only: no pipeline saved it")
    lines.append(f"  {len(facts['weights'])} weights, {facts['parameters']:,} numbers")
    lines += [
        f"    {name}  {'x'.join(map(str, weight['shape'])) or 'scalar'}  {weight['dtype']}"
        for name, weight in facts["weights"].items()
    ]
    lines += [f"    {alias}  is {name}" for alias, name in facts["tied"].items()]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- verify


def _verify(args: argparse.Namespace) -> int:
    from stageflow.checkpoint import open_checkpoint

    problems: dict[str, str | None] = {}
    for path in _members(args.path):
        try:
            whole = open_checkpoint(path).manifest is not None
            problems[str(path)] = None if whole else "there are no checksums to compare with: no pipeline saved it"
        except CheckpointError as error:
            problems[str(path)] = str(error)
    if args.json:
        print(json.dumps({path: {"good": problem is None, "problem": problem} for path, problem in problems.items()}))
    else:
        for path, problem in problems.items():
            print(f"{path}: good" if problem is None else f"damaged: {problem}")
    return 1 if any(problems.values()) else 0


# ------------------------------------------------------------------------------------------------------------ convert


def _convert(args: argparse.Namespace) -> int:
    import torch

    from stageflow.checkpoint import open_checkpoint

    if args.target.exists():
        raise InputError(f"{args.target} exists; name a new file or folder")
    checkpoint = open_checkpoint(args.path)
    weights = checkpoint.weights()
    if args.dtype:
        dtype = getattr(torch, args.dtype)
        weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    try:
        _write(checkpoint, weights, args.target)
    except OSError as error:
        raise CheckpointError(f"{args.target} could not be written: {error}") from error
    count = sum(weight.numel() for weight in weights.values())
    if args.json:
        print(json.dumps({"source": str(checkpoint.path), "target": str(args.target), "weights": len(weights)}))
    else:
        print(f"{args.target}: {len(weights)} weights, {count:,} numbers, from {checkpoint.path}")
    return 0


def _write(checkpoint: Checkpoint, weights: Mapping[str, Tensor], target: Path) -> None:
    """Under another name first, so that nothing half is ever at the target."""
    import torch

    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if target.suffix in _TORCH:
            torch.save({name: weight.clone() for name, weight in weights.items()}, unfinished)
        elif target.suffix == _ONE_FILE:
            _write_safetensors(unfinished, checkpoint, weights)
        else:
            unfinished.mkdir()
            _write_safetensors(unfinished / "model.safetensors", checkpoint, weights)
            for name in ("config.json", "generation_config.json"):
                if checkpoint.path.is_dir() and (checkpoint.path / name).exists():
                    (unfinished / name).write_bytes((checkpoint.path / name).read_bytes())
        os.rename(unfinished, target)
    except BaseException:
        _remove(unfinished)
        raise


def _write_safetensors(path: Path, checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> None:
    """Tied weights once, as transformers writes them."""
    from stageflow.checkpoint.stream import write_tensors

    write_tensors(path, {name: weights[name].contiguous() for name in checkpoint.names})


def _remove(path: Path) -> None:
    import shutil

    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
