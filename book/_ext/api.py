"""API entries: what `show_doc(name)` stands for in the book.

The signature is the documentation (nbdev's style): one argument per line, its type and a comment. Read from the source
itself, so that shapes stay as they were written: `Float[Tensor, "*b n_q d"]`.
"""
import ast
import io
import tokenize
from functools import cache
from inspect import cleandoc
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "attention_course"


@cache
def module(path):
    "The parsed module, and its comments by line."
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return ast.parse(source), {t.start[0]: t.string.lstrip("# ").rstrip() for t in tokens if t.type == tokenize.COMMENT}


def find(name):
    "The definition of `name` (`function`, `Class` or `Class.method`): file, node and comments."
    first, *rest = name.split(".")
    for path in sorted(PACKAGE.glob("[!_]*.py")):
        tree, comments = module(path)
        for node in tree.body:
            if named(node) == first:
                for part in rest:
                    node = next(n for n in node.body if named(n) == part)
                return path, node, comments
    raise LookupError(f"show_doc({name}): attention_course defines no such name; is it exported, and was `make lib` run?")


def named(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def written(node):
    "Source text of a type or default, with the double quotes of shapes."
    text = ast.unparse(node)
    return text.replace("'", '"') if '"' not in text else text


def arguments(function):
    "Pairs of argument (with its stars) and default, in order; `*` alone stands for itself."
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + a.defaults
    rows = [("", arg, default) for arg, default in zip(plain, defaults)]
    if a.vararg:
        rows.append(("*", a.vararg, None))
    elif a.kwonlyargs:
        rows.append(("*", None, None))
    rows += [("", arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg:
        rows.append(("**", a.kwarg, None))
    return [row for row in rows if row[1] is None or row[1].arg not in ("self", "cls")]


def signature(function):
    shown = []
    for star, arg, default in arguments(function):
        text = star + (arg.arg if arg else "")
        shown.append(text if default is None else f"{text}={written(default)}")
    return ", ".join(shown)


def comment(node, comments):
    "The comment on the line where a node ends, as Markdown in which `<` outside of code is a mere character."
    parts = comments.get(node.end_lineno, "").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def table(function, comments):
    rows = []
    for star, arg, default in arguments(function):
        if arg is None:
            continue
        kind = code(written(arg.annotation)) if arg.annotation else ""
        if default is not None:
            kind += f" = {code(written(default))}"
        rows.append((code(star + arg.arg), kind, comment(default or arg, comments)))
    if function.returns and not (isinstance(function.returns, ast.Constant) and function.returns.value is None):
        rows.append(("*returns*", code(written(function.returns)), comment(function.returns, comments)))
    return rendered("argument", rows)


def fields(node, comments):
    "A dataclass's fields, which are its arguments."
    rows = [(code(n.target.id), code(written(n.annotation)) + (f" = {code(written(n.value))}" if n.value else ""),
             comment(n, comments)) for n in node.body if isinstance(n, ast.AnnAssign)]
    return rendered("field", rows)


def code(text):
    return "`" + text.replace("|", "\\|") + "`"


def rendered(head, rows):
    if not rows:
        return ""
    lines = [f"| {head} | type and default | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| {a} | {b} | {c.replace('|', chr(92) + '|')} |" for a, b, c in rows])


def directive(kind, name, call, body, index, depth):
    option = (":module: attention_course\n" if kind != "method" else "") + ("" if index else ":no-index:\n")
    fence = "`" * depth
    return f"{fence}{{py:{kind}}} {name}{call}\n{option}\n{body}\n{fence}\n"


def entry(name, index=True):
    "MyST Markdown that describes a public name."
    path, node, comments = find(name)
    where = f"*Module* `{path.stem}`"
    if (PACKAGE.parent / "nbs" / f"{chapter(path)}.ipynb").exists():
        where = f"*Explained in* [{chapter(path)[:2]} {path.stem}]({chapter(path)}.ipynb)"
    text = cleandoc(ast.get_docstring(node) or "") if not isinstance(node, (ast.Assign, ast.AnnAssign)) else ""
    full = name
    if isinstance(node, ast.ClassDef):
        methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        start = methods.get("__init__")
        parts = [text, table(start, comments) if start else fields(node, comments)]
        for method in methods.values():
            if not method.name.startswith("_") and ast.get_docstring(method):
                body = cleandoc(ast.get_docstring(method)) + "\n\n" + table(method, comments)
                parts.append(directive("method", method.name, f"({signature(method)})", body, index, 4))
        return directive("class", full, f"({signature(start)})" if start else "", "\n\n".join([*parts, where]), index, 5)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return directive("data", full, "", "\n\n".join([comment(node, comments), where]), index, 4)
    return directive("function", full, f"({signature(node)})", "\n\n".join([text, table(node, comments), where]), index, 4)


def chapter(path):
    "The notebook of a module: `attention` -> `02_attention`."
    found = sorted((PACKAGE.parent / "nbs").glob(f"[0-9][0-9]_{path.stem}.ipynb"))
    return found[0].stem if found else path.stem
