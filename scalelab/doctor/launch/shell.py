"""Shell text as a person pastes it -> the commands in it, with node, variables and words.

Nothing is executed and nothing is guessed: a variable or a substitution whose value the text does
not give stays in its word behind the mark UNKNOWN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

UNKNOWN = "\0"  # before a part of a word that only the shell of that node would know
SPLIT = "\1"  # between the words that one unquoted variable becomes
NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGN = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.S)
PLACEHOLDER = re.compile(r"<[^\s<>|;&=][^<>|;&=\n]{0,40}>")
STARTER = re.compile(
    r"(?:export\s|declare\s|unset\s|[A-Za-z_]\w*=|(?:\S*/)?(?:torchrun|python[\d.]*|accelerate|"
    r"deepspeed|llamafactory-cli|lmf|swift|megatron|srun|mpirun|mpiexec|ssh|pdsh|clush|bash|sh|zsh|"
    r"sudo|nohup|env|docker|podman|kubectl|numactl|exec|time|timeout|uv|conda|poetry|tmux|screen|"
    r"singularity|apptainer|for|do|if|then|else|cd|source|set)(?:\.exe)?(?=[\s;]|$))"
)
LAUNCHES = re.compile(r"torchrun|torch\.distributed|accelerate|deepspeed|llamafactory|\bswift\b|"
                      r"\bmegatron\b|python|\blmf\b|\.sh\b")  # fmt: skip
AT_PROMPT = re.compile(
    r"\s*(?:\([\w.\- ]{1,40}\)\s*)*\[?[\w.-]{1,40}@([\w.-]{1,60})[^\]$#%>\n]{0,80}\]?\s*[$#%>]\s+"
)
NODE_PROMPT = re.compile(r"\s*([A-Za-z][\w.-]{0,40})\s*[$%>#]\s+")
BARE_PROMPT = re.compile(r"\s*(?:PS [^>\n]{1,80}>\s*|[A-Z]:\\[^>\n]{0,80}>\s*|(?:[$%>❯➜]\s+)+)")
ARRAY = re.compile(r"(\s*(?:export\s+|declare -a\s+|local\s+)?[A-Za-z_]\w*)=\((.*)\)\s*$", re.S)
BULLET = re.compile(r"\s*(?:[-*•+]\s+|\d{1,2}[.)]\s+)")
LABEL = re.compile(
    r"\s*(?:\*\*|__|\[|`)?([^`\n:：=$\"']{1,60}?)(?:\*\*|__|\]|`)?\s*[:：](?:\*\*|__)?\s*`?(?=\S)"
)
NO_LABEL = re.compile(
    r"(?:run|cmd|command|usage|example|launch|then|script|命令|运行|执行)s?$", re.I
)
IN_TICKS = re.compile(r"`([^`\n]{8,})`")
_WHICH = r"(?:\d+|[A-D]\b|one\b|two\b|three\b|zero\b)"
HEADING = re.compile(
    rf"\b(?:node|host|machine|server|worker|box|vm|pod|terminal|instance|rank|gpu)s?[ _#-]{{0,2}}"
    rf"{_WHICH}|\b(?:first|second|third|fourth|other|main|master|head|slave|worker|1st|2nd|3rd)"
    r" (?:node|machine|server|host|box|one)\b|^(?:master|worker|slave|head|leader)(?:[ _-]?\d+)?$|"
    r"主节点|从节点|副节点|工作节点|主机\s*\d|(?:节点|机器|服务器)\s*[\d一二三四AB]|"
    r"第[一二三四五\d]+(?:台|个)|\bnode\d|\bon [\w.-]*\d\b|[一二三四]号(?:机|节点)", re.I,
)  # fmt: skip
NOT_HEADING = re.compile(r"number of|how many|addr|\bport\b|\bip\b|数量|地址|端口|=", re.I)
EVERYWHERE = re.compile(r"\b(?:all|each|every|both)\b.{0,20}(?:node|machine|host|server)|所有|每台|"
                        r"每个|两台|各节点|全部", re.I)  # fmt: skip
ODD = {"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "′": "'", "＝": "=", "\u00a0": " ",
       "\u3000": " ", "\u2009": " ", "\u202f": " "}  # fmt: skip
DASHES = "‐‑‒–—―−－"
INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u202a-\u202e]")
DEEPEST = 4  # commands within commands: ssh 'bash -c "…"'
MOST_JOINED = 200  # lines of one command


@dataclass
class Command:
    """One simple command of the text, before it is known what it starts."""

    line: int  # from 1
    node: str  # what the text calls the machine, "" if it does not
    words: list[str]
    env: dict[str, str]  # what the command is given
    unexported: dict[str, str]  # set in the shell and not passed on
    inline: frozenset[str] = frozenset()  # set before the command, on its line
    everywhere: bool = False  # this one text runs on every node
    each_shell: bool = False  # … and variables are expanded on each of them
    sourced: bool = False  # another file may have set variables
    slurm: dict[str, int] = field(default_factory=dict)  # nodes, tasks a node
    notes: list[tuple[str, str, str, str]] = field(default_factory=list)


@dataclass
class Logical:
    """Lines that the shell joins to one."""

    line: int
    text: str
    notes: list[tuple[str, str, str, str]] = field(default_factory=list)


def known(word: str | None) -> bool:
    return word is not None and UNKNOWN not in word


def shown(word: str) -> str:
    """For one line of a terminal."""
    word = "".join(c if c.isprintable() else "?" for c in word.replace(UNKNOWN, ""))
    return word if len(word) <= 80 else word[:79] + "…"


def lex(text: str, lookup: Callable[[str], str | None]) -> tuple[list[list[str]], str, bool]:
    """(simple commands, each its words; the comment at the end; whether a quote stays open)."""
    commands: list[list[str]] = [[]]
    word: str | None = None
    i, n, skip, comment, quote_open = 0, len(text), False, "", False

    def end_word() -> None:
        nonlocal word, skip
        if word is not None:
            if not skip:
                commands[-1] += [w for w in word.split(SPLIT) if w] if SPLIT in word else [word]
            skip = False
            word = None

    while i < n:
        c = text[i]
        if c in " \t\n\r":
            end_word()
            if c == "\n":
                commands.append([])
            i += 1
        elif c == "'":
            end = text.find("'", i + 1)
            quote_open |= end < 0
            end = n if end < 0 else end
            word = (word or "") + text[i + 1 : end]
            i = end + 1
        elif c == '"':
            i += 1
            word = word or ""
            while i < n and text[i] != '"':
                if text[i] == "\\" and i + 1 < n and text[i + 1] in '"\\$`\n':
                    word += "" if text[i + 1] == "\n" else text[i + 1]
                    i += 2
                elif text[i] in "$`":
                    part, i = _expand(text, i, lookup)
                    word += part
                else:
                    word += text[i]
                    i += 1
            quote_open |= i >= n
            i += 1
        elif c == "\\":
            if i + 1 < n and text[i + 1] != "\n":
                word = (word or "") + text[i + 1]
            i += 2
        elif c in "$`":
            part, i = _expand(text, i, lookup)
            if UNKNOWN not in part and not ASSIGN.match(word or ""):
                part = re.sub(r"\s+", SPLIT, part)
            word = (word or "") + part
        elif c == "#" and word is None:
            end = text.find("\n", i)
            end = n if end < 0 else end
            comment = text[i:end]
            i = end
        elif c == "<" and (match := PLACEHOLDER.match(text, i)):
            word = (word or "") + UNKNOWN + match[0]
            i = match.end()
        elif c in "<>":
            if word is not None and word.isdigit():
                word = None  # 2>
            end_word()
            match = re.compile(r"[<>]+[&|]?(?:\d+(?=\s|$)|-)?").match(text, i)
            i = match.end()
            skip = not match[0][-1].isdigit() and match[0][-1] != "-"
        elif c in ";|&()":
            end_word()
            skip = False
            commands.append([])
            i += 1
        else:
            word = (word or "") + c
            i += 1
    end_word()
    return [c for c in commands if c], comment, quote_open


def _expand(text: str, i: int, lookup: Callable[[str], str | None]) -> tuple[str, int]:
    """What `$…` or a backtick at i becomes, and where it ends."""
    if text[i] == "`":
        end = text.find("`", i + 1)
        end = len(text) if end < 0 else end + 1
        return UNKNOWN + text[i:end], end
    if text[i + 1 : i + 2] in ("(", "{") and text[i + 1 : i + 2]:
        opened, closed = text[i + 1], {"(": ")", "{": "}"}[text[i + 1]]
        depth, end = 0, i + 1
        while end < len(text):
            depth += (text[end] == opened) - (text[end] == closed)
            end += 1
            if not depth:
                break
        inside = text[i + 2 : end - 1]
        if opened == "{":
            name = NAME.match(inside)
            value = lookup(name[0]) if name else None
            rest = inside[name.end() :] if name else "?"
            if value is not None and rest in ("[@]", "[*]"):
                return re.sub(r"\s+", SPLIT, value), end
            if value is not None and rest[:2] in ("", ":-", ":="):
                return value, end
        return UNKNOWN + text[i:end], end
    name = NAME.match(text, i + 1)
    if name:
        value = lookup(name[0])
        return (UNKNOWN + "$" + name[0] if value is None else value), name.end()
    if i + 1 < len(text) and text[i + 1] in "$?!#@*0123456789":
        return UNKNOWN + text[i : i + 2], i + 2
    return "$", i + 1


def plain(text: str) -> tuple[str, list[str]]:
    """The text with the characters that were meant, and those that a chat program put there.
    Within the shell's own quotes such a character may be meant, so there it is left alone."""
    odd: list[str] = []
    if INVISIBLE.search(text):
        odd += sorted({f"U+{ord(c):04X}" for c in INVISIBLE.findall(text)})
        text = INVISIBLE.sub("", text)
    out, quote, i = [], "", 0
    while i < len(text):
        c = text[i]
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c if text.find(c, i + 1) >= 0 else ""
        elif c in ODD:
            odd.append(c)
            c = ODD[c]
        elif c in DASHES and (i == 0 or out[-1][-1:] in " \t\"'") or (
            c in DASHES and out and out[-1] in ("-", "--")
        ):  # fmt: skip
            run = re.compile(f"[-{DASHES}]+").match(text, i)
            rest = text[run.end() : run.end() + 2]
            if rest[:1].isalpha():
                odd.append(c)
                before = out[-1] if out and out[-1] == "-" else ""
                c = "-" if before or not rest[1:].strip(" =") else "--"
                i = run.end() - 1
        out.append(c)
        i += 1
    return "".join(out), odd


