"""What of this process's surroundings can change a result or stop a job: versions, packages,
processor, GPUs, settings and code, as one flat dict of short texts.

Two hosts are compared by comparing their dicts. torch is never imported (a second or two, and it
may be what is broken): its version is read as text. Standard library only, a fifth of a second.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# Settings that a job reads. Others (PATH, HOME, DISPLAY) differ between hosts for no harm.
PREFIXES = (
    "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUDA_", "ATEN_", "KMP_", "GOMP_",
    "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "CUBLAS_", "CUDNN_", "DNNL_", "ONEDNN_", "XLA_",
    "TORCHINDUCTOR_", "UCX_", "FI_",
)  # fmt: skip
NAMES = ("PYTHONHASHSEED", "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD", "MALLOC_CONF")
# Those that rightly differ from host to host, or say only how much is printed and where.
OWN = re.compile(
    r"_SOCKET_IFNAME$|_CACHE_DIR$|_DEBUG_FILE$|^NCCL_DEBUG(_|$)|^NCCL_(HOSTID|IB_HCA|TOPO_FILE)$"
    r"|^TORCH_(HOME|LOGS|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES)$|^CUDA_(VISIBLE_DEVICES|HOME|PATH)$"
    r"|^GOMP_CPU_AFFINITY$|^KMP_AFFINITY$|^OMP_PLACES$|^TORCH_NCCL_TRACE|_DEVICE_UUID$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|(^|_)(KEY|AUTH|PAT)(_|$)")
LONGEST = 200  # characters of a value
GIT_SECONDS = 1.0
ABSENT = "none"


def fingerprint(cwd: str | None = None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process. What is not there is "none"; what could not be found out
    has no key. Keys: python, platform, torch, cuda, nccl, driver, gpus, cpu, cpu capability,
    code, code changes, code place, "variable NAME", "package NAME". Raises nothing."""
    environ = os.environ if environ is None else environ
    found = packages()
    facts = {"python": platform.python_version(), "platform": _platform()}
    facts |= torch_versions(found)
    facts |= gpus(environ)
    facts |= processor(environ)
    facts |= code(cwd)
    facts |= {f"variable {k}": v for k, v in variables(environ).items()}
    facts |= {f"package {k}": v for k, v in found.items()}
    return facts


def _platform() -> str:
    libc = "-".join(platform.libc_ver()).strip("-")
    return " ".join(filter(None, (platform.system(), platform.machine(), libc)))


def packages(path: list[str] | None = None) -> dict[str, str]:
    """{normalised name: version} of what is installed, as the first folder of `path` (sys.path)
    that holds it says. Read off the names of the *.dist-info folders: opening the metadata of
    some hundred packages takes a second on a network file system."""
    found: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in names:
            match = re.fullmatch(r"(.+?)-([^-]+?)(-py[\d.]+)?\.(dist-info|egg-info)", entry)
            if match:
                name = re.sub(r"[-_.]+", "-", match[1]).lower()
                found.setdefault(name, match[2])
    return found


def torch_versions(found: Mapping[str, str], path: list[str] | None = None) -> dict[str, str]:
    """torch, the CUDA it was built for and the NCCL it would load, from files as text."""
    facts = {"torch": ABSENT, "cuda": ABSENT, "nccl": ABSENT}
    for folder in sys.path if path is None else path:
        try:
            text = Path(folder or ".", "torch", "version.py").read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        for key, name in (("torch", "__version__"), ("cuda", "cuda"), ("cuda", "hip")):
            said = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            if said:
                facts[key] = said[1] if name != "hip" else f"ROCm {said[1]}"
        break
    # A wheel of torch for CUDA brings NCCL as a package; a torch built elsewhere may not.
    nccl = [v for k, v in sorted(found.items()) if k.startswith("nvidia-nccl")]
    if nccl:
        facts["nccl"] = nccl[-1]
    elif facts["cuda"] != ABSENT:
        del facts["nccl"]  # it has one, but not as a package: not known
    return facts


