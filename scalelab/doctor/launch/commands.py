"""The commands of a pasted text: whose node each is, and which variables it is given."""

from __future__ import annotations

import re

from .programs import (
    ALL_NODES,
    BEFORE,
    SHELLS,
    SSH_TAKES,
    TOLD,
    TOLD_BY,
    base,
    launcher,
    own_words,
    pieces,
)
from .shell import (
    ARRAY,
    ASSIGN,
    AT_PROMPT,
    BARE_PROMPT,
    BULLET,
    DEEPEST,
    EVERYWHERE,
    HEADING,
    IN_TICKS,
    LABEL,
    LAUNCHES,
    NO_LABEL,
    NODE_PROMPT,
    NOT_HEADING,
    STARTER,
    UNKNOWN,
    Command,
    Logical,
    lex,
    logical_lines,
    plain,
)  # fmt: skip


class Reader:
    """Walks the text from top to bottom; what it finds is in `commands`."""

    def __init__(self):
        self.commands: list[Command] = []
        self.found_in_comment = 0  # line of a launch command that is commented out
        self.node = ""  # of the heading in force
        self.launched = False  # since that heading
        self.everywhere = False
        self.loop = 0
        self.sourced = False
        self.slurm: dict[str, int] = {}
        self.variables: dict[str, dict[str, str]] = {"": {}}
        self.exported: dict[str, set[str]] = {"": set()}

    def read(self, text: str) -> list[Command]:
        for logical in logical_lines(text):
            self._line(logical)
        return self.commands

    # ---- one line

    def _line(self, logical: Logical) -> None:
        text, odd = plain(logical.text)
        sbatch = re.match(r"\s*#SBATCH\s+(.*)", text)
        if sbatch:
            self._slurm(sbatch[1].split())
            return
        if re.match(r"\s*(?:```|~~~)", text):
            return
        array = ARRAY.match(text)
        if array:
            inside = re.sub(r"[\"'\n]", " ", array[2])
            text = f'{array[1]}="{inside}"'
        node, body = self._body(text)
        if body is None:
            self._heading(text, logical.line)
            return
        notes = list(logical.notes)
        if odd:
            characters = " ".join(dict.fromkeys(odd))
            notes.append(
                (
                    "character",
                    "fail",
                    f"{characters} on the line: a chat program's "
                    "characters, which no shell takes for a dash, quote or blank",
                    "type the line again with - ' \" and blanks of the keyboard",
                )
            )
        self._run(body, node or self.node, logical.line, notes, 0, False)

    def _body(self, text: str) -> tuple[str, str | None]:
        """(node named on the line, the command text or None for prose)."""
        node, text = "", text.strip()
        for _ in range(3):
            match = AT_PROMPT.match(text)
            if match:
                node, text = match[1], text[match.end() :]
                continue
            match = BARE_PROMPT.match(text) or BULLET.match(text)
            if match and (STARTER.match(text[match.end() :]) or LABEL.match(text[match.end() :])):
                text = text[match.end() :]
                continue
            match = NODE_PROMPT.match(text)
            if match and STARTER.match(text[match.end() :]):
                node, text = match[1], text[match.end() :]
                continue
            match = LABEL.match(text)
            after = text[match.end() :].lstrip("$# ") if match else ""
            if match and STARTER.match(after) and not STARTER.match(text):
                label = match[1].strip(" #/>*-")
                if not NO_LABEL.search(label):
                    node = self._short(label) or label[:40]
                text = after
                continue
            break
        text = text.strip()
        if text.startswith("`") and text.count("`") == 2 and text.endswith("`"):
            text = text.strip("`")
        elif text.endswith("`") and text.count("`") == 1:
            text = text[:-1]
        if text.startswith("#"):
            return node, None
        if STARTER.match(text):
            return node, text
        for quoted in IN_TICKS.findall(text):
            if STARTER.match(quoted) and LAUNCHES.search(quoted):
                match = HEADING.search(text)
                return node or (self._short(text) if match else ""), quoted
        return node, None

    @staticmethod
    def _short(text: str) -> str:
        match = re.search(r"\b(node|host|machine|server|worker|rank|vm|box|gpu|pod)s?[ _#-]{0,2}"
                          r"(\d+|[A-D]\b)", text, re.I)  # fmt: skip
        if match:
            return f"{match[1].lower()}{match[2]}"
        match = HEADING.search(text)
        return match[0][:40].removeprefix("on ") if match else ""

    def _heading(self, text: str, line: int) -> None:
        words = text.strip().strip("#/*=->: \t。：")
        if text.lstrip().startswith("#") and LAUNCHES.search(text):
            inside = lex(words, lambda name: None)[0]
            if any(launcher(w) and launcher(w)[0] != "python" for w in inside):
                self.found_in_comment = self.found_in_comment or line
                return
        if not words or len(words) > 100 or len(words.split()) > 14 or NOT_HEADING.search(words):
            return
        if EVERYWHERE.search(words):
            self.node, self.everywhere, self.launched = "", True, False
        elif HEADING.search(words):
            name = self._short(words) or words[:40]
            if self.launched or not self.node:
                fresh = f"\n{line}"  # a block of its own, whatever its name
                self.variables.setdefault(fresh, {})
                self.exported.setdefault(fresh, set())
                self.block = fresh
            self.node, self.everywhere, self.launched = name, False, False

    block = ""

    def _slurm(self, words: list[str]) -> None:
        text = " ".join(words)
        for name, pattern in (("nodes", r"(?:^|\s)(?:-N\s*|--nodes[= ])(\d{1,6})(?![\d-])"),
                              ("tasks", r"--ntasks-per-node[= ](\d{1,6})")):  # fmt: skip
            match = re.search(pattern, text)
            if match:
                self.slurm[name] = int(match[1])

    # ---- commands in it

    def _scope(self, node: str) -> str:
        return self.block if node == self.node else node

    def _lookup(self, scope: str, fresh: bool):
        inner = self.variables.setdefault(scope, {})

        def lookup(name: str) -> str | None:
            if name in inner:
                return inner[name]
            return None if fresh else self.variables[""].get(name)

        return lookup

    def _run(self, text, node, line, notes, depth, everywhere, env=None, each_shell=False) -> None:
        """The commands of `text`. env: variables that the shell around it passes on."""
        if depth > DEEPEST:
            return
        scope = self._scope(node) if env is None else f"\nsub {line} {depth} {len(self.variables)}"
        if env is not None:
            self.variables[scope] = dict(env)
            self.exported[scope] = set(env)
        lookup = self._lookup(scope, env is not None)
        # one command at a time: what the first sets, the second knows
        for piece in pieces(text):
            words, comment, unclosed = lex(piece, lookup)
            if unclosed and LAUNCHES.search(piece):
                notes = [*notes, ("quote", "fail", "a quote is opened and never closed: the shell "
                         "waits for the rest", "close the quote")]  # fmt: skip
            named = node
            if comment and not node and not depth and HEADING.search(comment):
                named = self._short(comment)
            for command in words:
                self._simple(command, named, scope, line, notes, depth, everywhere, each_shell)
        if env is not None:
            del self.variables[scope], self.exported[scope]

    def _simple(self, words, node, scope, line, notes, depth, everywhere, each_shell) -> None:
        variables = self.variables.setdefault(scope, {})
        exported = self.exported.setdefault(scope, set())
        inline: dict[str, str] = {}
        slurm = dict(self.slurm)
        if words[:1] and words[0] in ("for", "while"):
            self.loop += 1
        if words == ["done"]:
            self.loop = max(0, self.loop - 1)
        while words and words[0] in ("do", "then", "else", "{", "!", "if"):
            words = words[1:]
        if words and words[0] in ("export", "declare", "typeset", "set"):
            for word in words[1:]:
                match = ASSIGN.match(word)
                if match:
                    variables[match[1]] = match[2]
                    exported.add(match[1])
                elif words[0] == "export" and word in {**self.variables[""], **variables}:
                    exported.add(word)
            return
        if words[:1] == ["unset"]:
            for word in words[1:]:
                variables.pop(word, None)
            return
        if words[:1] in (["source"], ["."]):
            self.sourced = True
            return
        for _ in range(12):
            while words and (match := ASSIGN.match(words[0])):
                inline[match[1]] = match[2]
                words = words[1:]
            if not words:
                variables.update(inline)  # NAME=value on a line of its own: not exported
                return
            if launcher(words):
                break
            first = base(words[0])
            if first == "ssh":
                self._ssh(words[1:], line, notes, depth, everywhere)
                return
            if first in SHELLS and len(words) > 2 and re.match(r"-[a-z]*c$", words[1]):
                env = {**self._env(scope), **inline}
                self.slurm, before = slurm, self.slurm
                self._run(words[2], node, line, notes, depth + 1, everywhere, env,
                          each_shell or everywhere)  # fmt: skip
                self.slurm = before
                return
            if first not in BEFORE:
                return
            if first in ALL_NODES:
                everywhere = True
                self.slurm, kept = slurm, self.slurm
                self._slurm(own_words(words[1:]))
                slurm, self.slurm = dict(self.slurm), kept
            nested = None
            for j in range(1, len(words)):
                match = ASSIGN.match(words[j])
                if match and first in ("env", "docker", "podman", "sudo"):
                    inline[match[1]] = match[2]
                if launcher(words[j:]) and "=" not in words[j]:
                    nested = words[j:]
                    break
                if base(words[j]) in SHELLS | {"env", "ssh"} | ALL_NODES:
                    nested = words[j:]
                    break
            if nested is None:
                for word in words[1:]:
                    if " " in word and LAUNCHES.search(word):
                        self._run(word, node, line, notes, depth + 1, everywhere,
                                  {**self._env(scope), **inline}, everywhere)  # fmt: skip
                return
            words = nested
        else:
            return
        name = launcher(words)[0]
        env = {**self._env(scope), **inline}
        if name in ("python", "shell script") and not (
            TOLD & set(env) or any(TOLD_BY.match(w) for w in words)
        ):
            return
        if name == "shell script" and not TOLD & set(inline) and not TOLD & set(env):
            return
        visible = {**self.variables[""], **variables}
        self.launched = True
        self.commands.append(Command(
            line, node, words, env, {k: v for k, v in visible.items() if k not in env},
            frozenset(inline), everywhere or self.everywhere or self.loop > 0, each_shell,
            self.sourced, slurm, list(notes),
        ))  # fmt: skip

    def _env(self, scope: str) -> dict[str, str]:
        """What a command of that shell is given."""
        out = {}
        for part in ("", scope) if not scope.startswith("\nsub") else (scope,):
            held = self.variables.get(part, {})
            for name in self.exported.get(part, ()):
                value = held.get(name, self.variables[""].get(name))
                if value is not None:
                    out[name] = value
        return out

    def _ssh(self, words, line, notes, depth, everywhere) -> None:
        while words and words[0].startswith("-"):
            takes = len(words[0]) == 2 and words[0][1] in SSH_TAKES
            words = words[2 if takes else 1 :]
        if not words:
            return
        host = words[0].split("@")[-1]
        loop = UNKNOWN in host
        # ssh passes no variable on
        self._run(" ".join(words[1:]), "" if loop else host, line, notes, depth + 1,
                  everywhere or loop, {})  # fmt: skip
