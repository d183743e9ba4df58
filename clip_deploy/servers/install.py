"""The embedded server's files: a pinned wheel, verified by hash, unpacked into the user's cache, never imported.

``nvidia-pytriton`` carries a real tritonserver with its libraries. Its Python dependencies (numpy < 2, gevent …) are
left alone: only the files are taken, the way browsers are fetched for browser tests.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import platform
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from clip_deploy.errors import MissingDependency
from clip_deploy.files import building, write_json
from clip_deploy.progress import Progress, silent
from clip_deploy.resources import cache_dir
from clip_deploy.servers import libpython

TRITON_VERSION = "2.51.0"
TRITON_RELEASE = "24.10"
WHEEL = "nvidia-pytriton"
WHEEL_VERSION = "0.7.0"
WHEEL_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

_MARKER = "installed.json"
_TRITON = Path("pytriton/tritonserver")
_KEPT = (
    f"{_TRITON}/",
    "nvidia_pytriton.libs/",
    f"nvidia_pytriton-{WHEEL_VERSION}.dist-info/licenses/",
)
_REMEDY = "run clip-deploy server install"


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the embedded server lies. ``library_folders`` go on LD_LIBRARY_PATH."""

    root: Path
    library_folders: tuple[Path, ...]

    @property
    def server(self) -> Path:
        return self.root / _TRITON / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        """The backend folder whose Python stub fits this interpreter; as deep as the wheel's own, for its run paths."""
        return self.root / _TRITON / f"backends-{libpython.VERSION}"


def root() -> Path:
    """The folder of this version of the server in the cache."""
    return cache_dir() / f"triton-{TRITON_VERSION}"


def installed() -> Installation:
    """The installed server.

    Raises:
        MissingDependency: it is not installed, or does not run on this machine or with this Python.
    """
    _require_platform()
    marker = root() / _MARKER
    try:
        complete = json.loads(marker.read_text("utf-8"))["wheel_sha256"] == WHEEL_SHA256
    except (OSError, ValueError, KeyError):
        complete = False
    if not complete:
        raise MissingDependency("the embedded Triton server is not installed", remedy=_REMEDY)
    return Installation(root(), (root() / "nvidia_pytriton.libs", *libpython.folders()))


def install(progress: Progress = silent) -> Installation:
    """Fetch the server once; later calls verify what is there and repair it.

    Raises:
        MissingDependency: a machine of another kind, no way to PyPI, or a download that is not what was pinned.
    """
    _require_platform()
    if not libpython.available():
        progress(f"fetching {libpython.LIBRARY} from this system's package archive")
        libpython.fetch()
    try:
        found = installed()
    except MissingDependency:
        pass
    else:
        progress("verifying the files")
        if not _damaged(found.root):
            return found
    with tempfile.TemporaryDirectory(prefix="clip-deploy-") as folder:
        progress(f"downloading Triton {TRITON_VERSION} (55 MB, from PyPI)")
        wheel = _download(Path(folder))
        progress("unpacking")
        with building(root(), MissingDependency) as target:
            _unpack(wheel, target)
            write_json(target / _MARKER, {"wheel_sha256": WHEEL_SHA256, "triton": TRITON_VERSION})
    return installed()


def _require_platform() -> None:
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        raise MissingDependency(
            f"the embedded Triton server runs on Linux x86_64, not on {machine}",
            remedy="use --launcher container, or --url of a server elsewhere",
        )
    if libpython.VERSION not in PYTHONS:
        raise MissingDependency(
            f"the embedded Triton server has no stub for Python {libpython.VERSION}",
            remedy=f"use Python {PYTHONS[0]} to {PYTHONS[-1]}",
        )


def _download(folder: Path) -> Path:
    """The wheel, by pip, which compares its hash with the pinned one."""
    pin = folder / "requirements.txt"
    pin.write_text(f"{WHEEL}=={WHEEL_VERSION} --hash=sha256:{WHEEL_SHA256}\n", "utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--require-hashes", f"--dest={folder}", f"--requirement={pin}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise MissingDependency(
            "this environment has no pip to fetch the server with",
            remedy="run python -m ensurepip, then again",
        )
    lines = [
        line for line in done.stderr.splitlines() if line.startswith("ERROR")
    ] or done.stderr.splitlines()[-1:]
    reason = (lines[0] if lines else f"pip ended with {done.returncode}").removeprefix("ERROR: ")
    raise MissingDependency(
        f"the server could not be downloaded: {reason[:200]}",
        remedy="check the network and the package index (pip config list); it needs glibc 2.35 or newer",
    )


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [
            name for name in archive.namelist() if name.startswith(_KEPT) and not name.endswith("/")
        ]
        archive.extractall(target, members)
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        (target / "RECORD").write_bytes(archive.read(record))
    triton = target / _TRITON
    for program in (
        triton / "bin" / "tritonserver",
        *triton.glob("python_backend_stubs/*/triton_python_backend_stub"),
    ):
        program.chmod(0o755)
    for version in PYTHONS:
        _link_backend(triton, version)
    if damaged := _damaged(target):
        raise MissingDependency(f"the download is damaged: {damaged[0]}", remedy="run it again")


def _link_backend(triton: Path, version: str) -> None:
    """A backend folder for one Python: the wheel's files beside the stub of that version.

    Hard links, since Triton resolves symbolic ones and then finds a library outside its backend's folder.
    """
    backend = triton / f"backends-{version}" / "python"
    backend.mkdir(parents=True)
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    for file in (*(triton / "backends" / "python").iterdir(), stub):
        (backend / file.name).hardlink_to(file)


def _damaged(folder: Path) -> list[str]:
    """Files that are not what the wheel's own record says."""
    rows = csv.reader(io.StringIO((folder / "RECORD").read_text("utf-8")))
    return [
        name
        for name, expected, _ in rows
        if name.startswith(_KEPT) and _record_digest(folder / name) != expected
    ]


def _record_digest(path: Path) -> str:
    """SHA-256 as a wheel's RECORD writes it; empty for a file that is missing."""
    if not path.is_file():
        return ""
    total = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(total).rstrip(b"=").decode()
