"""A Hydra callback that measures what the launching process and its children hold."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import psutil
from hydra.experimental.callback import Callback


class Meter(Callback):
    """Write a line for each job."""

    def __init__(self, path: str) -> None:
        """Write into the file `path`."""
        self.path = Path(path)

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        """Measure."""
        gc.collect()
        own = psutil.Process()
        children = own.children(recursive=True)
        line = {
            "job": config.hydra.job.num,
            "status": job_return.status.name,
            "value": job_return.return_value,
            "fds": own.num_fds(),
            "memory": anonymous_bytes(own.pid),
            "children": [child.pid for child in children],
            "children_fds": [child.num_fds() for child in children],
            "children_memory": [anonymous_bytes(child.pid) for child in children],
            "listening": [
                socket.laddr.port
                for process in (own, *children)
                for socket in process.net_connections("inet")
                if socket.status == psutil.CONN_LISTEN
            ],
            "shared_memory": sorted(os.listdir("/dev/shm")),
            "temporary": sorted(os.listdir(os.environ.get("TMPDIR", "/tmp"))),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def anonymous_bytes(pid: int) -> int:
    """Return the memory that is no file's, shared with forked children or not.

    A process's unique memory (USS) jumps by what torch's libraries take whenever another process
    that maps them starts or ends, anywhere on the machine.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel says nothing of anonymous memory")
