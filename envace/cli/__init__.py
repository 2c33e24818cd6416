"""The command line: it parses, calls a job, and prints."""

from __future__ import annotations

import os
import sys

# Threads that wait by spinning make a shared machine ten times slower, threads that never spin lose a fifth on an idle
# one; so they spin for some microseconds. This must stand before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


INTERRUPTED = 130


def main() -> None:
    """Run the command line. A user's mistake is one line and exit code 2, an interruption 130."""
    from envace.errors import EnvaceError

    try:
        from envace.cli.app import app  # takes long enough to be interrupted

        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(_say("interrupted before anything began.", INTERRUPTED))
    except EnvaceError as error:
        sys.exit(_say(f"error: {error}", 2))
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer turns Ctrl-C into this
            _say("interrupted; what is written is whole. A run that was begun goes on with --resume.", INTERRUPTED)
        raise
    except OSError as error:
        sys.exit(_say(f"error: {error}. What was written before is intact; --resume goes on.", 2))


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code
