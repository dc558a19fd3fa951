"""Warn about modules and functions that have grown too long to be read at once."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "examples", "benchmarks")
MODULE_LINES = 300
FUNCTION_LINES = 50


def warnings(path: Path) -> list[str]:
    """Return a line for each thing in a file that is over its limit."""
    source = path.read_text(encoding="utf-8")
    name, lines = path.relative_to(ROOT), source.count("\n")
    found = []
    if lines > MODULE_LINES:
        found.append(f"{name}: {lines} lines (limit {MODULE_LINES})")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                where = f"{name}:{node.lineno}: {node.name}"
                found.append(f"{where}: {lines} lines (limit {FUNCTION_LINES})")
    return found


if __name__ == "__main__":
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    for file in files:
        for warning in warnings(file):
            print(f"warning: {warning}")
    print(f"size limits: looked at {len(files)} modules")
