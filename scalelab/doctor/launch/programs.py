"""Which programs start a job, and which only start those."""

from __future__ import annotations

import re

PYTHON = re.compile(r"python[\d.]*$")
MODULES = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "launch",
    "accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed",
    "llamafactory.cli": "llamafactory", "swift.cli.main": "swift",
}  # fmt: skip
# Programs whose own words come before the command that they start.
BEFORE = {
    "sudo", "nohup", "time", "exec", "stdbuf", "nice", "ionice", "numactl", "taskset", "timeout",
    "env", "command", "setsid", "nsys", "ncu", "uv", "poetry", "pipenv", "conda", "micromamba",
    "pixi", "apptainer", "singularity", "docker", "podman", "nerdctl", "kubectl", "proxychains4",
    "srun", "mpirun", "mpiexec", "pdsh", "clush", "parallel-ssh", "pssh", "tmux", "screen", "do",
    "then", "else", "{", "!", "strace", "eval", "if",
}  # fmt: skip
ALL_NODES = {"srun", "mpirun", "mpiexec", "pdsh", "clush", "parallel-ssh", "pssh"}
SHELLS = {"bash", "sh", "zsh", "dash"}
SSH_TAKES = set("bceiIJlmoOpQRSwWDEFL")
SWIFT = {"sft", "pt", "rlhf", "dpo", "orpo", "simpo", "kto"}
# What makes `python train.py` a launch line: somebody has told it of other processes.
TOLD = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES"}
TOLD_BY = re.compile(r"--(?:rank|world[-_]size|dist[-_]url|node[-_]rank|num[-_]nodes|nnodes|"
                     r"init[-_]method|master[-_]addr)(?:=|$)")  # fmt: skip


def base(word: str) -> str:
    return re.split(r"[/\\]", word)[-1].removesuffix(".exe")


def launcher(words: list[str]) -> tuple[str, list[str]] | None:
    """(what starts the job, its arguments) if these words are a launch command."""
    if not words:
        return None
    first, rest = base(words[0]), words[1:]
    if first == "torchrun":
        return "torchrun", rest
    if first == "accelerate" and rest[:1] == ["launch"]:
        return "accelerate", rest[1:]
    if first == "accelerate-launch":
        return "accelerate", rest
    if first == "deepspeed":
        return "deepspeed", rest
    if first in ("llamafactory-cli", "lmf") and rest[:1] == ["train"]:
        return "llamafactory", rest[1:]
    if first in ("swift", "megatron") and rest[:1] and rest[0] in SWIFT:
        return "swift", rest[1:]
    if PYTHON.match(first):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            if rest[1] in MODULES:
                rest = rest[1:]
                if rest[0].startswith(("accelerate", "llamafactory", "swift")):
                    return MODULES[rest[0]], rest[2:] if "launch" not in rest[0] else rest[1:]
                return MODULES[rest[0]], rest[1:]
            return "python", rest
        if rest and base(rest[0]) in ("torchrun", "accelerate", "deepspeed"):
            return launcher(rest)
        return ("python", rest) if rest else None
    if first in SHELLS and len(rest) and not rest[0].startswith("-"):
        return "shell script", rest
    return None


def own_words(words: list[str]) -> list[str]:
    """The options of srun itself: what comes before the command that it starts."""
    for i, word in enumerate(words):
        if launcher(words[i:]) or base(word) in SHELLS:
            return words[:i]
    return words


def pieces(text: str) -> list[str]:
    """The text cut after each `;`, `&&` or newline that is outside quotes and substitutions."""
    pieces, start, quote, depth, i = [], 0, "", 0, 0
    while i < len(text):
        c = text[i]
        if quote:
            if c == "\\" and quote == '"':
                i += 1
            elif c == quote:
                quote = ""
        elif c in "'\"`":
            quote = c
        elif c == "\\":
            i += 1
        elif c in "({":
            depth += 1
        elif c in ")}":
            depth = max(0, depth - 1)
        elif not depth and (c in ";\n" or text.startswith("&&", i)):
            pieces.append(text[start:i])
            start = i + (2 if c == "&" else 1)
            i = start - 1
        i += 1
    pieces.append(text[start:])
    return [p for p in pieces if p.strip()]
