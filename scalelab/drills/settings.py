"""Pits 3 and 5: a host with another environment, and a job without checkpoints."""

from __future__ import annotations

import re
from functools import partial

from .fault import Fault, Lab, everything, said, torchrun, values

PACKAGE = "recipe"  # a package of the team's own, in a directory for each version
MODULE = {"1.0": "", "1.1": "def greet(rank):\n    return f'warm-up for rank {rank}'\n"}


def _install(lab: Lab, index: int, version: str) -> None:
    place = lab.dir / f"site-{version}"
    info = place / f"{PACKAGE}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
    (place / f"{PACKAGE}.py").write_text(MODULE[version])
    lab.node(index).env["PYTHONPATH"] = str(place)


def _versions(lab: Lab, on_node1: str) -> None:
    _install(lab, 0, "1.1")
    _install(lab, 1, on_node1)


def _plain_cpu(lab: Lab) -> None:
    lab.node(1).env["ATEN_CPU_CAPABILITY"] = "default"


def _capabilities(run) -> str | None:
    kinds = values(run, r"started on \S+ .*, CPU (\w+)")
    if len({k for (k,) in kinds.values()}) < 2:
        return None
    told = ", ".join(f"rank {r} says {k}" for r, (k,) in sorted(kinds.items()))
    return f"no error, but not the same arithmetic: {told}"


def _only_plain_cpu() -> str:
    import torch

    kind = torch.backends.cpu.get_cpu_capability()
    return f"this CPU has no other kernels than {kind}" if kind in ("DEFAULT", "NO AVX") else ""


ENVIRONMENT = (
    Fault(
        id="another-version", pit="environment",
        title="node1 has an older version of a package",
        inject=partial(_versions, on_node1="1.0"), cure=partial(_versions, on_node1="1.1"),
        lines=lambda lab: torchrun(lab, args=f"--package {PACKAGE}"),
        symptom=lambda run: said(run, "AttributeError", node=1), named="environment",
    ),
    Fault(
        id="another-setting", pit="environment",
        title="node1 has a variable set that makes its CPU compute in another way",
        inject=_plain_cpu, cure=lambda lab: lab.node(1).env.pop("ATEN_CPU_CAPABILITY"),
        lines=torchrun, symptom=_capabilities, named="environment", unless=_only_plain_cpu,
    ),
)  # fmt: skip


# The power goes right after step 12, and the job is started again until it succeeds.


def _crash(lab: Lab) -> dict[int, str]:
    save = " --save checkpoints/last.pt" if lab.fixed else ""
    lines = torchrun(lab, args=f"--steps 15 --crash-at 12{save}")
    return {i: f"until {line}; do sleep 1; done" for i, line in lines.items()}


def _from_zero(run) -> str | None:
    begun = re.findall(r"^rank 0: begins at step (\d+)", everything(run), re.MULTILINE)
    lost = said(run, "lost at step")
    if len(begun) < 2 or begun[-1] != "0" or not lost:
        return None
    return f"{lost}; then rank 0 begins at step {begun[-1]} once more"


def _nothing(lab: Lab) -> None:
    pass  # what is wrong is what the job does not do


def _save(lab: Lab) -> None:
    lab.fixed = True


CHECKPOINT = (
    Fault(
        id="no-checkpoint", pit="checkpoint",
        title="The power goes, and training begins anew: nothing was saved",
        inject=_nothing, cure=_save, lines=_crash, symptom=_from_zero, named="",
    ),
)  # fmt: skip
