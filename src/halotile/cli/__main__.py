"""`python -m halotile.cli` is the `halotile` command."""

from halotile.cli.main import run

if __name__ == "__main__":
    run()
