"""Report what this machine offers to a pipeline, and what is wrong.

Exit status 0 when nothing is wrong, 1 otherwise (notes don't count).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from stageflow.cli import machine
from stageflow.errors import StageflowError

LEAST_OPEN_FILES = 1024
LEAST_SHARED_MEMORY = 256 << 20
LEAST_MEMORY = 2 << 30


class Finding(NamedTuple):
    """Something worth knowing.

    wrong: False for a mere note.
    what: the fact. do: what to do about it.
    """

    wrong: bool
    what: str
    do: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--no-links", action="store_true", help="do not start two workers to measure their link")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Look at everything, print it, and say what is wrong."""
    report = examine(links=not args.no_links)
    findings = list(judge(report))
    if args.json:
        print(json.dumps(report | {"findings": [finding._asdict() for finding in findings]}))
    else:
        print(tell(report, findings))
    return 1 if any(finding.wrong for finding in findings) else 0


def examine(links: bool) -> dict[str, Any]:
    """All facts, as plain data. links: measure how fast two worker processes exchange messages."""
    torch = machine.torch_facts()
    return {
        "software": machine.software(),
        "torch": torch,
        "cores": machine.cores(),
        "memory": machine.memory(),
        "shared_memory": machine.shared_memory(),
        "limits": machine.limits(),
        "launchers": machine.launchers(torch.get("backends", [])),
        "extras": machine.extras(),
        "links": _links() if links and "error" not in torch else {},
    }


def _links() -> dict[str, Any]:
    from stageflow.cli.links import measure_links

    try:
        return {"measured": measure_links()}
    except StageflowError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def judge(report: dict[str, Any]) -> Iterator[Finding]:
    """What is wrong in a report of `examine`, and what is worth a note."""
    yield from _judge_software(report)
    yield from _judge_cores(report["cores"])
    yield from _judge_room(report)
    if "error" in report["links"]:
        yield Finding(
            True, f"worker processes don't work here: {report['links']['error']}", "use launch='threads' or torchrun"
        )


def _judge_software(report: dict[str, Any]) -> Iterator[Finding]:
    if "error" in report["torch"]:
        yield Finding(True, f"torch can't be imported: {report['torch']['error']}", "pip install 'torch>=2.13'")
    elif _release(report["software"]["torch"]) < (2, 13):
        yield Finding(True, f"torch is {report['software']['torch']}, older than 2.13", "pip install 'torch>=2.13'")
    if report["launchers"]["torchrun"] is None and "error" not in report["torch"]:
        yield Finding(False, "this torch has no gloo and no NCCL", "use launch='processes' rather than torchrun")


def _release(version: str | None) -> tuple[int, ...]:
    """``(2, 13)`` of ``2.13.0+cpu``; empty for None."""
    return tuple(int(part) for part in (version or "").split(".")[:2] if part.isdigit())


def _judge_cores(cores: dict[str, Any]) -> Iterator[Finding]:
    usable = min(cores["usable"], cores["quota"] or cores["usable"])
    if usable < 2:
        yield Finding(
            False,
            f"workers share {usable:g} core",
            "without accelerators a pipeline can't be faster than one process here; use it to test, or add cores",
        )
    if cores["quota"] is not None and cores["quota"] < cores["usable"]:
        yield Finding(
            False,
            f"the control group grants {cores['quota']:g} cores of {cores['usable']}",
            "keep workers x threads within the grant: what exceeds it is stopped in mid-step",
        )
    threads = cores["variables"].get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores["usable"]:
        yield Finding(
            True,
            f"OMP_NUM_THREADS is {threads}, but there are {cores['usable']} cores",
            "unset it, or set it to cores divided by workers",
        )


