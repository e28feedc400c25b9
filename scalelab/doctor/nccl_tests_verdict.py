"""Good, slow, broken, not-one-job or unknown: what nccl-tests' output is worth."""

from __future__ import annotations

from . import nccl_tests_rate
from .nccl_tests_jobs import hosts

SLOW = 0.50  # of the best run in the file
CAUSES = (
    ("busy or unavailable", "a GPU is in use or in Exclusive_Process mode, and another process "
     "(often MPI itself, on GPU 0) holds it", "nvidia-smi -q -d COMPUTE; nvidia-smi -c 0 (as "
     "root), or keep MPI off the GPUs: OMPI_MCA_mtl_ofi_disable_hmem=true"),
    ("out of memory", "a GPU has too little free memory", "nvidia-smi, end what holds the "
     "memory, or use a smaller -e"),
    ("invalid device ordinal", "more GPUs were asked for than a process can see",
     "nvidia-smi -L; lower -g, or check CUDA_VISIBLE_DEVICES"),
    ("no CUDA-capable device", "no GPU can be seen", "nvidia-smi -L inside the container or job"),
    ("driver version is insufficient", "the driver is older than the CUDA of this build",
     "nvidia-smi; update the driver or use an older CUDA"),
    ("no kernel image", "the binary was not built for this GPU's architecture",
     "rebuild nccl-tests (and NCCL) with NVCC_GENCODE for this GPU"),
    ("unhandled system error", "a call to the system failed inside NCCL (network, shared memory)",
     "run again with NCCL_DEBUG=INFO and read that"),
    ("unhandled cuda error", "a CUDA call failed inside NCCL before the first row; a NCCL older "
     "than the GPU is a common reason", "run again with NCCL_DEBUG=INFO, and try a newer NCCL"),
    ("remote process exited", "another rank died first, or the network failed",
     "look for the first error on the other nodes; run again with NCCL_DEBUG=INFO"),
    ("invalid usage", "NCCL refused the call (ranks, devices or arguments do not fit)",
     "run again with NCCL_DEBUG=WARN"),
    ("internal error", "NCCL failed inside", "run again with NCCL_DEBUG=INFO"),
)  # fmt: skip


def judge(facts: dict, tests, runs: list, best) -> dict:
    """Verdict (its first word is one of the five), why and next. `best`: the run of the figures."""
    verdict, why, step = _judge(facts, tests, runs, best)
    if facts["max_busbw"] is not None and not tests.rows:
        why += " Without rows the largest average stands for the largest busbw, which was no less."
        if not tests.jobs.lists and _twins(runs):
            why += (f" {len(runs)} averages stand there, nearly equal: if one command on several "
                    "machines printed them, its processes knew nothing of each other.")  # fmt: skip
    return {"verdict": verdict, "why": why.strip(), "next": step}


