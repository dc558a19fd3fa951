"""An app whose task is a callable object, with its config in a directory beside it."""

from __future__ import annotations

from typing import Any

import hydra_torchrun_launcher


class Task:
    def __call__(self, cfg: Any) -> None:
        if cfg.fails:
            raise ValueError("asked to fail")
        print("called with", cfg.x, flush=True)


run = hydra_torchrun_launcher.main(version_base="1.3", config_path="conf", config_name="called")(
    Task()
)

if __name__ == "__main__":
    run()
