"""`python -m scalelab` is `scalelab`."""

import sys


def main() -> int:
    """Entry point of both. The imports are inside, so that Ctrl-C during them is no traceback."""
    try:
        from .cli import main as cli

        return cli()
    except KeyboardInterrupt:
        print("scalelab: interrupted; nothing was started", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
