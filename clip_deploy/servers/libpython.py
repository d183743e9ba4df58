"""libpython as a shared library: the Python backend's stub needs the one of this interpreter's version.

Most Pythons have it (uv, conda, the ``python`` images, pyenv with ``--enable-shared``); Debian and Ubuntu keep it in a
package of its own, which can be unpacked into the cache without being root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from clip_deploy.errors import MissingDependency
from clip_deploy.files import building
from clip_deploy.resources import cache_dir

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBRARY = f"libpython{VERSION}.so.1.0"
# The stub for 3.13 brings its own.
_BUNDLED = ("3.13",)


def available() -> bool:
    """Whether the stub will find its libpython."""
    return VERSION in _BUNDLED or bool(folders()) or _loadable()


def folders() -> tuple[Path, ...]:
    """Folders to add to the library path: this interpreter's own, else the cache; none where the system knows it."""
    own = sysconfig.get_config_var("LIBDIR")
    candidates = [Path(own)] if own else []
    candidates += [Path(sys.base_prefix) / "lib", cached()]
    return tuple(folder for folder in candidates if (folder / LIBRARY).is_file())[:1]


def cached() -> Path:
    """Where ``fetch`` puts it."""
    return cache_dir() / f"libpython-{VERSION}"


def fetch() -> None:
    """Download the distribution's package and unpack its library into the cache; needs no root.

    Raises:
        MissingDependency: there is no apt on this system, or it has no such package.
    """
    package = f"libpython{VERSION}"
    remedy = (
        f"install the package that holds {LIBRARY} (Debian, Ubuntu: {package}), "
        "or use a Python that has it: uv, conda, docker's python"
    )
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise MissingDependency(
            f"{LIBRARY} is missing, which Triton's Python backend needs", remedy=remedy
        )
    with tempfile.TemporaryDirectory(prefix="clip-deploy-") as folder:
        got = subprocess.run(
            ["apt-get", "download", package],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        packages = list(Path(folder).glob("*.deb"))
        if got.returncode != 0 or not packages:
            reason = (got.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise MissingDependency(
                f"{LIBRARY} is missing, and apt has no {package}: {reason}", remedy=remedy
            )
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), folder], check=True)
        with building(cached(), MissingDependency) as target:
            for library in Path(folder).rglob(f"{LIBRARY}*"):
                shutil.copy2(library, target / LIBRARY)
    if not available():
        raise MissingDependency(f"the package {package} holds no {LIBRARY}", remedy=remedy)


def _loadable() -> bool:
    """Whether the system's loader knows it."""
    ldconfig = shutil.which(
        "ldconfig", path=os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"])
    )
    if ldconfig is None:
        return False
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False)
    return LIBRARY in listed.stdout
