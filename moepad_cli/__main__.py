"""Where the program begins. The imports are inside, so that Ctrl-C is quiet during them too."""

import sys


def main() -> int:
    """Runs the command line; gives the exit code."""
    try:
        from moepad_cli import app
    except KeyboardInterrupt:
        return 130
    return app.main()


if __name__ == "__main__":
    sys.exit(main())
