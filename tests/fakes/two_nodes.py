"""Starts an app by torchrun on two nodes, both on this machine: an agent each, one rendezvous.

python two_nodes.py <ranks per node> <torchrun's options, joined by +> <command> ...
"""

from __future__ import annotations

import socket
import subprocess
import sys


def main(ranks: str, options: str, command: list[str]) -> int:
    """Run both; return the larger status."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--nproc_per_node={ranks}", f"--node-rank={node}", "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two", "--local-addr=127.0.0.1",
                f"--log-dir=logs{node}", *options.split("+"), *command,
            ]
        )
        for node in range(2)
    ]  # fmt: skip
    return max(agent.wait() for agent in agents)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
