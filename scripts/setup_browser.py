"""Is there a headless Chromium, with which a test looks at the plan's page? Standard library only.

On Debian, as root, it is installed where it is missing (about 100 MB to fetch). Elsewhere this says
what to do and ends with 0: the test is then skipped, which with CI set fails the run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "browser.log"
PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
"""In the order of preference: the first starts in a fraction of the others' time."""
PACKAGE = "chromium-headless-shell"
INSTALL_TIMEOUT_S = 300


def find_browser() -> str | None:
    """The path of a Chromium; None: there is none."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), None)


def main() -> int:
    """Install a Chromium where one is missing and can be installed; always 0."""
    if find_browser() is not None:
        return 0
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        print(f"setup: no Chromium, so a test is skipped (Debian: apt-get install {PACKAGE})")
        return 0
    print(f"setup: {PACKAGE} (Debian package, missing on this machine)", flush=True)
    LOG.parent.mkdir(exist_ok=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with LOG.open("w") as log:
        for words in (["update"], ["install", "-y", "--no-install-recommends", PACKAGE]):
            try:
                subprocess.run(
                    [apt, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    timeout=INSTALL_TIMEOUT_S,
                    check=True,
                )
            except (subprocess.SubprocessError, OSError) as error:
                print(f"setup: {error}; a test is skipped without it; see {LOG}")
                return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
