"""Real headless Chromium, driven by the DevTools protocol over two pipes: no driver and no port are needed.

A test whose browser is missing is skipped. Errors on the console, uncaught exceptions and requests are recorded.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools import tool

WAIT_S = 240.0  # other tests may run at the same time
# Chromium reads commands from descriptor 3 and writes answers to 4.
_START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # the tests may run as root, and open pages of their own only
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--mute-audio",
)


class Page:
    """One tab."""

    def __init__(self, browser: _Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its answer."""
        return self._browser.send(method, parameters, self._session)

    def open(self, url: str) -> None:
        """Load `url`; returns when the document has loaded."""
        answer = self.send("Page.navigate", url=url)
        assert not answer.get("errorText"), answer
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; waits for a promise."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition}\n{self.run('document.body.innerText')}\n{self.problems}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """A click with the mouse in the middle of an element."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        script = """(() => { const one = document.querySelector(SELECTOR); one.scrollIntoView({block: "center"});
            const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"""
        box = self.run(script.replace("SELECTOR", json.dumps(selector)))
        return box[0], box[1]

    def choose_file(self, selector: str, path: Path) -> None:
        """Select a file in a file input, as a person does."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and the color scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def downloads_to(self, folder: Path) -> None:
        """Save downloads in `folder`."""
        self._browser.send("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})

    def screenshot(self, path: Path) -> None:
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    @property
    def problems(self) -> list[str]:
        """Errors and warnings on the console, uncaught exceptions, and what the Content-Security-Policy blocked."""
        found = []
        for event in self._events():
            parameters = event["params"]
            match event["method"]:
                case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(parameters["args"]))
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(parameters["exceptionDetails"]))
                case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                    found.append(json.dumps(parameters["entry"]))
        return found

    @property
    def requests(self) -> list[str]:
        """The addresses of all requests."""
        sent = [event for event in self._events() if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in list(self._browser.events) if event.get("sessionId") == self._session]


class _Browser:
    """A process, its pipes, and what it said."""

    def __init__(self, read: int, write: int) -> None:
        self._commands = os.fdopen(write, "wb")
        self._answers = os.fdopen(read, "rb")
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def send(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        answer = self._waiting[self._number] = queue.Queue()
        command = {"id": self._number, "method": method, "params": parameters}
        self._commands.write(json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        self._commands.flush()
        message = answer.get(timeout=WAIT_S)
        assert "error" not in message, f"{method}: {message['error']}"
        return dict(message["result"])

    def hang_up(self) -> None:
        """Close the pipe of commands, upon which the browser ends."""
        self._commands.close()

    def close(self) -> None:
        self._thread.join()
        self._answers.close()

    def _listen(self) -> None:
        pending = b""
        while chunk := os.read(self._answers.fileno(), 1 << 16):
            *messages, pending = (pending + chunk).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self._waiting.pop(message["id"]).put(message)
                else:
                    self.events.append(message)


@contextmanager
def chromium(profile: Path, options: Sequence[str] = ()) -> Iterator[Page]:
    """A tab of a new browser with `profile`, an empty folder; the browser ends with the block."""
    program = tool("chromium")
    to_browser, from_browser = os.pipe(), os.pipe()
    inherited = (to_browser[0], from_browser[1])
    command = [sys.executable, "-c", _START, *map(str, inherited), program, *_OPTIONS, *options]
    with (profile.parent / f"{profile.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"], pass_fds=inherited, stdout=log, stderr=log
        )
    for end in inherited:
        os.close(end)
    browser = _Browser(from_browser[0], to_browser[1])
    try:
        target = browser.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = browser.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        yield Page(browser, session)
    finally:
        browser.hang_up()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        browser.close()
