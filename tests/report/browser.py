"""A headless Chromium, driven through its DevTools protocol over two pipes. Nothing else is needed.

Messages are JSON, each ended by a zero byte: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["Browser", "find"]

PATIENCE_SECONDS = 60.0
KEYS = {
    "Enter": ("\r", 13),
    "Tab": ("", 9),
    "Escape": ("", 27),
    " ": (" ", 32),
    "End": ("", 35),
    "Home": ("", 36),
}
KEYS |= {"ArrowLeft": ("", 37), "ArrowUp": ("", 38), "ArrowRight": ("", 39), "ArrowDown": ("", 40)}


def find():
    """The path of a Chromium, or ``None``."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One process with one page at a time; ``problems`` and ``requests`` are those of the page."""

    def __init__(self, executable):
        self._home = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run"]
        options += [
            "--disable-background-networking",
            "--disable-crash-reporter",
            "--disable-breakpad",
        ]
        options += ["--hide-scrollbars", f"--user-data-dir={self._home.name}/profile"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        pipes = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, "browser", executable, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": self._home.name},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self._session, self._target = 0, b"", None, None
        self.problems, self.requests = [], []

    def close(self):
        try:
            self._call("Browser.close", session=False)
        except EOFError:
            pass
        os.close(self._out)
        os.close(self._in)
        self._process.wait(PATIENCE_SECONDS)
        self._home.cleanup()

    def open(self, path, width=1200, height=900, dark=False):
        """Show the file at ``path`` in a new page."""
        if self._target is not None:
            self._call("Target.closeTarget", session=False, targetId=self._target)
        made = self._call("Target.createTarget", session=False, url="about:blank")
        self._target = made["targetId"]
        attached = self._call(
            "Target.attachToTarget", session=False, targetId=self._target, flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.size(width, height)
        self.dark(dark)
        self.problems, self.requests, self._loaded = [], [], False
        self._call("Page.navigate", url=Path(path).resolve().as_uri())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._loaded:
            self._handle(self._message(deadline))
        self.run("new Promise(then => requestAnimationFrame(() => requestAnimationFrame(then)))")

    def size(self, width, height):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def dark(self, dark=True):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, code):
        """The value of ``code``, JavaScript in the page; of what it promises, where it is a promise."""
        found = self._call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key, times=1):
        """Press a key: one of ``KEYS``, or a character."""
        text, code = KEYS.get(key, (key, ord(key.upper()) if len(key) == 1 else 0))
        for _ in range(times):
            both = {"key": key, "windowsVirtualKeyCode": code}
            self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **both)
            self._call("Input.dispatchKeyEvent", type="keyUp", **both)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path, height=None):
        """A PNG of the page, or of its first ``height`` pixels."""
        width, whole = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height or whole, "scale": 1}
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def _call(self, method, session=True, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._handle(answer)

    def _message(self, deadline):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser says nothing")
            read = os.read(self._in, 1 << 16)
            if not read:
                raise EOFError("the browser has ended")
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _handle(self, event):
        method, details = event.get("method"), event.get("params", {})
        if event.get("sessionId") != self._session:
            return
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(details["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(details["args"])
        elif method == "Log.entryAdded":
            self.problems.append(details["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
