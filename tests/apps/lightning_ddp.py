"""A Lightning training with the ddp strategy, whose processes say who they are."""

import hydra
import lightning
import rank_records
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

rank_records.write("import")  # a framework that starts the script again leaves one more


class Line(lightning.LightningModule):
    """Fits y = 2 x, with other data in each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        x, y = batch
        self.seen += x.flatten().tolist()
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@hydra.main(version_base=None)
def main(cfg: DictConfig) -> None:
    """Train two epochs and record."""
    lightning.seed_everything(cfg.seed)
    x = torch.arange(8, dtype=torch.float32).reshape(8, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=2)
    model = Line()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=HydraConfig.get().runtime.output_dir,
    )
    trainer.fit(model, loader)
    total = torch.tensor([trainer.global_rank + 1.0])
    dist.all_reduce(total)
    rank_records.write(
        f"task{HydraConfig.get().job.num}",
        job=HydraConfig.get().job.num,
        framework_rank=trainer.global_rank,
        world_size=trainer.world_size,
        total=total.item(),
        parameters=[parameter.item() for parameter in model.layer.parameters()],
        seen=model.seen,
    )


if __name__ == "__main__":
    main()
