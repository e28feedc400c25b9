"""A script as a tree, with what the lines that start it say of its options."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from .facts import Finding, Node, whole
from .ranks import dotted
from .shell import known, shown


class Parsed:
    def __init__(self, path: Path, tree: ast.Module, text: str, nodes: list[Node]):
        self.name, self.tree, self.text, self.nodes = shown(path.name), tree, text, nodes
        self.parents = {c: p for p in ast.walk(tree) for c in ast.iter_child_nodes(p)}
        self.calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        self.several = len(nodes) > 1 or any(
            (n.most or 1) > 1 or n.command.everywhere for n in nodes
        )
        self.imports = set()
        for n in ast.walk(tree):
            if isinstance(n, ast.Import):
                self.imports |= {a.name.split(".")[0] for a in n.names}
            elif isinstance(n, ast.ImportFrom):
                self.imports.add("" if n.level else (n.module or "").split(".")[0])
        self.found: list[Finding] = []

    def _switched_off(self, at: ast.AST) -> bool:
        """Whether it is done only with an option that the lines do not give."""
        if self._behind_option(at):
            return True
        while at in self.parents and not isinstance(at, ast.FunctionDef):
            at = self.parents[at]
        calls = [c for c in self.calls if dotted(c.func) == getattr(at, "name", None)]
        return bool(calls) and all(self._behind_option(c) for c in calls)

    def _behind_option(self, node: ast.AST) -> bool:
        while node in self.parents:
            child, node = node, self.parents[node]
            if (
                isinstance(node, ast.If)
                and child in node.body
                and isinstance(node.test, ast.Attribute)
            ):
                if node.test.attr in self._not_given:
                    return True
        return False

    @functools.cached_property
    def _not_given(self) -> set[str]:
        """Options of the script without a default that no line gives."""
        given = {w.partition("=")[0].lstrip("-") for n in self.nodes for w in n.args}
        given = {g.replace("-", "_") for g in given}
        if any(not known(w) for n in self.nodes for w in n.args):
            return set()
        out = set()
        for call in self._options():
            names = [str(a.value) for a in call.args if isinstance(a, ast.Constant)]
            keywords = {k.arg: k.value for k in call.keywords}
            default, action = keywords.get("default"), keywords.get("action")
            off = default is None or isinstance(default, ast.Constant) and not default.value
            switch = not isinstance(action, ast.Constant) or action.value == "store_true"
            if names and names[0].startswith("-") and off and switch:
                dests = {n.lstrip("-").replace("-", "_") for n in names}
                if not dests & given:
                    out |= dests
        return out

    @property
    def ranks(self) -> int | None:
        """World size, if the lines say it."""
        node = self.nodes[0]
        if node.launcher == "python":
            return node.most
        each = [whole(n.nproc) for n in self.nodes]
        if node.most and len(set(each)) == 1 and each[0] and node.least == node.most:
            return node.most * each[0]
        return None

    def _guarded(self, node: ast.AST) -> bool:
        """Whether it is done only where something about the environment is so."""
        while node in self.parents:
            child, node = node, self.parents[node]
            if isinstance(node, (ast.If, ast.IfExp)) and child is not node.test:
                if re.search(r"environ|getenv|rank|world|nnodes|distributed|slurm|debug|launcher",
                             ast.unparse(node.test), re.I):  # fmt: skip
                    return True
            if isinstance(node, ast.Try) and child in [h for h in node.handlers]:
                return True
        return False

    def _value(self, node: ast.AST | None):
        """A constant, or the default of an option that the lines do not give."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            return None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for call in self._options():
                names = [a.value for a in call.args if isinstance(a, ast.Constant)]
                dests = [str(n).lstrip("-").replace("-", "_") for n in names]
                if node.attr not in dests:
                    continue
                if any(w.partition("=")[0] in names for n in self.nodes for w in n.args):
                    return None
                for keyword in call.keywords:
                    if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                        return keyword.value.value
        return None

    def _options(self) -> list[ast.Call]:
        return [c for c in self.calls if dotted(c.func).endswith("add_argument")]