def gpus(environ: Mapping[str, str], proc: str = "/proc/driver/nvidia") -> dict[str, str]:
    """NVIDIA driver, and count and model of the GPUs this process may use. From /proc: nvidia-smi
    takes up to seconds where the driver sleeps, and hangs where a GPU has died."""
    facts = {"driver": ABSENT, "gpus": ABSENT}
    try:
        text = Path(proc, "version").read_text()
    except OSError:
        return facts
    said = re.search(r"Kernel Module\D*?([\d.]{5,})", text)
    facts["driver"] = said[1] if said else text.split("\n")[0][:LONGEST]
    models = []
    try:
        for entry in sorted(os.listdir(f"{proc}/gpus")):
            about = Path(proc, "gpus", entry, "information").read_text()
            said = re.search(r"^Model:\s*(.+)$", about, re.MULTILINE)
            models.append(said[1].strip() if said else "unknown model")
    except OSError:
        pass
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # Which of them it may use is the scheduler's affair; how many, and of which kind, is ours.
        count = len([x for x in visible.split(",") if x.strip() and x.strip() != "-1"])
        models = models[:count]
    kinds = dict.fromkeys(models)
    facts["gpus"] = ", ".join(f"{models.count(k)} x {k}" for k in kinds) or ABSENT
    return facts


def processor(environ: Mapping[str, str], cpuinfo: str = "/proc/cpuinfo") -> dict[str, str]:
    """Model of the processor, and which vector instructions torch's kernels would use on it."""
    facts: dict[str, str] = {}
    try:
        text = Path(cpuinfo).read_text(errors="replace").split("\n\n")[0]
    except OSError:
        return facts
    model = re.search(r"^(model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    if model:
        facts["cpu"] = " ".join(model[2].split())
    flags = re.search(r"^(flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    if flags:
        facts["cpu capability"] = capability(set(flags[2].split()), environ)
    return facts


def capability(flags: set[str], environ: Mapping[str, str]) -> str:
    """As torch chooses (aten/src/ATen/native/DispatchStub.cpp, x86 only): ATEN_CPU_CAPABILITY if
    it names one, else the widest that the processor has."""
    if "sve" in flags:
        return "sve"
    if "asimd" in flags:
        return "default"
    asked = environ.get("ATEN_CPU_CAPABILITY", "").strip()
    if asked in ("avx512", "avx2", "default"):
        return asked
    if {"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma"} <= flags:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= flags else "default"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings that reach the job's arithmetic, threads or network; never a secret."""
    found = {}
    for name, value in sorted(environ.items()):
        if not (name.startswith(PREFIXES) or name in NAMES):
            continue
        if OWN.search(name) or SECRET.search(name):
            continue
        # a password inside an address is a secret too
        found[name] = re.sub(r"://[^/\s@]*@", "://…@", value)[:LONGEST]
    return found


def code(cwd: str | None = None) -> dict[str, str]:
    """Commit of the code in `cwd` (default: here), whether files differ from it, and where the
    copy lies: hosts with the same place look at the same files."""
    try:
        folder = os.path.realpath(cwd or os.getcwd())
        top = next((p for p in (folder, *map(str, Path(folder).parents)) if _is_repo(p)), None)
        if top is None:
            return {"code": ABSENT, "code changes": ABSENT}
        at = os.stat(top)
    except OSError:
        return {}
    facts = {"code place": f"{_boot()} {at.st_dev}:{at.st_ino}"}
    commit = _git(top, "rev-parse", "HEAD")
    if commit is None:
        return facts
    facts["code"] = commit.decode(errors="replace").strip()[:12]
    changes = _git(top, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    if changes is not None:
        digest = hashlib.sha256(changes).hexdigest()[:12]
        facts["code changes"] = f"uncommitted ({digest})" if changes else ABSENT
    return facts


def _is_repo(path: str) -> bool:
    return os.path.exists(os.path.join(path, ".git"))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _git(top: str, *args: str) -> bytes | None:
    """What git prints, or None: not installed, another user's copy, no commit yet, too slow."""
    try:
        done = subprocess.run(
            # without a lock: a person may be committing; without hooks or a monitor: read only
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", top, *args],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=GIT_SECONDS, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
