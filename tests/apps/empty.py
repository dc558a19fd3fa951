"""A task that does nothing but say that it ran."""

import either
import rank_records
from omegaconf import DictConfig


@either.main(version_base=None, config_path="conf", config_name="empty")
def main(cfg: DictConfig) -> int:
    """Record and return the job's parameter."""
    rank_records.write("task", n=cfg.n)
    return int(cfg.n)


if __name__ == "__main__":
    main()
