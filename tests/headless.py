"""A real headless browser for tests: Chromium as Qt WebEngine packs it, in a process of its own.

`Browser` is the test's side; run as a program, this file is the browser's side. They talk in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Point = tuple[float, float]
SYSTEM = "libnss3 libegl1 libgl1 libasound2 libxkbcommon0 libxcomposite1 libxdamage1 libxrandr2 libxtst6 libxkbfile1"
"""The system's libraries that the wheel links to, by their Debian names."""


class Browser:
    """One window. Every request that is not for a `file:` page opened here is refused and kept in `refused`."""

    def __init__(self, *, dark: bool = False) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the browser)
        flags = "--no-sandbox --disable-gpu --disable-background-networking --force-color-profile=srgb"
        flags += f" --blink-settings=preferredColorScheme={0 if dark else 1}"
        environment = os.environ | {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": flags}
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )

    def open(self, page: Path, *, size: tuple[int, int] = (1180, 900)) -> None:
        """Load a file and wait for it; raises when the page throws while it loads."""
        self._ask("open", str(page.resolve()), *size)
        self.raise_errors()

    def js(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; what it throws is raised here."""
        told = self._ask(
            "js", f"(() => {{ try {{ return JSON.stringify([{expression}]) }} catch (e) {{ return '!' + e }} }})()"
        )
        if not isinstance(told, str) or told.startswith("!"):
            raise RuntimeError(f"the page threw: {told}")
        return json.loads(told)[0]

    def drag(self, start: Point, stop: Point, steps: int = 6) -> None:
        """Press the mouse at a point of the view, move it and let go."""
        self._ask("drag", *start, *stop, steps)

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        self._ask("picture", str(path))

    def raise_errors(self) -> None:
        """Raise when the page has thrown, logged an error or asked for anything from outside."""
        told = self._ask("errors")
        if told:
            raise RuntimeError("; ".join(told))

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError):
            self._child.communicate(timeout=20)
        self._errors.close()

    def _ask(self, order: str, *arguments: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(OSError):
            self._child.stdin.write(json.dumps([order, arguments]) + "\n")
            self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            raise RuntimeError(f"the browser is gone; it needs {SYSTEM}. It said:\n{said}")
        return json.loads(line)


def _serve() -> None:
    """The browser's side: carry out one line after another until the input ends."""
    # imported here, as the test's side must not load Qt
    from PySide6.QtCore import QEventLoop, QPoint, Qt, QUrl
    from PySide6.QtTest import QTest
    from PySide6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineProfile,
        QWebEngineSettings,
        QWebEngineUrlRequestInterceptor,
    )
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    class Page(QWebEnginePage):
        errors: list[str]

        def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
            if level == QWebEnginePage.JavaScriptConsoleMessageLevel.ErrorMessageLevel:
                self.errors.append(f"line {line}: {message}")

    class Fence(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info: Any) -> None:
            if info.requestUrl().scheme() not in ("file", "data", "blob"):
                page.errors.append(f"asked for {info.requestUrl().toString()}")
                info.block(True)

    class Orders:
        def open(self, path: str, width: int, height: int) -> None:
            page.errors.clear()
            view.resize(width, height)
            view.show()
            waiting, loaded = QEventLoop(), []
            view.loadFinished.connect(loaded.append)
            view.loadFinished.connect(waiting.quit)
            view.load(QUrl.fromLocalFile(path))
            waiting.exec()
            view.loadFinished.disconnect()
            if loaded != [True]:
                page.errors.append(f"{path} did not load")
            QTest.qWait(150)  # until the first frame is on the screen

        def js(self, script: str) -> Any:
            waiting, told = QEventLoop(), []
            page.runJavaScript(script, lambda value: (told.append(value), waiting.quit()))
            if not told:
                waiting.exec()
            return told[0]

        def drag(self, x0: float, y0: float, x1: float, y1: float, steps: int) -> None:
            target, left, bare = view.focusProxy(), Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
            points = [
                QPoint(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)
            ]
            QTest.mouseMove(target, points[0])
            QTest.mousePress(target, left, bare, points[0])
            for point in points[1:]:
                QTest.mouseMove(target, point, 20)
            QTest.mouseRelease(target, left, bare, points[-1], 20)
            QTest.qWait(60)

        def picture(self, path: str) -> None:
            QTest.qWait(200)
            view.grab().save(path, "PNG")

        def errors(self) -> list[str]:
            return page.errors

    app = QApplication(["headless"])
    view = QWebEngineView()
    profile = QWebEngineProfile()  # off the record: nothing is kept on disk
    page = Page(profile, view)
    page.errors = []
    fence = Fence()
    profile.setUrlRequestInterceptor(fence)
    # so that a request to outside reaches the fence, and is told
    page.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
    view.setPage(page)
    orders = Orders()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(orders, name)(*arguments)), flush=True)
    page.deleteLater()
    app.processEvents()


if __name__ == "__main__":
    _serve()
