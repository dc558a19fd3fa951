"""A script whose task function stands in an installed module."""

from __future__ import annotations

import hydra
from pkg.sibling import task

if __name__ == "__main__":
    hydra.main(version_base="1.3", config_path=None)(task)()
