"""``python -m edgellm_worker.engine.child FD``: started by `ChildEngineHandle`, not by people."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from edgellm_worker.engine.api import Engine
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.process import prepare_process, run
from edgellm_worker.engine.load import load_engine


def load(message: Load) -> Engine:
    return load_engine(message.kind, open_checkpoint(Path(message.model)), message.options)


if __name__ == "__main__":
    prepare_process()
    sys.exit(run(socket.socket(fileno=int(sys.argv[1])), load))
