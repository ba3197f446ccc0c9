"""The C++ library's build: headers fetched by apt-get and pip into build/cpp/deps, CMake, one build folder per variant.

Nothing is installed. Headers that the machine has are used as they are; others are downloaded as packages and unpacked
apart. ONNX Runtime's headers come from Debian trixie (no earlier release has them), its library from the wheel that
Python runs, so that both languages run the same code. What cannot be had is an `Unavailable` that says so.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "engines" / "cpp"
BUILD = REPOSITORY / "build" / "cpp"
ORT_SUITE = "trixie"
OWN_PACKAGES = ("nlohmann-json3-dev", "libcpp-httplib-dev", "libbrotli-dev", "zlib1g-dev")
WHEELS = ("kernel-lens>=2,<3", "nvidia-cuda-runtime==13.*", "nvidia-cuda-crt==13.*")
SANITIZE = ("-DMLA_SANITIZE=address,undefined", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -g1")
THREADS = ("-DMLA_SANITIZE=thread", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1")
PLAIN = ("-DMLA_SANITIZE=", "-DCMAKE_BUILD_TYPE=Debug")
RELEASE = ("-DCMAKE_BUILD_TYPE=Release",)


class Unavailable(Exception):  # noqa: N818  (it is a reason to skip)
    """What a build needs and this machine does not have or reach."""


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time fetches or builds `name`."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f".{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(words: Sequence[str | Path], **options: str | Path | dict[str, str]) -> str:
    """Output of a command; Unavailable with its last lines where it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False,
                          **options)  # type: ignore[call-overload]
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise Unavailable(f"{' '.join(map(str, words[:3]))}: {' | '.join(lines[-3:])}")
    return str(done.stdout)


def require_tools() -> None:
    """Unavailable, naming the packages to install, unless there is a compiler, CMake and OpenSSL's headers."""
    missing = [package for tool, package in (("g++", "g++"), ("cmake", "cmake"), ("make", "make"))
               if shutil.which(tool) is None]
    if not Path("/usr/include/openssl/evp.h").is_file():
        missing.append("libssl-dev")
    if missing:
        raise Unavailable(f"no {', '.join(missing)} here; install with: apt-get install {' '.join(missing)}")


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of build/cpp/deps, made whole or not at all, and kept."""
    target = BUILD / "deps" / name
    with locked("deps"):
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.partial-") as partial:
                made = Path(partial) / "made"
                made.mkdir()
                make(made)
                made.rename(target)
    return target


# --- Debian's packages ------------------------------------------------------------------------------------------------


def _apt(state: Path, sources: Path | None) -> list[str]:
    """apt-get over lists of its own in `state`; `sources` in place of the machine's."""
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    options = {"Dir::State": state, "Dir::State::lists": state / "lists", "Dir::State::status": "/var/lib/dpkg/status",
               "Dir::Cache": state, "Dir::Cache::archives": state / "archives", "APT::Sandbox::User": "root"}
    if sources is not None:
        options |= {"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "-"}
    return ["apt-get", "-q", *(f"-o={name}={value}" for name, value in options.items())]


def _mirror(apt: Sequence[str]) -> str:
    """Where the machine's own main packages come from."""
    found = _run([*apt, "indextargets", "--no-release-info", "--format", "$(REPO_URI) $(COMPONENT)",
                  "Created-By: Packages"])
    for line in found.splitlines():
        uri, _, component = line.rpartition(" ")
        if component == "main" and uri.rstrip("/").endswith("debian"):
            return uri
    raise Unavailable("no Debian mirror among the machine's package sources; ONNX Runtime's headers come from there")


def _download(folder: Path, apt: Sequence[str], packages: Sequence[str]) -> list[Path]:
    _run([*apt, "update"])
    _run([*apt, "download", *packages], cwd=folder)
    return sorted(folder.glob("*.deb"))


def _debian(target: Path) -> None:
    """The machine's own release's headers and libraries, and ONNX Runtime's headers of trixie, unpacked in `target`."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable("no apt-get here to fetch libonnxruntime-dev with")
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        state = Path(temporary)
        (state / "own").mkdir()
        own = _apt(state / "own-state", None)
        files = _download(state / "own", own, OWN_PACKAGES)
        for file in list(files):  # the library beside its headers, in its own version
            if file.name.startswith("libcpp-httplib-dev"):
                depends = _run(["dpkg", "-f", file, "Depends"]).replace(",", " ").split()
                library = next(word for word in depends if word.startswith("libcpp-httplib"))
                files = _download(state / "own", own, [library])
        sources = state / "sources.list"
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        signed = f"[signed-by={keys}] " if Path(keys).is_file() else ""
        sources.write_text(f"deb {signed}{_mirror(own)} {ORT_SUITE} main\n")
        (state / "ort").mkdir()
        files += _download(state / "ort", _apt(state / "ort-state", sources), ["libonnxruntime-dev"])
        for file in files:
            _run(["dpkg", "-x", file, target])


def debian() -> Path:
    """The folder that Debian's packages are unpacked in (`usr/include`, `usr/lib/…`)."""
    return _once("debian", _debian)


# --- Wheels -----------------------------------------------------------------------------------------------------------


def _wheels(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest",
              temporary, *WHEELS])
        for wheel in sorted(Path(temporary).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)


