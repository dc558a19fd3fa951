"""An Accelerate training, whose processes say who they are."""

import hydra
import rank_records
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

rank_records.write("import")  # a framework that starts the script again leaves one more


@hydra.main(version_base=None)
def main(cfg: DictConfig) -> None:
    """Train two epochs and record."""
    set_seed(cfg.seed)
    accelerator = Accelerator(cpu=True)
    x = torch.arange(8, dtype=torch.float32).reshape(8, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=2)
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(layer, optimizer, loader)
    seen: list[float] = []
    for _ in range(2):
        for inputs, targets in loader:
            seen += inputs.flatten().tolist()
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    rank_records.write(
        f"task{HydraConfig.get().job.num}",
        job=HydraConfig.get().job.num,
        framework_rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        total=total.item(),
        parameters=[parameter.item() for parameter in layer.parameters()],
        seen=seen,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
