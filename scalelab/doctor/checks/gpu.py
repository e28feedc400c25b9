"""Are the GPUs there, free and healthy? Asked of nvidia-smi; not yet run on a machine with one:
tested against a stand-in that prints what the manual says."""

from __future__ import annotations

import os
import shutil
import subprocess

from ..registry import Host, NotChecked, Seen, check, fail, ok, probe, skip, warn

SECONDS = 5.0  # a healthy nvidia-smi needs up to 2 where the driver has to wake the GPUs
FIELDS = {  # ours: nvidia-smi's. An old driver refuses a query with one field that it lacks.
    "index": "index", "name": "name", "driver": "driver_version", "total": "memory.total",
    "used": "memory.used", "temperature": "temperature.gpu", "persistence": "persistence_mode",
}  # fmt: skip
HEALTH = {
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "retired": "retired_pages.pending",
    "remap pending": "remapped_rows.pending",
    "remap failed": "remapped_rows.failure",
    "slowed": "clocks_throttle_reasons.hw_slowdown",
}
TAKEN = 0.05  # of a GPU's memory; a driver keeps a few hundred MB of it for itself


@probe("gpu", limit=2 * SECONDS + 1)
def gpu(context: dict) -> dict:
    """{"gpus": [one dict each]} or {"error": words}. Raises NotChecked where there is no GPU."""
    tool = shutil.which("nvidia-smi")
    device = os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia/version")
    if tool is None:
        if device:
            raise NotChecked("there is an NVIDIA driver, but no nvidia-smi on PATH")
        raise NotChecked("no NVIDIA GPU here")
    try:
        # `nvidia-smi -L` is not needed first: without a GPU the query itself says so.
        found = query(tool, {**FIELDS, **HEALTH})
        if "error" in found and "not a valid field" in found["error"]:
            found = query(tool, FIELDS)
    except subprocess.TimeoutExpired:
        return {"error": f"nvidia-smi gives no answer within {SECONDS:g} s", "hangs": True}
    if "error" in found and not device and "No devices" in found["error"]:
        raise NotChecked("no NVIDIA GPU here")
    return found


def query(tool: str, fields: dict[str, str]) -> dict:
    """One query. Raises subprocess.TimeoutExpired."""
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=SECONDS,
        )  # fmt: skip
    except OSError as e:
        return {"error": f"nvidia-smi: {e.strerror}"}
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines()
        return {"error": (words or [f"nvidia-smi: exit status {done.returncode}"])[0][:200]}
    rows = [[w.strip() for w in line.split(",")] for line in done.stdout.splitlines() if line]
    if any(len(row) != len(fields) for row in rows):
        return {"error": f"nvidia-smi printed what is no table: {done.stdout[:80]!r}"}
    return {"gpus": [dict(zip(fields, row)) for row in rows]}


@check("gpu", needs=["gpu"])
def healthy(seen: Seen):
    found: dict[str, dict] = {}
    reasons: dict[str, str] = {}
    for host in seen.hosts:
        try:
            found[host.name] = seen.facts(host, "gpu")
        except NotChecked as e:
            reasons[host.name] = str(e)
    counts = {name: len(facts.get("gpus", ())) for name, facts in found.items()}
    usual = Seen.majority({**dict.fromkeys(reasons, 0), **counts})
    for host in seen.hosts:
        if host.name in reasons:
            if usual:
                yield fail(host, f"{reasons[host.name]}, where its peers have {usual} GPUs",
                           "see `lspci | grep -i nvidia`, the driver, and --gpus of the "
                           "container")  # fmt: skip
            else:
                yield skip(host, reasons[host.name])
            continue
        facts = found[host.name]
        if "error" in facts:
            yield fail(host, facts["error"], "`dmesg | grep -i -e nvrm -e xid`: a GPU has fallen "
                       "off the bus, or the driver does not suit the kernel; reboot the host"
                       )  # fmt: skip
            continue
        # Emulated hosts share this machine's GPUs, or use none: nothing to count there.
        wrong = list(_host(host, facts["gpus"], seen.nproc if _machines(seen) > 1 else 1, usual))
        gpus = facts["gpus"]
        yield from wrong or [
            ok(host, f"{len(gpus)} x {gpus[0]['name']}, driver {gpus[0]['driver']}, free, at most "
               f"{max((_number(g, 'temperature') or 0 for g in gpus), default=0):.0f} °C")
        ]  # fmt: skip


def _host(host: Host, gpus: list[dict], nproc: int, usual: int | None):
    if usual is not None and len(gpus) != usual:
        yield fail(host, f"{len(gpus)} GPUs, its peers have {usual}",
                   "`dmesg | grep -i xid`: one may have fallen off the bus")  # fmt: skip
    elif 0 < len(gpus) < nproc:
        yield warn(host, f"{len(gpus)} GPUs for {nproc} ranks", f"--nproc-per-node={len(gpus)}")
    elif not gpus:
        yield skip(host, "nvidia-smi lists no GPU")
    for one in gpus:
        name = f"GPU {one['index']}"
        if _number(one, "ecc"):
            yield fail(host, f"{name}: {one['ecc']} memory errors that ECC could not correct",
                       "drain the host and reset the GPU (`nvidia-smi -r`); if they come again, "
                       "have it replaced")  # fmt: skip
        if _yes(one, "remap failed"):
            yield fail(host, f"{name}: has run out of spare memory rows", "have it replaced")
        if _yes(one, "retired") or _yes(one, "remap pending"):
            yield warn(host, f"{name}: bad memory is to be taken out of use at the next reset",
                       "drain the host, then `nvidia-smi -r` or reboot")  # fmt: skip
        used, total = _number(one, "used"), _number(one, "total")
        if used is not None and total and used > TAKEN * total:
            yield warn(host, f"{name}: {used:.0f} of {total:.0f} MiB are in use already",
                       "`nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv` says "
                       "by whom")  # fmt: skip
        if _yes(one, "slowed"):
            heat = _number(one, "temperature")
            yield warn(host, f"{name}: slowed down by its own hardware"
                       + (f", at {heat:.0f} °C" if heat is not None else ""),
                       "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`: cooling or power"
                       )  # fmt: skip


def _machines(seen: Seen) -> int:
    found = [h.facts.get("identity", {}).get("value", {}).get("boot_id") for h in seen.hosts]
    return len({boot for boot in found if boot})


def _number(one: dict, key: str) -> float | None:
    """None for "[N/A]", "[Not Supported]" and the like."""
    try:
        return float(one.get(key, ""))
    except ValueError:
        return None


def _yes(one: dict, key: str) -> bool:
    return one.get(key, "").lower() in ("yes", "active") or bool(_number(one, key))
