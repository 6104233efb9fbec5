"""The interpreter behind `support.child.Child`: runs pieces of code that come in through a pipe."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any


def main() -> None:
    commands = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What code prints by accident must not mix with the answers: it goes to stderr, which tests look at.
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def send(kind: str, value: Any) -> None:
        body = pickle.dumps((kind, value), protocol=5)
        answers.write(len(body).to_bytes(8, "little") + body)
        answers.flush()

    scope: dict[str, Any] = {"__name__": "child", "emit": lambda value: send("event", value)}
    while True:
        try:
            code, variables = pickle.load(commands)
        except EOFError:
            break
        scope.pop("result", None)
        scope.update(variables)
        del variables
        try:
            exec(compile(code, "<step>", "exec"), scope)
        except Exception:
            send("raised", traceback.format_exc())
        else:
            send("done", scope.pop("result", None))
    commands.close()
    answers.close()
    # A script's globals live until the interpreter ends; those of the steps must not die earlier.
    globals()["_scope"] = scope


if __name__ == "__main__":
    main()
    sys.exit(0)
