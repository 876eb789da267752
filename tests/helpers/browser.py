"""Headless Chromium for tests, driven through chromedriver by the WebDriver protocol (w3.org/TR/webdriver2)."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = " and ".join(name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if path is None)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--no-first-run", "--hide-scrollbars"),
    *(f"--disable-{what}" for what in ("gpu", "quic", "background-networking", "component-update", "sync")),
)


class Browser:
    """One window; `size` is that of the page in CSS pixels."""

    def __init__(self, address, profile):
        self._session = ""
        self._address = address
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = "/" + self._call("POST", "/session", capabilities={"alwaysMatch": wanted})["sessionId"]

    def _call(self, method, path, **body):
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]

    def post(self, path, **body):
        return self._call("POST", f"/session{self._session}{path}", **body)

    def open(self, url, width, height=900):
        """Open `url` in a page of this size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.post("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)
        self.post("/url", url=url)

    def run(self, script):
        """What the JavaScript function body `script` returns."""
        return self.post("/execute/sync", script=script, args=[])

    def until(self, script, seconds=15):
        """Wait until `script` returns something true, and return it; an AssertionError tells what it returned last."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"{script}: still {found!r} after {seconds} s"
            time.sleep(0.05)
        return found

    def point(self, x, y):
        """Move the mouse to a place in the window."""
        move = {"type": "pointerMove", "duration": 50, "origin": "viewport"}
        moves = [{**move, "x": round(x) - 3, "y": round(y) - 3}, {**move, "x": round(x), "y": round(y)}]
        self.post("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": moves}])

    def drag(self, start, end):
        """Press the mouse at a place in the window, and let go at another one."""
        path = [start, tuple((a + b) / 2 for a, b in zip(start, end, strict=True)), end]
        moves = [
            {"type": "pointerMove", "duration": 50, "origin": "viewport", "x": round(x), "y": round(y)} for x, y in path
        ]
        press, release = ({"type": f"pointer{what}", "button": 0} for what in ("Down", "Up"))
        actions = [moves[0], press, *moves[1:], release]
        self.post("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": actions}])

    def messages(self):
        """What the console has had to say since the last call."""
        return [entry["message"] for entry in self.post("/se/log", type="browser")]

    def picture(self, path):
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", f"/session{self._session}/screenshot")))

    def close(self):
        """End the browser."""
        self._call("DELETE", f"/session{self._session}")


@contextlib.contextmanager
def browser(profile):
    """A `Browser` with the empty folder `profile`, ended with its driver afterwards."""
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        port = next(line.split("port ")[1].strip(" .\n") for line in driver.stdout if "started successfully" in line)
        window = Browser(f"http://127.0.0.1:{port}", profile)
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait()
