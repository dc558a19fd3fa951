"""What a task function does when its node is to be stopped (runs in ranks)."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Self


class PreemptionNotice:
    """Notes the signal that asks a rank to leave, instead of dying of it, so that it can save.

    A launching process that is sent SIGTERM passes it on to its node's ranks, which then have
    `hydra.launcher.shutdown_timeout` seconds (30 by default) until they are killed. torchrun does
    the same. On several nodes only the ranks of that node get it; `anywhere` tells all of them:

        with PreemptionNotice() as notice:
            for batch in batches:
                train(batch)
                if notice.anywhere():
                    save()  # all ranks, at the same step
                if notice.received is not None:
                    return

    The handlers that were there before are put back at the end. Signals are noted between two
    instructions of Python, so after a collective that is under way.

    Attributes:
        received: the last of the signals that has come, or None.
    """

    received: int | None

    def __init__(self, signals: Iterable[int] = (signal.SIGTERM,)) -> None:
        """Note nothing yet.

        Args:
            signals: which ones to note. Others of `hydra.launcher.signals_to_handle` reach ranks
                too: SIGINT, say, for which Python raises KeyboardInterrupt.
        """
        self.received = None
        self._signals = tuple(signals)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Note signals from now on.

        Raises:
            ValueError: this is not the main thread, or no number of a signal.
        """
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the handlers back that were there before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = number

    def anywhere(
        self, group: ProcessGroup | None = None, device: torch.device | str | None = None
    ) -> bool:
        """Tell whether any rank has been asked to leave; all ranks get the same answer.

        A collective: every rank of the group has to call it, at the same place. It costs an
        all-reduce of one number, so once in a few steps may do. Without a process group it tells
        of this process.

        Args:
            group: the ranks to ask; None: all.
            device: where the number is; None: the current GPU for NCCL, else the CPU.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return self.received is not None
        if device is None:
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        asked = torch.tensor(int(self.received is not None), device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        return bool(asked.item())
