"""The `halotile` command: thin, one file a command. What needs torch is imported late, so that `--help` is quick."""

import sys
from importlib.util import find_spec

if missing := [name for name in ("typer", "rich", "PIL", "diffusers", "safetensors") if find_spec(name) is None]:
    print(f"halotile: the command needs the extra halotile[cli]; not installed: {', '.join(missing)}", file=sys.stderr)
    raise SystemExit(2)
