"""Runs commands of `sotto` one after the other in one process: `python -m tests.shaped.commands`.

Each line of its input is a JSON list of arguments, each line of its output {"exit_code", "stdout", "stderr"}. So a test
can give many commands inside a network namespace without starting Python for each.
"""

from __future__ import annotations

import json
import sys

from tests.cli.runner import sotto

if __name__ == "__main__":
    for line in sys.stdin:
        result = sotto(*json.loads(line))
        answer = {"exit_code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr}
        print(json.dumps(answer), flush=True)
