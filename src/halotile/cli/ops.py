"""`halotile ops`: which operations a sharded decode runs on a rank's own rows."""

# ruff: noqa: PLC0415 - what needs torch is imported where it is used, so that --help is quick

from __future__ import annotations

import json
from typing import Annotated

import typer

POINTWISE = "any operation that torch tags so"


def ops(as_json: Annotated[bool, typer.Option("--json", help="The same as JSON: kind to operations.")] = False) -> None:
    """List the operations that have a rule for sharded rows, by kind.

    Any other gathers the whole tensor on every rank, and is named in the report; --strict refuses it.
    """
    found = coverage()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "count", "operations", title="operations on sharded rows", show_lines=True)
    for kind, names in found.items():
        count = "" if kind == "pointwise" else str(len(names))
        table.add_row(kind, count, ", ".join(name.removeprefix("aten.") for name in names))
    Console().print(table)


def coverage() -> dict[str, list[str]]:
    """Each kind of rule with the names of its operations."""
    from halotile.spatial.mode import FACTORIES
    from halotile.spatial.registry import RULES

    kinds: dict[str, list[str]] = {}
    for operation, rule in RULES.items():
        kinds.setdefault(rule.__module__.rsplit(".", 1)[-1], []).append(str(operation))
    kinds["made sharded"] = [str(operation) for operation in FACTORIES]
    return {kind: sorted(names) for kind, names in sorted(kinds.items())} | {"pointwise": [POINTWISE]}
