"""03.1: a script is run on real ranks, and compared with train_one.py on one device."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from ...bench import Bench, raise_if_broken
from ...verdict import Wrong
from .parts import warm

ONE_DEVICE = Path(__file__).parents[4] / "notebooks" / "scripts" / "train_one.py"
MAX_LINES = 15
STEPS, GLOBAL_BATCH, BLOCK = 3, 12, 16
_KEPT = []  # process groups, on a rank
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--block-size", str(BLOCK)]


def _text(rank, world_size, answer):
    return answer() if callable(answer) else answer


def _run_script(rank, world_size, text, batch_size, folder):
    """Run a script's main() as this rank, with plain SGD: Adam hides a gradient's scale."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    seen = {"wrapped": 0, "forwards": 0}

    def counting(name, function):
        def call(self, *args, **kwargs):
            seen[name] += 1
            return function(self, *args, **kwargs)

        return call

    DDP.__init__ = counting("wrapped", DDP.__init__)
    DDP.forward = counting("forwards", DDP.forward)
    # A DDP model that is a group's last holder ends it, and then waits for gloo's threads with the
    # lock that they may wait for. No fault of the learner's: the group is kept, and the rank ends
    # by os._exit, threads or not.
    end = dist.destroy_process_group
    dist.destroy_process_group = lambda *group: (_KEPT.append(dist.group.WORLD), end(*group))[1]
    torch.optim.AdamW = torch.optim.Adam = lambda p, lr=0.1, **_: torch.optim.SGD(p, lr=100 * lr)
    metrics = Path(folder) / f"{os.getpid()}.jsonl"  # the reference has ranks of the same number
    sys.argv = ["my_train_ddp.py", "--batch-size", str(batch_size), "--steps", str(STEPS), *SMALL]
    sys.argv += ["--data", str(Path(folder) / "text.txt"), "--metrics", str(metrics)]
    space = {"__name__": "my_train_ddp", "__file__": str(ONE_DEVICE)}
    exec(compile(text, "my_train_ddp.py", "exec"), space)
    if not callable(space.get("main")):
        return {"problem": "there is no main() any more; keep it, and let it return model"}
    try:
        model = space["main"]()
    except SystemExit as e:
        words = str(e.code)[:200]
        return {"problem": f"on rank {rank} of {world_size} the script ended by itself: {words}"}
    if not isinstance(model, torch.nn.Module):
        return {"problem": f"main() returned {model!r:.60}; let it return model, as it did"}
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    p = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return {**seen, "parameters": p, "metrics": [json.loads(line) for line in lines]}


def _start(rank, world_size, text):
    """The parameters that training starts from."""
    import torch

    space = {"__name__": "train_one", "__file__": str(ONE_DEVICE)}
    exec(compile(text, "train_one.py", "exec"), space)
    sys.argv = ["train_one.py", *SMALL]
    args = space["parse_args"]()
    torch.manual_seed(args.seed)
    model = space["GPT"](_CHARACTERS, args)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


_LINE = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. "
_CHARACTERS = len(set(_LINE))


