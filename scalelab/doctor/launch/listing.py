"""Directory listings in a script whose order matters and is not put right."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FUNCTIONS = {"os.listdir", "os.scandir", "os.walk", "glob.glob", "glob.iglob"}
METHODS = {"iterdir", "rglob", "glob"}  # of a Path
# What takes a listing and gives the same in any order
ORDERLESS = {"sorted", "len", "set", "frozenset", "any", "all", "sum", "max", "min", "Counter",
             "bool", "natsorted", "humansorted"}  # fmt: skip


def unsorted_listings(tree: ast.Module, parents: dict) -> Iterator[tuple[ast.Call, str]]:
    """(call, its text) where what is made of a listing depends on its order."""
    names = _imported(tree)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = _name(call, names)
        if name and not _harmless(call, tree, parents, 0) and not _on_one_rank(call, parents):
            text = ast.unparse(call)
            yield call, text if len(text) <= 60 else f"{name}(…)"


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name -> "os.listdir" and the like."""
    names = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module in ("os", "glob"):
            for alias in n.names:
                names[alias.asname or alias.name] = f"{n.module}.{alias.name}"
        elif isinstance(n, ast.Import):
            for alias in n.names:
                if alias.name in ("os", "glob"):
                    names[alias.asname or alias.name] = alias.name
    return names


def _name(call: ast.Call, names: dict[str, str]) -> str:
    f = call.func
    if isinstance(f, ast.Name) and names.get(f.id) in FUNCTIONS:
        return f.id
    if isinstance(f, ast.Attribute):
        if isinstance(f.value, ast.Name) and f.value.id in names:
            whole = f"{names[f.value.id]}.{f.attr}"
            return whole if whole in FUNCTIONS else ""
        if f.attr in METHODS and not (isinstance(f.value, ast.Name) and f.value.id == "glob"):
            return f".{f.attr}"
    return ""


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        f = node.func
        return f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")
    return ""


def _on_one_rank(node: ast.AST, parents: dict) -> bool:
    while node in parents:
        child, node = node, parents[node]
        if isinstance(node, ast.If) and child in node.body and "rank" in ast.unparse(node.test):
            return True
    return False


def _function(node: ast.AST, parents: dict):
    while node in parents:
        node = parents[node]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return node
    return None


def _harmless(node: ast.AST, tree: ast.Module, parents: dict, depth: int) -> bool:
    """Whether this value's order has no effect on what the script does."""
    if depth > 6:
        return True
    above = parents.get(node)
    while above is not None:
        if isinstance(above, ast.Call):
            if _called(above) in ORDERLESS:
                return True
            if _called(above) in ("append", "extend", "list", "tuple", "filter", "map", "enumerate",
                                  "zip", "iter", "reversed", "chain", "tqdm", "array"):  # fmt: skip
                if _called(above) in ("append", "extend"):
                    held = above.func.value
                    return isinstance(held, ast.Name) and _name_harmless(
                        held.id, above, tree, parents, depth
                    )
                node, above = above, parents.get(above)
                continue
            return node not in above.args or _called(above) in ("remove", "rmtree", "print")
        if isinstance(above, ast.Compare) and any(
            isinstance(o, (ast.In, ast.NotIn, ast.Eq)) for o in above.ops
        ):
            return True
        if isinstance(above, (ast.If, ast.While, ast.IfExp)) and above.test is node:
            return True
        if isinstance(above, (ast.BoolOp, ast.SetComp, ast.DictComp, ast.Expr, ast.Assert)):
            return True
        if isinstance(above, ast.Subscript) and above.value is node:
            return False
        if isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not):
            return True
        if isinstance(above, ast.For) and above.iter is node:
            return _loop_harmless(above, tree, parents, depth)
        if isinstance(above, (ast.Assign, ast.AnnAssign)):
            targets = above.targets if isinstance(above, ast.Assign) else [above.target]
            if all(_attribute_sorted(t, tree) for t in targets):
                return True
            return all(isinstance(t, ast.Name) and _name_harmless(t.id, above, tree, parents, depth)
                       for t in targets)  # fmt: skip
        if isinstance(above, (ast.Return, ast.Yield, ast.YieldFrom)):
            function = _function(above, parents)
            if function is None:
                return True
            calls = [c for c in ast.walk(tree) if _called(c) == function.name]
            return bool(calls) and all(_harmless(c, tree, parents, depth + 1) for c in calls)
        if isinstance(above, ast.stmt):
            return True
        node, above = above, parents.get(above)
    return True


def _name_harmless(name: str, at: ast.AST, tree: ast.Module, parents: dict, depth: int) -> bool:
    """Whether what a name holds is sorted, or used only where its order is of no effect."""
    scope = _function(at, parents) or tree
    uses = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name
            and isinstance(n.ctx, ast.Load)]  # fmt: skip
    for use in uses:
        above = parents.get(use)
        if isinstance(above, ast.Attribute) and above.attr == "sort":
            return True
        if isinstance(above, ast.Call) and _called(above) in ("sorted", "natsorted"):
            return True
    return all(_use_harmless(u, tree, parents, depth) for u in uses)


def _attribute_sorted(target: ast.AST, tree: ast.Module) -> bool:
    """Whether self.files and the like is sorted somewhere."""
    if not isinstance(target, ast.Attribute):
        return False
    text = ast.unparse(target)
    sorts = [ast.unparse(c) for c in ast.walk(tree) if _called(c) in ("sort", "sorted")]
    return any(text in s for s in sorts)


def _use_harmless(use: ast.Name, tree: ast.Module, parents: dict, depth: int) -> bool:
    above = parents.get(use)
    if isinstance(above, ast.Attribute):  # names.append(…): not a use of the order
        return above.attr in ("append", "extend", "add", "remove", "clear", "close", "shuffle")
    if isinstance(above, ast.Subscript):
        return False
    if isinstance(above, ast.Call) and use in above.args and _called(above) not in ORDERLESS:
        return _called(above) in ("print", "remove") or _harmless(use, tree, parents, depth + 1)
    return _harmless(use, tree, parents, depth + 1)


def _loop_harmless(loop: ast.For, tree: ast.Module, parents: dict, depth: int) -> bool:
    """A loop keeps the order if it collects: appends, yields, counts up in a dict."""
    held: set[str] = set()
    for n in ast.walk(loop):
        if isinstance(n, (ast.Yield, ast.YieldFrom)):
            return False
        if isinstance(n, ast.Call) and _called(n) == "sort":
            return True  # of os.walk's directories and files
        if _called(n) in ("append", "extend") and isinstance(n.func, ast.Attribute):
            if isinstance(n.func.value, ast.Name):
                held.add(n.func.value.id)
            elif isinstance(n.func.value, ast.Attribute):
                if not _attribute_sorted(n.func.value, tree):
                    return False
        if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name) and not isinstance(
            n.value, ast.Constant
        ) and isinstance(n.value, (ast.List, ast.ListComp)):  # fmt: skip
            held.add(n.target.id)
    return all(_name_harmless(name, loop, tree, parents, depth + 1) for name in held)
