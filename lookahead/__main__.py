"""``python -m lookahead`` is the command line."""

from lookahead.cli import app

if __name__ == "__main__":
    app(prog_name="python -m lookahead")
