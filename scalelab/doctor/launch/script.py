"""What the script itself says about ranks, addresses and data. It is parsed, never run.

Rules are about what is certain from the text; where another module, a guard or a variable may
decide, nothing is said.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import sys
from pathlib import Path

from .addresses import loopback, numeric
from .facts import TORCHRUN_LIKE, Finding, Node, finding, whole
from .listing import unsorted_listings
from .parsed import Parsed
from .ranks import dotted, global_ranks, is_rank
from .shell import known, shown

MOST_BYTES = 2_000_000
# Packages that call init_process_group themselves, or do not need it
STARTS_ITSELF = {
    "accelerate", "transformers", "trl", "lightning", "pytorch_lightning", "deepspeed", "fairscale",
    "megatron", "mmengine", "mmcv", "mmdet", "detectron2", "fastai", "ignite", "composer", "ray",
    "horovod", "torchtune", "colossalai", "llamafactory", "swift", "timm", "peft", "torchx",
    "catalyst", "oneflow", "bagua", "paddle", "jax", "verl", "sentence_transformers",
}  # fmt: skip
PLAIN = {"torch", "torchvision", "torchaudio", "numpy", "tqdm", "datasets", "matplotlib", "PIL",
         "pandas", "sklearn", "scipy", "yaml", "wandb", "tensorboard", "psutil"}  # fmt: skip
MASTER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def find(node: Node, base_dir: str) -> Path | None:
    """The file that a line starts, if it is here."""
    name = node.script
    if not known(name) or not name or len(name) > 400 or node.launcher in (
        "llamafactory", "swift", "shell script"
    ):  # fmt: skip
        return None
    if node.module:
        name = name.replace(".", "/") + ".py"
    if not name.endswith(".py"):
        return None
    for folder in (base_dir, "."):
        path = Path(folder) / os.path.expanduser(name)
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(found.st_mode) and found.st_size <= MOST_BYTES:
            return path
    return None


def judge_script(path: Path, nodes: list[Node]) -> list[Finding]:
    """Findings on one script, for the lines that start it."""
    try:
        text = path.read_bytes().decode("utf-8", "replace").replace("\0", "")
        tree = ast.parse(text)
    except OSError:
        return []
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        line = getattr(e, "lineno", None)
        at = f" (line {line})" if line else ""
        return [finding("script", "warn", nodes[0], f"{shown(path.name)} is not read: not the "
                        f"Python of this version{at}", "python -m py_compile "
                        f"{shown(path.name)}")]  # fmt: skip
    try:
        return _Script(path, tree, text, nodes).judge()
    except RecursionError:
        return []


class _Script(Parsed):
    def say(self, status: str, at: ast.AST, detail: str, fix: str) -> None:
        self.found.append(finding("script", status, None, f"{self.name} line "
                                  f"{getattr(at, 'lineno', 1)}: {detail}", fix))  # fmt: skip

    def judge(self) -> list[Finding]:
        self._environment()
        self._init()
        self._local_rank()
        self._device()
        self._no_init()
        self._sampler()
        for at, what in unsorted_listings(self.tree, self.parents):
            if self._switched_off(at):
                continue
            self.say("warn", at, f"{what} gives names in the order of each node's disk: ranks that "
                     "share them out by number take other files", f"sorted({what})")  # fmt: skip
        return self.found

    def _constants(self):
        """(place, variable, value) of each os.environ assignment of a constant without a guard."""
        for n in ast.walk(self.tree):
            pairs = []
            if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant):
                for target in n.targets:
                    if isinstance(target, ast.Subscript) and dotted(target.value).endswith(
                        "environ"
                    ):
                        pairs.append((target.slice, n.value))
            elif isinstance(n, ast.Call) and dotted(n.func).endswith("environ.update"):
                for arg in n.args:
                    if isinstance(arg, ast.Dict):
                        pairs += zip(arg.keys, arg.values)
            elif isinstance(n, ast.Call) and dotted(n.func).endswith("putenv"):
                pairs += [tuple(n.args)] if len(n.args) == 2 else []
            for key, value in pairs:
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and (
                    key.value in MASTER and not self._guarded(n)
                ):  # fmt: skip
                    yield n, key.value, str(value.value)

    def _environment(self) -> None:
        for at, name, value in self._constants():
            line = f'os.environ["{name}"] = "{shown(value)}"'
            fix = f"delete the line: the launcher sets {name}"
            if name == "MASTER_ADDR":
                self._address(at, value, line, fix)
            elif name == "MASTER_PORT":
                ports = {n.port for n in self.nodes if known(n.port)}
                static = all(n.backend == "static" and not n.alone for n in self.nodes)
                if self.several and static and ports and value not in ports:
                    self.say("fail", at, f"{line}, while the lines say {sorted(ports)[0]}", fix)
            elif name in ("RANK", "LOCAL_RANK"):
                if self.several or any((whole(n.nproc) or 1) > 1 for n in self.nodes):
                    self.say("fail", at, f"{line}: every process takes the same number", fix)
            elif self.ranks and whole(value) != self.ranks:
                self.say("fail", at, f"{line}, while the lines start {self.ranks} ranks", fix)

    def _address(self, at: ast.AST, host: str, line: str, fix: str) -> None:
        if not self.several:
            return
        hosts = {n.host for n in self.nodes if known(n.host) and not loopback(n.host)}
        if loopback(host):
            self.say("fail", at, f"{line}, on several nodes: each node meets itself there", fix)
        elif hosts and host not in hosts:
            # a name and an address may be one machine
            sure = len({numeric(h) for h in (host, *hosts)}) == 1
            other = shown(sorted(hosts)[0])
            self.say("fail" if sure else "warn", at, f"{line}, while the lines say {other}", fix)

    def _init(self) -> None:
        for call in self.calls:
            if not dotted(call.func).endswith("init_process_group"):
                continue
            given = {k.arg: k.value for k in call.keywords}
            for name, value in zip(("backend", "init_method"), call.args):
                given.setdefault(name, value)
            if self._guarded(call):
                continue
            url = self._value(given.get("init_method"))
            if isinstance(url, str) and url.startswith("tcp://"):
                host = url.removeprefix("tcp://").rpartition(":")[0].strip("[]")
                before = len(self.found)
                self._address(call, host, f"init_method=\"{shown(url)}\"",
                              "leave init_method out: the launcher gives the address")  # fmt: skip
                if len(self.found) == before and self.several:
                    self.say("warn", call, f"init_method=\"{shown(url)}\": an address in the "
                             "script, which the launch lines do not change",
                             "leave init_method out: the launcher gives the address")  # fmt: skip
            elif isinstance(url, str) and url.startswith("file:") and self.several:
                self.say("warn", call, f"init_method=\"{shown(url)}\": the nodes meet only if that "
                         "file is on shared storage", "leave init_method out")  # fmt: skip
            rank, size = self._value(given.get("rank")), self._value(given.get("world_size"))
            many = self.several or any((whole(n.nproc) or 1) > 1 for n in self.nodes)
            if isinstance(rank, int) and rank >= 0 and many:
                self.say("fail", call, f"rank={rank} in init_process_group: every process takes "
                         "that number", "leave rank and world_size out")  # fmt: skip
            if isinstance(size, int) and size >= 0 and self.ranks and size != self.ranks:
                self.say("fail", call, f"world_size={size} in init_process_group, while the lines "
                         f"start {self.ranks} ranks", "leave rank and world_size out")  # fmt: skip

    def _local_rank(self) -> None:
        kinds = {n.launcher for n in self.nodes}
        if "LOCAL_RANK" in self.text:
            return
        for call in self._options():
            names = {a.value for a in call.args if isinstance(a, ast.Constant)}
            local = names & {"--local_rank", "--local-rank"}
            if not local or not re.search(r"\.local_rank\b", self.text):
                continue
            if any(w.partition("=")[0] in names for n in self.nodes for w in n.args):
                continue
            old = [n for n in self.nodes if n.launcher == "launch" and not n.options.get("use_env")]
            if kinds & (TORCHRUN_LIKE - {"launch"}) or (kinds == {"launch"} and not old):
                self.say("fail", call, f"{sorted(local)[0]} is not given by torchrun: every "
                         "process keeps its default",
                         "local_rank = int(os.environ[\"LOCAL_RANK\"])")  # fmt: skip
            elif old and "--local-rank" not in names:
                # torch 2.13, run.py: cmd_args.append("--local-rank=…")
                self.say("fail", call, "torch.distributed.launch gives --local-rank since torch "
                         "2.0, which this parser does not know",
                         "add_argument(\"--local-rank\", \"--local_rank\", type=int)")  # fmt: skip

    def _device(self) -> None:
        """torch.cuda.set_device(rank) and the like with the global rank: fails from node 1 on."""
        if not self.several:
            return
        names = global_ranks(self.tree)
        for n in ast.walk(self.tree):
            used = None
            if isinstance(n, ast.Call):
                called = dotted(n.func)
                if called.endswith("cuda.set_device") and n.args:
                    used = n.args[0]
                elif called.endswith("torch.device") and len(n.args) == 2:
                    used = n.args[1]
                elif called.endswith("DistributedDataParallel") or called.split(".")[-1] == "DDP":
                    used = next(
                        (
                            k.value.elts[0]
                            for k in n.keywords
                            if k.arg == "device_ids"
                            and isinstance(k.value, ast.List)
                            and k.value.elts
                        ),
                        None,
                    )
            elif isinstance(n, ast.JoinedStr) and len(n.values) == 2:
                if isinstance(n.values[0], ast.Constant) and n.values[0].value == "cuda:":
                    used = n.values[1].value
            if used is not None and (is_rank(used) or isinstance(used, ast.Name)
                                     and used.id in names):  # fmt: skip
                self.say("fail", n, f"the device is chosen by the global rank ({ast.unparse(used)}"
                         "): on the second node it is above the devices there",
                         "torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))")  # fmt: skip
                return

    # ---- is it distributed at all; is the order another each epoch

    def _no_init(self) -> None:
        if any(dotted(c.func).split(".")[-1] in ("init_process_group", "init_device_mesh")
               for c in self.calls):  # fmt: skip
            return
        if "init_process_group" in self.text or "__import__" in self.text:
            return
        trains = any(isinstance(c.func, ast.Attribute) and c.func.attr == "backward"
                     for c in self.calls)  # fmt: skip
        if not trains or self.imports & STARTS_ITSELF or "torch" not in self.imports:
            return
        if self.imports - PLAIN - set(sys.stdlib_module_names):
            return  # a module of its own may do it
        many = self.several or any((whole(n.nproc) or 1) > 1 for n in self.nodes)
        if many:
            first = next(c for c in self.calls if isinstance(c.func, ast.Attribute)
                         and c.func.attr == "backward")  # fmt: skip
            self.say("fail", first, "it trains and never calls init_process_group: every process "
                     "trains a model of its own", "dist.init_process_group(\"nccl\") and "
                     "DistributedDataParallel(model)")  # fmt: skip

    def _sampler(self) -> None:
        if "set_epoch" in self.text or self.imports & {"accelerate", "lightning",
                                                       "pytorch_lightning"}:  # fmt: skip
            return
        for call in self.calls:
            if dotted(call.func).split(".")[-1] != "DistributedSampler":
                continue
            shuffle = next((k.value for k in call.keywords if k.arg == "shuffle"), None)
            if isinstance(shuffle, ast.Constant) and not shuffle.value:
                continue
            if self._epochs():
                self.say(
                    "warn",
                    call,
                    "DistributedSampler and no set_epoch: every epoch has the same order",
                    "sampler.set_epoch(epoch) at the begin of each epoch",
                )
                return

    def _epochs(self) -> bool:
        """Whether there is a loop over epochs."""
        for n in ast.walk(self.tree):
            if isinstance(n, ast.For):
                if "epoch" in (ast.unparse(n.target) + ast.unparse(n.iter)).lower():
                    return True
                inner = [m for m in ast.walk(n) if isinstance(m, ast.For) and m is not n]
                if any(re.search(r"loader|\bdl\b|batches", ast.unparse(m.iter)) for m in inner):
                    return True
        return False
