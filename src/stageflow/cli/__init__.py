"""The command line: ``stageflow VERB``; one file a verb.

A verb's file has `add_arguments(parser)` and `run(args)`, and imports torch only where it runs, so that ``--help`` and
the verbs without tensors answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from stageflow.errors import InputError, StageFailed, StageflowError

if TYPE_CHECKING:
    from types import ModuleType

VERBS = {
    "train": "train a model in stages and compare with one process",
    "plan": "choose cuts, placement and schedule for a model, with a proof of how good they are",
    "simulate": "show what a schedule would take: times, bubble, activations, a picture",
    "explore": "write a page on which schedules can be tried out in a browser",
    "checkpoint": "look at, check and convert what a pipeline saved",
    "trace": "show what every worker of a running pipeline does",
    "doctor": "report what this machine offers to a pipeline, and what is wrong",
}
"""Every verb, with one line for the list in ``stageflow --help``."""


class Verb(Protocol):
    """What the file of a verb offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's flags."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done. 1: it failed, or (doctor) something is wrong. 2: the arguments don't make sense. 130: Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(words)
    args = parser.parse_args(words)
    if args.verb is None:
        parser.print_help()
        return 0
    try:
        return load(args.verb).run(args)
    except StageFailed:
        # Code of the user's failed in a worker; where exactly is in the traceback that came with it.
        traceback.print_exc()
        return 1
    except StageflowError as error:
        print(f"stageflow {args.verb}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print(f"stageflow {args.verb}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"stageflow {args.verb}: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these words; only the verb among them has its flags, as only its file is imported."""
    parser = argparse.ArgumentParser(prog="stageflow", description="Pipeline parallelism for any PyTorch model.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for verb, line in VERBS.items():
        described = load(verb) if verb in words else None
        text = cast("ModuleType", described).__doc__ if described else line
        sub = verbs.add_parser(verb, help=line, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if described:
            described.add_arguments(sub)
    return parser


def load(verb: str) -> Verb:
    """The file of a verb."""
    return cast("Verb", importlib.import_module(f"stageflow.cli.{verb}"))


class _Version(argparse.Action):
    """Looks the version up only when asked: reading package metadata takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"stageflow {version('stageflow')}")
        parser.exit()
