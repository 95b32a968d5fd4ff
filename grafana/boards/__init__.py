"""One file per dashboard; every dashboard answers one question, its docstring."""

from typing import Final

from grafana.boards import batching, device, drafting, errors, latency, overview, queue

BOARDS: Final = (overview.BOARD, queue.BOARD, batching.BOARD, drafting.BOARD, latency.BOARD, device.BOARD, errors.BOARD)
