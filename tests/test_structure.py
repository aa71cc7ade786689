"""How large files and functions may be, in both packages, and that signatures which stand more than
once agree.

    a file                                       500 lines
    the body of a function, without docstring    120 lines
    the parameters of a kernel's function        12

Functions that hold others count these in their bodies.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_FILE_LINES, MOST_LINES, MOST_PARAMETERS = 500, 120, 12
SOURCES = sorted([*ROOT.glob("ato_jax/**/*.py"), *ROOT.glob("ato_torch/**/*.py")])
# Folders of kernels, and of the kits that they are made of. A public function has the arguments of
# its operation, however many these are.
OF_KERNELS = {"mosaic", "mosaic_gpu", "scans", "triton"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(text: str) -> list[Function]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, Function)]


def lines_of_body(function: Function) -> int:
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    before = first.end_lineno if documented else first.lineno - 1
    assert before is not None and function.end_lineno is not None
    return function.end_lineno - before


def parameters(function: Function) -> int:
    found = function.args
    starred = [one for one in (found.vararg, found.kwarg) if one is not None]
    return len([*found.posonlyargs, *found.args, *found.kwonlyargs, *starred])


def test_what_counts() -> None:
    text = '''
def documented(a, /, b, *more, c, **others):
    """Two lines
    of a docstring."""
    # A comment counts.
    def inner():

        return a

    return inner

async def short(): return 1
'''
    assert [(one.name, lines_of_body(one), parameters(one)) for one in functions(text)] == [
        ("documented", 6, 5),
        ("short", 1, 0),
        ("inner", 1, 0),
    ]


def test_files_are_short() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert len(lines) > 250
    assert {path: count for path, count in lines.items() if count > MOST_FILE_LINES} == {}


def test_functions_are_short() -> None:
    found = {}
    for path in SOURCES:
        own = functions(path.read_text())
        long = [one.name for one in own if lines_of_body(one) > MOST_LINES]
        is_kernel = OF_KERNELS & set(path.relative_to(ROOT).parts)
        crowded = [one.name for one in own if is_kernel and parameters(one) > MOST_PARAMETERS]
        if long or crowded:
            found[path] = long, crowded
    assert found == {}


# Functions that repeat the arguments of another one (docs/architecture.md, "Alike on purpose").
OPS, PARALLEL = "ato_jax/ops", "ato_jax/parallel"
ATTENTION = f"{OPS}/attention/api.py", "attention"
LINEAR = f"{OPS}/linear_attention/api.py", "linear_attention"
DELTA_RULE = f"{OPS}/delta_rule/api.py", "gated_delta_rule"
TOTAL = f"{OPS}/attention/pieces.py", "total_attention"
DECODING = f"{OPS}/attention/decode.py", "decode_attention"
TWINS = [
    (ATTENTION, (f"{PARALLEL}/softmax.py", "attention"), {"scales", "out_dtype"}),
    (LINEAR, (f"{PARALLEL}/linear.py", "linear_attention"), {"scales", "out_dtype"}),
    (DELTA_RULE, (f"{PARALLEL}/delta_rule.py", "gated_delta_rule"), set()),
]


def function(path: str, name: str) -> Function:
    """The last one of the name: those before it are overloads."""
    return [one for one in functions((ROOT / path).read_text()) if one.name == name][-1]


def signature(one: Function) -> dict[str, tuple[str, str]]:
    """Type and default of each parameter."""

    def text(node: ast.expr | None) -> str:
        return "" if node is None else ast.unparse(node)

    found = one.args
    names = [*found.posonlyargs, *found.args, *found.kwonlyargs]
    given = [*found.defaults, *found.kw_defaults]
    defaults = [*[None] * (len(names) - len(given)), *given]
    return {
        name.arg: (text(name.annotation), text(default))
        for name, default in zip(names, defaults, strict=True)
    }


@pytest.mark.parametrize(("op", "twin", "without"), TWINS, ids=["softmax", "linear", "delta_rule"])
def test_an_op_over_many_devices_takes_its_arguments(
    op: tuple[str, str], twin: tuple[str, str], without: set[str]
) -> None:
    own, others = signature(function(*op)), signature(function(*twin))
    assert set(own) - set(others) == without
    assert set(others) - set(own) <= {"axis_name", "schedule", "order"}
    assert {name: others[name] for name in others if name in own} == {
        name: own[name] for name in own if name in others
    }


@pytest.mark.parametrize(
    "op", [ATTENTION, LINEAR, DELTA_RULE, TOTAL, DECODING], ids=lambda op: op[1]
)
def test_arguments_are_passed_on_by_their_own_names(op: tuple[str, str]) -> None:
    """Each to `prepare`, whose defaults are those of the public function."""
    path = ATTENTION[0] if op == TOTAL else op[0]
    public, prepare = function(*op), function(path, "prepare")
    (call,) = [
        node
        for node in ast.walk(public)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "prepare"
    ]
    passed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert passed == {name.arg: name.arg for name in public.args.kwonlyargs}
    own, others = signature(public), signature(prepare)
    for name in passed:
        assert own[str(name)][1] == others[str(name)][1], name
