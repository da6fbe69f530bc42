"""A real browser without a window, spoken to over two pipes (the DevTools protocol); needs nothing but the program."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9, "Enter": 13, "Escape": 27}


class Browser:
    """One page in a browser. `errors` collects what the page complains about, in words."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._unread = b""
        self._serial = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, *, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Show a file in a window of this size, in CSS pixels, and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=page.as_uri())
        self.run("new Promise((done) => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self.settle()

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has drawn what it put off."""
        self.run(
            "new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 250))"
        )

    def press(self, *keys: str, settle: bool = True) -> None:
        """Press keys one after the other, as a person would: names such as ArrowLeft, or characters."""
        for key in keys:
            known = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0]))}
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **known, **text)
            self._call("Input.dispatchKeyEvent", type="keyUp", **known)
        if settle:
            self.settle()

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def screenshot(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """What the window shows, or the whole page, as PNG; written to ``path`` if given."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        data = base64.b64decode(shot)
        if path is not None:
            path.write_bytes(data)
        return data

    def close(self) -> None:
        """Ask the browser to end."""
        self._session = None
        self._call("Browser.close")

    def _call(self, method: str, **given: Any) -> dict[str, Any]:
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": given}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._serial:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"].get("exception", {}).get("description", told)))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.errors.append(str(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser ended"
            self._unread += more
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser that keeps its files in ``folder`` and is gone afterwards."""
    assert PROGRAM is not None
    (commands_in, commands), (answers, answers_out) = _pipe(), _pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"]
    # The browser speaks on descriptors 3 and 4.
    script = f'exec "$0" "$@" 3<&{commands_in} 4>&{answers_out}'
    browser = subprocess.Popen(
        ["bash", "-c", script, PROGRAM, *flags, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"],
        pass_fds=(commands_in, answers_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands_in)
    os.close(answers_out)
    try:
        page = Browser(commands, answers)
        yield page
        page.close()
        browser.wait(timeout=30)
    finally:
        if browser.poll() is None:
            browser.kill()
            browser.wait()
        os.close(commands)
        os.close(answers)


def _pipe() -> list[int]:
    """Both ends of a new pipe, at descriptors out of the way of those on which the browser speaks."""
    ends: list[int] = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends
