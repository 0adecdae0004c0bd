from collections.abc import Sequence

from torch import nn, optim

class LightningModule(nn.Module):
    automatic_optimization: bool

class _SchedulerConfig:
    scheduler: optim.lr_scheduler.LRScheduler | optim.lr_scheduler.ReduceLROnPlateau

class Trainer:
    world_size: int
    callbacks: Sequence[object]
    optimizers: Sequence[optim.Optimizer]
    lr_scheduler_configs: Sequence[_SchedulerConfig]
    estimated_stepping_batches: float
    global_step: int
    should_stop: bool

class Callback: ...