def _judge(facts: dict, tests, runs: list, best) -> tuple[str, str, str]:
    if facts["independent_runs"]:
        return _not_one_job(facts, tests, runs)
    if facts["wrong"]:
        return (
            f"broken: {facts['wrong']} wrong values",
            "Results were compared with what they must be and differ: no speed counts until that "
            "is mended.",
            "test pairs of GPUs one at a time (CUDA_VISIBLE_DEVICES), then NCCL_P2P_DISABLE=1, "
            "NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1 in turn; nvidia-smi -q -d ECC, dmesg",
        )
    if tests.failures:
        return _failed(facts, tests)
    if not tests.measured:
        return _no_rows(tests)
    ended = all(r.ended for r in runs)
    if tests.killed and not ended:
        return (
            f"broken: it ended before the table did ({tests.killed[0][:80]})",
            f"The rows that were printed reach {_figure(facts)}." if tests.rows else "",
            "find which rank ended first; run again with NCCL_DEBUG=INFO",
        )
    if facts["shared_gpus"]:
        return (
            f"unknown: {facts['ranks']} ranks share one GPU, so this says nothing of the hardware",
            "The same device is listed for more than one rank; figures were of memory or sockets "
            f"inside one machine ({_figure(facts)}).",
            "give each rank a GPU of its own: one rank a GPU, -g 1, and check CUDA_VISIBLE_DEVICES",
        )
    if facts["ranks"] == 1:
        return (
            "unknown: one rank, whose busbw is 0 by definition",
            "busbw is algbw times 2(n-1)/n, which is 0 for n = 1: nothing was sent, and nothing is "
            "broken.",
            "use two GPUs or more: -g 2, or mpirun -np 2 with a binary built with MPI=1",
        )
    if facts["max_busbw"] is None:
        return "unknown: no bandwidth was printed", "The output holds no complete row.", (
            "run the test to its end")  # fmt: skip
    if facts["max_busbw"] == 0 and tests.rows:
        return (
            "unknown: busbw is 0 in every row",
            "That is so by definition with one rank, and with messages too small to show; this "
            "output does not say how many ranks there were.",
            "run with -g 2 or more, or with a binary built with MPI=1, to at least -e 1G",
        )
    if uneven := _uneven(runs):
        return uneven
    verdict, why, step = nccl_tests_rate.judge(facts, tests, best)
    if len(runs) > 1 and (series := _series(runs, best)):
        why += series
    if not ended:
        why += " The output stops before the average: it was cut, or the run did not end."
    return verdict, why, step


def _twins(runs: list) -> bool:
    """Whether footers alone are left, of figures that jobs apart would reach."""
    averages = [r.average for r in runs if r.average]
    return len(averages) > 1 and min(averages) > 0.97 * max(averages)


def _series(runs: list, best) -> str:
    """That figures are of one run among several that differ."""
    sizes = [len(r.devices) if r.devices else None for r in runs]
    names = [r.name for r in runs]
    if len(set(sizes)) == 1 and len(set(names)) == 1:
        return ""
    what = ", ".join(
        f"{size or '?'} ranks" + (f" ({name})" if len(set(names)) > 1 and name else "")
        + (f" {r.best:g} GB/s" if r.best is not None else " no row")
        for size, name, r in list(zip(sizes, names, runs))[:6]
    )  # fmt: skip
    return f" {len(runs)} runs: {what}; the figures are of run {runs.index(best) + 1}."


def _not_one_job(facts: dict, tests, runs: list) -> tuple[str, str, str]:
    lists = tests.jobs.apart_lists(runs)
    each = sorted({len(devices) for devices in lists} or {facts["ranks"] or 1})
    count = f"{len(lists)} separate" if lists else "several separate"
    ranks = f"{each[0]} rank{'s' * (each[0] != 1)}" if len(each) == 1 else (
        f"{each[0]} to {each[-1]} ranks")  # fmt: skip
    alone = bool(lists) and all(len(hosts(devices)) == 1 for devices in lists)
    inside = " each inside one machine" if alone and each[-1] > 1 else ""
    if not lists:
        seen = ("The same sizes come again and again, with busbw 0, as each process prints its own "
                "table.")  # fmt: skip
    elif tests.jobs.together or tests.jobs.doubt:
        seen = f"Rank 0 is listed {len(lists)} times before a run ends: no job knew of another."
    else:
        seen = ("One run ends before the next begins, each on its own machines: "
                + "; ".join(_machines(devices) for devices in lists[:3])
                + ("; …" if len(lists) > 3 else "") + ".")  # fmt: skip
    if inside:
        seen += " No figure here is of the network between them."
    return (
        f"not-one-job: {count} runs of {ranks}{inside}, not one run over all",
        seen + " If one command printed this, the binary was built without MPI, or its MPI is not "
        "the one that mpirun or srun belongs to.",
        f"make clean && make MPI=1 MPI_HOME=/path/to/mpi; then {_over_all(lists)} (under srun: "
        "--mpi=pmix)",
    )


