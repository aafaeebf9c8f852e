"""A headless Chromium driven over its own pipe: real pointer, keys, downloads, colour schemes and widths."""

import json
import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser():
    """Where a browser is installed; None if none is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless browser. `faults` are its console's errors and exceptions."""

    def __init__(self, profile):
        theirs, ours = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank"]

        def place():
            os.dup2(theirs, 100), os.dup2(theirs_out, 101)
            os.dup2(100, 3), os.dup2(101, 4)

        self.process = subprocess.Popen(
            command, preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs), os.close(theirs_out)
        self.write, self.read = os.fdopen(ours, "wb", 0), os.fdopen(ours_in, "rb")
        self.rest, self.number, self.session, self.faults = b"", 0, None, []
        (target,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _receive(self):
        while b"\0" not in self.rest:
            chunk = os.read(self.read.fileno(), 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self.rest += chunk
        message, _, self.rest = self.rest.partition(b"\0")
        found = json.loads(message)
        kind, values = found.get("method"), found.get("params", {})
        if kind == "Runtime.exceptionThrown" or (kind == "Runtime.consoleAPICalled" and values["type"] == "error"):
            self.faults.append(json.dumps(values)[:500])
        if kind == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.faults.append(values["entry"]["text"])
        return found

    def call(self, method, **values):
        """Sends a command and returns its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": values}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        self.write.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self.number:
                if "error" in found:
                    raise RuntimeError(found["error"])
                return found["result"]

    def open(self, path, width=1280, height=900, scheme="light", media=""):
        """Loads a file at a width and in a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url=f"file://{path}")
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def run(self, script):
        """The value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", found))
        return found["result"].get("value")

    def place(self, selector):
        """Scrolls to an element; its middle on the screen."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center', inline: 'center'}})")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # scrolled
        left, top, wide, tall = self.run(f"(r => [r.left, r.top, r.width, r.height])({find}.getBoundingClientRect())")
        return left + wide / 2, top + tall / 2

    def point(self, selector):
        """Moves the pointer to an element."""
        x, y = self.place(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        """Clicks on an element."""
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key, code):
        """Presses a key; `code` is its Windows virtual key."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def close(self):
        self.call("Browser.close")
        self.process.wait(20)
        self.write.close(), self.read.close()