def _judge_room(report: dict[str, Any]) -> Iterator[Finding]:
    shared, files = report["shared_memory"], report["limits"]["open_files"]
    if shared["free"] < LEAST_SHARED_MEMORY:
        # Workers share unnamed memory where the system has it, and torch's own data loaders use /dev/shm.
        yield Finding(
            not shared["memfd"],
            f"/dev/shm has {_size(shared['free'])} free",
            "data loaders with workers need it: docker run --shm-size=1g, or remove what killed programs left there",
        )
    if report["memory"] and report["memory"]["available"] < LEAST_MEMORY:
        yield Finding(
            True,
            f"only {_size(report['memory']['available'])} of memory is available",
            "each worker process takes about 300 MiB before it holds any stage",
        )
    if files is not None and files < LEAST_OPEN_FILES:
        yield Finding(True, f"a process may open only {files} files", "ulimit -n 4096")


def tell(report: dict[str, Any], findings: list[Finding]) -> str:
    """The report as text."""
    sections = {
        "software": _software_lines(report),
        "devices": _device_lines(report),
        "room": _room_lines(report),
        "link between two worker processes, one way": _link_lines(report),
        "launchers": [(name, how or "not available") for name, how in report["launchers"].items()],
    }
    lines: list[str] = []
    for title, rows in sections.items():
        if rows:
            lines += [title, *(f"  {name:<15}{words}" for name, words in rows), ""]
    wrong = [finding for finding in findings if finding.wrong]
    notes = [finding for finding in findings if not finding.wrong]
    lines += [f"{len(wrong)} wrong" if wrong else "nothing is wrong"]
    lines += [f"  {finding.what}\n    -> {finding.do}" for finding in wrong]
    lines += ["notes"] * bool(notes) + [f"  {finding.what}\n    -> {finding.do}" for finding in notes]
    return "\n".join(lines)


def _software_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, version or "not installed") for name, version in report["software"].items()]
    ready = [f"{name}: {'ready' if usable else 'not installed'}" for name, usable in report["extras"].items()]
    return [*rows, ("extras", ", ".join(ready))]


def _device_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    cores, torch = report["cores"], report["torch"]
    granted = "" if cores["quota"] is None else f", {cores['quota']:g} granted"
    settings = ", ".join(f"{name}={value}" for name, value in cores["variables"].items()) or "none set"
    rows = [
        ("cores", f"{cores['usable']} usable of {cores['present']}{granted}"),
        ("threads", f"{torch.get('threads', '?')} in torch; variables: {settings}"),
    ]
    devices = torch.get("devices", [])
    if not devices:
        return [*rows, ("accelerators", "none")]
    return rows + [(f"cuda:{i}", f"{d['name']}, {_size(d['memory'])}") for i, d in enumerate(devices)]


def _room_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    memory, shared, limits = report["memory"], report["shared_memory"], report["limits"]
    files, hard = (limits[key] or "unlimited" for key in ("open_files", "open_files_hard"))
    rows = [
        ("open files", f"{files} (may be raised to {hard})"),
        ("processes", str(limits["processes"] or "unlimited")),
    ]
    kind = "without a name, as large as memory" if shared["memfd"] else "in /dev/shm"
    rows.insert(0, ("shared memory", f"{kind}; /dev/shm: {_size(shared['free'])} free of {_size(shared['total'])}"))
    if memory:
        rows.insert(0, ("memory", f"{_size(memory['available'])} available of {_size(memory['total'])}"))
    return rows


def _link_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for link in report["links"].get("measured", []):
        rate = f", {link['bytes_per_second'] / 1e9:.1f} GB/s" if link["bytes"] >= 1 << 16 else ""
        rows.append((_size(link["bytes"]), f"{link['seconds'] * 1e3:.3f} ms{rate}"))
    return rows


def _size(size: float) -> str:
    """Bytes in words: ``64 B``, ``256 KiB``, ``16 MiB``, ``1.5 GiB``."""
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    power, unit = next((pair for pair in ((2**20, "MiB"), (2**10, "KiB")) if size >= pair[0]), (1, "B"))
    return f"{size / power:.0f} {unit}"
