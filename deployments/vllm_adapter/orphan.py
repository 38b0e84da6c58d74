"""Engine processes end with the replica that started them.

vLLM's EngineCore and Worker processes outlive a parent that was killed hard and then hold memory
and ports. Both load our connector, so both can watch for it.
"""

from __future__ import annotations

import os
import threading
import time

_CHECK_INTERVAL_S = 1.0
_watching_pid: int | None = None  # a forked child must watch for itself


def exit_with_parent() -> None:
    """End this process soon after its parent is gone. Safe to call more than once."""
    global _watching_pid
    if _watching_pid == os.getpid():
        return
    _watching_pid = os.getpid()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="eldr-exit-with-parent", daemon=True).start()