def changed_lines(old: str, new: str) -> int:
    """Lines of `new` that are not lines of `old`, and lines of `old` that are gone without one."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


def judge_script(bench: Bench, answer) -> str:
    (text,) = bench.values(1, _text, answer, group=False)
    if not isinstance(text, str) or "def main" not in text:
        raise Wrong(f"this is {text!r:.60}, not the text of a script; return the whole script, as "
                    "Path(...).read_text() gives it")  # fmt: skip
    old = ONE_DEVICE.read_text()
    lines = changed_lines(old, text)
    if lines == 0:
        raise Wrong("this is train_one.py as it was: every rank would train alone")
    try:
        compile(text, "my_train_ddp.py", "exec")
    except SyntaxError as e:
        raise Wrong(f"line {e.lineno} is not Python: {e.msg}") from None
    warm()
    with tempfile.TemporaryDirectory(prefix="scalelab-") as folder:
        Path(folder, "text.txt").write_text(_LINE * 30)
        (one,) = bench.values(1, _run_script, old, GLOBAL_BATCH, folder, group=False)
        (start,) = bench.values(1, _start, old, group=False)
        if (one["parameters"] - start).abs().max() < 1e-4:
            raise RuntimeError("the reference does not train")
        for n in (2, 3, 1):
            found = bench.ranks(n, _run_script, text, GLOBAL_BATCH // n, folder, group=False)
            _judge_script_once(found, n, one, start)
    if lines > MAX_LINES:
        raise Wrong(f"it trains like one device, but {lines} lines are changed; {MAX_LINES} are "
                    "enough. What can stay as it was?")  # fmt: skip
    return (f"equal to one device with the global batch at 1, 2 and 3 ranks, to 1e-6, with at most "
            f"{MAX_LINES} lines changed")  # fmt: skip


def _judge_script_once(found, n, one, start) -> None:
    for f in found:
        if isinstance(f.value, dict) and "problem" in f.value:
            raise Wrong(f.value["problem"])
    if n == 3 and any(f.error or f.hung for f in found):
        f = next((f for f in found if f.error), found[0])
        why = f.error or "it never returned"
        raise Wrong(f"it runs on 2 ranks and not on 3 ({why[:120]}): is a world size hard-coded? "
                    "Read WORLD_SIZE from the environment")  # fmt: skip
    raise_if_broken(found)
    values = [f.value for f in found]
    if not all(v["wrapped"] for v in values):
        raise Wrong("the model is never wrapped in DistributedDataParallel: every rank trains "
                    "alone")
    if not all(v["forwards"] for v in values):
        raise Wrong("the model is wrapped, but the loss comes from the model inside: forward must "
                    "go through the wrapped model, or nothing is synchronised")  # fmt: skip
    for f in found[1:]:
        if re.search(r"^(step +\d|validation loss)", f.output, re.M):
            raise Wrong(f"rank {f.rank} of {n} prints the step lines as well; only rank 0 should. "
                        "Does the script read RANK from the environment?")  # fmt: skip
    read = sum(m["tokens"] for v in values for m in v["metrics"] if m["step"] == 1) // BLOCK
    if read != GLOBAL_BATCH:
        raise Wrong(f"{n} ranks with a batch of {GLOBAL_BATCH // n} each should take in "
                    f"{GLOBAL_BATCH} sequences a step together; they took in {read}. Which part of "
                    "starts is this rank's?")  # fmt: skip
    losses = {tuple(m["loss"] for m in v["metrics"]) for v in values}
    if n > 1 and len(losses) == 1:
        raise Wrong(f"all {n} ranks report the same losses, so all read the same sequences: each "
                    "rank has to take another part of starts")  # fmt: skip
    first, want = values[0]["parameters"], one["parameters"]
    if any((v["parameters"] - first).abs().max() > 0 for v in values):
        raise Wrong(f"after {STEPS} steps the {n} ranks have different parameters: some backward "
                    "pass is not synchronised, or the ranks start from different "
                    "weights")  # fmt: skip
    moved, should = first - start, want - start
    off = (first - want).abs().max().item()
    if off <= 1e-6:
        return
    factor = float(moved @ should / (should @ should))
    why = "same seed, same global batch, same order of the sequences?"
    if n > 1 and abs(factor - 1 / n) < 0.15 / n:
        why = (f"they moved 1/{n} as far: DDP averages over the ranks already, so the loss is not "
               "divided by their number")  # fmt: skip
    elif n > 1 and factor > 0.6 * n:
        why = (f"they moved about {n} times as far: the global batch is the same, so neither the "
               "loss nor the learning rate is multiplied")  # fmt: skip
    raise Wrong(f"on {n} ranks the parameters differ from one device by up to {off:.1e}: {why}")