def _machines(devices: list) -> str:
    names = sorted(hosts(devices))
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _over_all(lists: list) -> str:
    """The command of one job over all machines that are named."""
    gpus: dict[str, set[tuple[int, str]]] = {}
    for devices in lists:
        for d in devices:
            gpus.setdefault(d.host, set()).add((d.device, d.bus))
    if not gpus or len(gpus) > 4:
        return "mpirun -np N ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1"
    # processes without MPI all take the first GPU, so count the ranks that were started too
    slots = {h: max(len(seen), sum(d.host == h and d.rank == 0 for each in lists for d in each))
             for h, seen in gpus.items()}  # fmt: skip
    where = ",".join(f"{host}:{n}" for host, n in slots.items())
    total = sum(slots.values())
    return f"mpirun -np {total} -H {where} ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1"


def _failed(facts: dict, tests) -> tuple[str, str, str]:
    first = next((f for f in tests.failures if "'" in f), tests.failures[0])
    when = "before the first row" if not tests.rows else f"after {tests.rows} rows"
    cause, step = "", "run again with NCCL_DEBUG=INFO and read that log"
    for sign, what, then in CAUSES:
        if any(sign.lower() in f.lower() for f in tests.failures):
            cause, step = what, then
            break
    if tests.log is not None and tests.log.errors:
        told = tests.log.result()
        return f"broken {when}: {told['verdict'].removeprefix('broken: ')}", (
            f"{first[:160]}. {told['why']}"), told["next"]  # fmt: skip
    blackwell = "unhandled cuda error" in first and any("RTX 50" in g for g in facts["gpus"])
    if blackwell:
        cause += "; on RTX 50 cards NCCL before 2.26.2 asks for more shared memory than there is"
    return f"broken {when}: {cause or first[:100]}", f"{first[:200]}.", step


def _no_rows(tests) -> tuple[str, str, str]:
    if tests.log is not None and tests.log.errors:
        told = tests.log.result()
        return f"broken before the first row: {told['verdict'].removeprefix('broken: ')}", (
            told["why"]), told["next"]  # fmt: skip
    if tests.killed:
        if any("TIME LIMIT" in k for k in tests.killed):
            return (
                "broken before the first row: it hung until the job's time limit",
                "Devices are listed and no row follows: the set-up between the ranks did not end.",
                "run again with NCCL_DEBUG=INFO and a short time limit; scalelab read on that log",
            )
        return (
            f"broken before the first row: {tests.killed[0][:100]}",
            "The run was ended from outside or crashed before it measured anything.",
            "find which rank ended first; run again with NCCL_DEBUG=INFO",
        )
    return (
        "unknown: no row was measured",
        "The header is there and nothing after it: the run hung in its set-up, or was cut here.",
        "run again with NCCL_DEBUG=INFO and a time limit, and read that log with scalelab read",
    )


def _uneven(runs: list) -> tuple[str, str, str] | None:
    """Several runs of the same sizes, one far slower: told by themselves, whatever the hardware."""
    figures = [
        (r.best if r.best is not None else r.average, set(r.sizes), r.name,
         hosts(r.devices or []), len(r.devices or [])) for r in runs
    ]  # fmt: skip
    figures = [f for f in figures if f[0]]
    if len(figures) < 2:
        return None
    alike = all(f[1:] == figures[0][1:] for f in figures)
    values = [f[0] for f in figures]
    if not alike or min(values) > SLOW * max(values):
        return None
    place = values.index(min(values)) + 1
    return (
        f"slow: run {place} of {len(values)} reaches {min(values):g} GB/s, "
        f"{min(values) / max(values):.0%} of the {max(values):g} GB/s of the best",
        "The runs in this file differ: " + ", ".join(f"{v:g}" for v in values[:8]) + " GB/s. If "
        "they are the same test on the same machines, what changed between them costs the rest.",
        "compare both runs' NCCL_DEBUG=INFO logs: transport, GDRDMA, channels; a kernel change "
        "can turn GPUDirect RDMA off (try iommu=pt, check nvidia_peermem)",
    )


def _figure(facts: dict) -> str:
    return f"{facts['max_busbw']:g} GB/s busbw"
