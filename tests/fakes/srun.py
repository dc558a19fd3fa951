"""A stand-in for srun: starts a command once for each task, with Slurm's variables.

python srun.py <tasks per node, as in 2,1> <command> ...
All tasks run on this machine. As srun's, its status is the largest of theirs, and a task that fails
ends no other. `RANK_<n>_<NAME>=value` in its environment sets NAME for task n only.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main(per_node: list[int], command: list[str]) -> int:
    """Run the tasks; return the status."""
    total = sum(per_node)
    tasks = []
    for node, count in enumerate(per_node):
        for local in range(count):
            number = sum(per_node[:node]) + local
            mine = f"RANK_{number}_"
            environ = {
                **os.environ,
                "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", str(os.getpid())),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": str(total),
                "SLURM_STEP_NUM_NODES": str(len(per_node)),
                "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, per_node)),
                "SLURM_STEP_NODELIST": "localhost,other[2-9]",
                "SLURM_NTASKS": str(total),
                "SLURM_NODEID": str(node),
                "SLURM_PROCID": str(number),
                "SLURM_LOCALID": str(local),
                **{k.removeprefix(mine): v for k, v in os.environ.items() if k.startswith(mine)},
            }
            tasks.append(subprocess.Popen(command, env=environ))
    return max(task.wait() & 0xFF for task in tasks)


if __name__ == "__main__":
    sys.exit(main([int(count) for count in sys.argv[1].split(",")], sys.argv[2:]))