def logical_lines(text: str) -> Iterator[Logical]:
    """Lines joined as the shell joins them, and as the person meant where that fails."""
    lines = re.split(r"\r\n|\n|\r", re.sub("[\0\1]", " ", text))
    i = 0
    while i < len(lines):
        first, line, notes = i, lines[i], []
        i += 1
        comment = line.lstrip().startswith("#")
        while not comment and i < len(lines) and i - first < MOST_JOINED:
            following = lines[i]
            tail = re.search(r"(\\+)([ \t\u00a0]*)$", line)
            if tail and len(tail[1]) % 2 and following.lstrip().startswith("#"):
                notes.append(("line", "fail", f"line {i + 1} is a comment within a command: the "
                              "command ends there", f"delete line {i + 1}"))  # fmt: skip
            elif tail and len(tail[1]) % 2:
                if tail[2]:
                    notes.append(("line", "fail", f"line {i} ends in a blank after its backslash: "
                                  "the shell ends the command there",
                                  "delete the blanks after the backslash"))  # fmt: skip
                line = line[: tail.start()] + " " + following
            elif LAUNCHES.search(line) and re.match(rf"\s*(?:--|[{DASHES}])[a-z]", following):
                if not tail:
                    notes.append(("line", "fail", f"line {i + 1} begins with an option, and line "
                                  f"{i} does not end in a backslash: the shell takes it for "
                                  "another command", f"end line {i} in a backslash"))  # fmt: skip
                line = (line[: tail.start()] if tail else line) + " " + following
            elif re.match(r"\s*(?:export\s+|declare -a\s+)?\w+=\([^)]*$", line):
                line += "\n" + following.partition(" #")[0]
            elif ("'" in line or '"' in line) and _open(line, lines[i : i + 60]):
                line += "\n" + following
            else:
                break
            i += 1
        yield Logical(first + 1, line, notes)


def _open(line: str, rest: list[str]) -> bool:
    """Whether a command's quote is closed only on a later line."""
    start = BARE_PROMPT.sub("", line, count=1).lstrip()
    if not STARTER.match(start) and not AT_PROMPT.match(line) and not LABEL.match(line):
        return False
    if not lex(line, lambda name: None)[2]:
        return False
    whole = line
    for more in rest:
        whole += "\n" + more
        if ("'" in more or '"' in more) and not lex(whole, lambda name: None)[2]:
            return ASSIGN.match(start) is not None or LAUNCHES.search(whole) is not None
    return False
