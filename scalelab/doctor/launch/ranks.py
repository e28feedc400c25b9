"""Which names of a script hold the global rank."""

from __future__ import annotations

import ast


def global_ranks(tree: ast.Module) -> set[str]:
    """Names that hold the global rank wherever they are set."""
    values: dict[str, list] = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.Assign):
            for target in n.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(n.value)
                elif isinstance(target, ast.Tuple):
                    parts = n.value.elts if isinstance(n.value, ast.Tuple) else []
                    for i, name in enumerate(target.elts):
                        if isinstance(name, ast.Name):
                            held = parts[i] if len(parts) == len(target.elts) else None
                            values.setdefault(name.id, []).append(held)
        elif isinstance(n, ast.arg):
            values.setdefault(n.arg, []).append(None)
        elif isinstance(n, (ast.For, ast.AugAssign, ast.NamedExpr)):
            for name in ast.walk(n.target):
                if isinstance(name, ast.Name):
                    values.setdefault(name.id, []).append(None)
    return {k for k, v in values.items() if all(x is not None and is_rank(x) for x in v)}


def dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "?", *reversed(parts)])


def is_rank(node: ast.AST | None) -> bool:
    """Whether an expression is the global rank itself."""
    if isinstance(node, ast.Call):
        called = dotted(node.func)
        if called == "int" and len(node.args) == 1:
            return is_rank(node.args[0])
        if called.split(".")[-1] == "get_rank":
            return not node.args and not node.keywords
        if called.endswith(("environ.get", "getenv")) and node.args:
            return isinstance(node.args[0], ast.Constant) and node.args[0].value == "RANK"
    if isinstance(node, ast.Subscript) and dotted(node.value).endswith("environ"):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "RANK"
    return False
