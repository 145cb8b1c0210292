"""Drives headless Chromium through its DevTools protocol, over a pipe: no driver and no package is needed."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

OPTIONS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
           "--disable-component-update --disable-sync --hide-scrollbars").split()  # fmt: skip


def browser() -> str:
    """Chromium. Only a developer's machine may do without: a missing one is a failure where CI is set."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        assert not os.environ.get("CI"), "no chromium (Debian: apt-get install chromium)"
        pytest.skip("no chromium (Debian: apt-get install chromium)")
    return found


class Page:
    """A page of a browser of its own; a context manager. `errors`: what its console and its scripts complained of."""

    def __init__(self, url: str, profile: Path, size: tuple[int, int] = (1240, 1700)):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [browser(), *OPTIONS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        shell = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash"]  # dash takes one digit
        self._process = subprocess.Popen(
            [*shell, *command, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser), os.close(from_browser)
        self._buffer, self._number, self._session, self.errors = b"", 0, None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=url)

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_) -> None:
        os.close(self._out)
        self._process.kill()
        self._process.wait()
        os.close(self._in)

    def send(self, method: str, **params) -> dict:
        """The result of one call of the protocol."""
        self._number += 1
        call = {"id": self._number, "method": method, "params": params}
        os.write(self._out, json.dumps(call | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 20)
            assert more, "the browser ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(event["params"]["exceptionDetails"])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"])

    def value(self, script: str):
        """What an expression of JavaScript, or a promise of it, is in the page."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30):
        """Wait until an expression is true; its value."""
        until = time.monotonic() + seconds
        while not (found := self.value(script)):
            assert time.monotonic() < until, f"{script}: still {found!r}; {self.value('document.body.innerText')[:500]}"
            time.sleep(0.1)
        return found

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """A PNG of the window, or of the page's first `height` pixels."""
        if height:
            size = {"width": self.value("innerWidth"), "height": height, "deviceScaleFactor": 1, "mobile": False}
            self.send("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
