"""Does every device compute a small matrix product, and rightly? Asked of a child with torch, which
the engine starts first and hears last (see ../matmul.py)."""

from __future__ import annotations

from ..registry import Host, NotChecked, Seen, check, fail, ok, skip, warn


@check("matmul")
def matmul(seen: Seen):
    had = [h for h in seen.hosts if h.facts.get("matmul", {}).get("value", {}).get("devices")]
    for host in seen.hosts:
        try:
            found = seen.facts(host, "matmul")
        except NotChecked as e:
            # A busy machine is late for some of its emulated hosts; a machine that is late alone
            # may have a sick device.
            peers = [h for h in had if _machine(h) != _machine(host)]
            if "no result" in str(e) and peers and len({_machine(h) for h in had}) == len(had):
                yield warn(host, f"{e}, while {len(peers)} of its peers had one",
                           "run `python -m scalelab.doctor.matmul` there; nvidia-smi and dmesg "
                           "say if a device hangs")  # fmt: skip
            else:
                yield skip(host, str(e))
            continue
        if "error" in found:
            missing = "No module named 'torch'" in found["error"]
            fix = "pip install torch, of the version that the other hosts have" if missing else (
                "run `python -m scalelab.doctor.matmul` there to see all that it says"
            )  # fmt: skip
            yield fail(host, f"torch does not work: {found['error'][:160]}", fix)
            continue
        bad = [d for d in found["devices"] if not (d["finite"] and d["right"])]
        for device in bad:
            words = "is wrong" if device["finite"] else "is not finite"
            yield fail(host, f"a product of small whole numbers on {_name(device)} {words}",
                       "leave this device out of jobs (CUDA_VISIBLE_DEVICES) and have it tested: "
                       "`dcgmi diag -r 3`, memory test")  # fmt: skip
        if not found["devices"]:
            yield skip(host, "torch found no device, not even a processor")
        elif not bad:
            shown = [f"{_name(d)} {d['seconds'] * 1e3:.1f} ms" for d in found["devices"]]
            yield ok(host, "right on " + ", ".join(shown))


def _machine(host: Host) -> str | None:
    return host.facts.get("identity", {}).get("value", {}).get("boot_id")


def _name(device: dict) -> str:
    return f"{device['device']} ({device['name']})" if device.get("name") else device["device"]
