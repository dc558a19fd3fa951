"""A script whose last line is not under `if __name__ == "__main__"`."""

import either
import rank_records
from omegaconf import DictConfig


@either.main(version_base=None)
def main(_cfg: DictConfig) -> None:
    """Record."""
    rank_records.write("task")


main()
