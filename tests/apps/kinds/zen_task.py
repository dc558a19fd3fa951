"""A hydra-zen task: the config's fields are the function's arguments."""

from __future__ import annotations

from hydra_zen import builds, store, zen
from kind import record
from omegaconf import OmegaConf


class Model:
    def __init__(self, width: int) -> None:
        self.width = width


def task(point: int, model: Model) -> int:
    return record(
        OmegaConf.create({"point": point}), width=model.width, is_model=isinstance(model, Model)
    )


store(task, name="task", point=1, model=builds(Model, width=4, populate_full_signature=True))

if __name__ == "__main__":
    store.add_to_hydra_store()
    zen(task).hydra_main(config_path=None, config_name="task", version_base="1.3")
