"""Show what every worker of a running pipeline does: action, micro-batch, what it waits for, Python stacks.

PID is the process that made the pipeline, or any of its workers. The run is not disturbed: workers write their stacks
between two instructions and go on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("pid", type=int, help="the process")
    parser.add_argument("--no-stacks", action="store_true", help="only what the workers say themselves")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Look and print."""
    from stageflow.launch.trace import tell, trace_process

    groups = trace_process(args.pid, stacks=not args.no_stacks)
    if args.json:
        found = [
            [asdict(one.status) | {"stacks": one.stacks, "remark": one.remark} for one in group] for group in groups
        ]
        print(json.dumps({"pid": args.pid, "groups": found}))
    else:
        print(tell(groups))
    return 0
