"""The unit tests once more, on the wheel as a user would have it: unpacked in a folder of its own, the checkout out of reach.

Those marked slow have run on the checkout, and what they test is not how the library is packed. Of a test with many settings one is
enough here (tests/conftest.py).
"""
import os
import subprocess
import sys
import tempfile

import package

ROOT = package.ROOT
LEFT_OUT = "browser", "test_book.py"

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--no-compile",
                    "--target", folder, package.wheel()], check=True)
    # -P keeps the current folder, which holds the checkout's package, off Python's path.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not checkout and not slow", "-p", "no:cacheprovider", ROOT / "tests",
               *[f"--ignore={ROOT / 'tests' / name}" for name in LEFT_OUT], *sys.argv[1:]]
    environment = dict(os.environ, PYTHONPATH=folder, TEST_INSTALLED=os.path.realpath(folder), PYTHONDONTWRITEBYTECODE="1")
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)
