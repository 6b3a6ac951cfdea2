"""Creates the Python environment of a launch on a host.

It is sent to that host and runs there alone, before maskfleet is installed: standard library only.

python3 environment.py ENVIRONMENT WHEEL
"""

from __future__ import annotations

import fcntl
import os
import site
import subprocess
import sys
import sysconfig

READY = ".maskfleet-ready"


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - so that an older Python prints this message
        print("maskfleet needs Python 3.11 or newer; %s is %s" % (sys.executable, sys.version.split()[0]))  # noqa: UP031
        return 3
    folder, wheel = (os.path.expanduser(path) for path in sys.argv[1:3])  # noqa: PTH111 - see the docstring
    os.makedirs(os.path.dirname(folder), exist_ok=True)  # noqa: PTH103, PTH120
    with open(folder + ".lock", "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = os.path.join(folder, READY)  # noqa: PTH118
        if os.path.exists(ready):  # noqa: PTH110
            return 0
        python = os.path.join(folder, "bin", "python")  # noqa: PTH118
        # Packages of the machine's Python, such as a torch built for its driver, stay in use.
        make = [sys.executable, "-m", "venv", "--clear", "--system-site-packages", folder]
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
        for command in (make, install):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0:
                sys.stdout.write(done.stdout.decode("utf-8", "replace")[-2000:])
                return 4
            if command is make:
                see_packages_of_this_python(folder)
        with open(ready, "w"):  # noqa: PTH123
            return 0


def see_packages_of_this_python(folder: str) -> None:
    """Add them to the environment in `folder` if this Python is in an environment itself.

    The Deep Learning AMI has torch in one, /opt/pytorch. An environment made there sees only the packages of the Python
    that both are made from, and pip would install another torch.
    """
    if sys.prefix == sys.base_prefix:
        return
    packages = sysconfig.get_path("purelib", "venv", {"base": folder})
    with open(os.path.join(packages, "packages-of-the-host.pth"), "w") as file:  # noqa: PTH118, PTH123
        file.writelines("import site; site.addsitedir(%r)\n" % one for one in site.getsitepackages())  # noqa: UP031


if __name__ == "__main__":
    raise SystemExit(main())