def _library(module: str, pattern: str) -> Path:
    """A shared library of an installed wheel."""
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob(pattern)):
            return file
    raise Unavailable(f"no {pattern} here; install the package of {module}")


def _linked(name: str, library: Path, names: Sequence[str]) -> Path:
    """A folder whose lib/ has the library under the names that a linker and a loader look for."""
    folder = BUILD / "deps" / name
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    for link in (folder / "lib" / name for name in names):
        if not link.is_symlink() or link.resolve() != library.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(library)
    return folder


# --- Builds -----------------------------------------------------------------------------------------------------------


def ort_options() -> list[str]:
    """CMake options of a build over ONNX Runtime."""
    require_tools()
    library = _library("onnxruntime", "libonnxruntime.so.*")
    root = debian() / "usr"
    with locked("links"):
        ort = _linked("ort", library, ("libonnxruntime.so", "libonnxruntime.so.1"))
    return [f"-DCMAKE_PREFIX_PATH={root}", f"-DORT_ROOT={ort}", f"-DORT_INCLUDE={root / 'include' / 'onnxruntime'}"]


def rtx_options() -> list[str]:
    """CMake options of a build over TensorRT-RTX: headers of wheels, the library of Python's own package."""
    require_tools()
    library = _library("tensorrt_rtx_libs", "libtensorrt_rtx.so.*")
    root, wheels = debian() / "usr", _once("wheels", _wheels)
    with locked("links"):
        rtx = _linked("rtx", library, ("libtensorrt_rtx.so", "libtensorrt_rtx.so.1"))
    return ["-DMLA_BACKEND=trt-rtx", f"-DCMAKE_PREFIX_PATH={root}", f"-DTENSORRT_ROOT={rtx}",
            f"-DTENSORRT_INCLUDE={wheels / 'kernel_lens' / 'include' / 'tensorrt'}",
            f"-DCUDA_ROOT={wheels / 'nvidia' / 'cu13'}"]


@lru_cache
def build(name: str, options: tuple[str, ...], target: str, source: Path = SOURCE) -> Path:
    """Configure build/cpp/NAME and build one target in it, one compiler at a time; the program. A build that fails is
    an AssertionError with what the compiler said."""
    folder = BUILD / name
    with locked(name):
        for words in (["cmake", "-S", source, "-B", folder, *options],
                      ["cmake", "--build", folder, "--target", target]):
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False,
                                  env=os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": "1"})
            assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}"
    return folder / target


def install(name: str, prefix: Path) -> Path:
    """Install what build/cpp/NAME built; the folder it went to."""
    _run(["cmake", "--build", BUILD / name])  # the install takes everything
    _run(["cmake", "--install", BUILD / name, "--prefix", prefix])
    return prefix


def _variant(name: str, source: Path) -> str:
    """The build folder of a variant; of a damaged copy of the library one that is emptied first."""
    if source == SOURCE:
        return name
    shutil.rmtree(BUILD / f"{name}-planted", ignore_errors=True)  # it was another copy's
    return f"{name}-planted"


def program(target: str, variant: str = "release", source: Path = SOURCE) -> Path:
    """mla-generate, mla-server or mla-scenario over ONNX Runtime; `variant` release, sanitized (memory) or threads."""
    kind = {"release": RELEASE, "sanitized": SANITIZE, "threads": THREADS}[variant]
    return build(_variant(variant, source), (*ort_options(), *kind, "-DMLA_BUILD_TESTS=ON"), target, source)


def stand_in(source: Path = SOURCE) -> Path:
    """mla-scenario over the stand-in for TensorRT, with sanitizers; of a damaged copy of the library without them."""
    ort = {name: value for name, _, value in (option.partition("=") for option in ort_options())}
    library = f"{ort['-DORT_ROOT']}/lib/libonnxruntime.so"
    fake = SOURCE / "tests" / "stand_in"
    sanitize = SANITIZE if source == SOURCE else PLAIN
    return build(_variant("stand-in", source), (
        "-DMLA_BACKEND=trt", f"-DCMAKE_PREFIX_PATH={ort['-DCMAKE_PREFIX_PATH']}", f"-DTENSORRT_INCLUDE={fake}",
        f"-DCUDART_INCLUDE={fake}", f"-DTENSORRT_LIBRARY={library}", f"-DCUDART_LIBRARY={library}", *sanitize,
        f"-DCMAKE_CXX_FLAGS=-isystem {ort['-DORT_INCLUDE']}", "-DMLA_BUILD_TESTS=ON"), "mla-scenario", source)


def latent_attention(arch: str = "native", source: Path = SOURCE, sanitize: bool = False) -> Path:
    """The library of mla::LatentAttention, compiled for `arch`; with sanitizers for programs that have them."""
    require_tools()
    name = _variant(f"operator-{arch}" + "-sanitized" * sanitize, source)
    include = debian() / "usr" / "include" / "onnxruntime"
    kind = (*SANITIZE, "-DMLA_SANITIZE=address,undefined") if sanitize else ("-DCMAKE_BUILD_TYPE=Release",)
    made = build(name, (f"-DORT_INCLUDE={include}", f"-DMLA_ARCH={arch}", *kind), "mla-operator", source / "operator")
    return made.with_name("libmla-operator.so")
