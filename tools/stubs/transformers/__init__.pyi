from pathlib import Path
from typing import Self

from torch import nn

class BertConfig:
    def __init__(
        self, *, hidden_size: int, num_hidden_layers: int, num_attention_heads: int, intermediate_size: int
    ) -> None: ...

class BertForSequenceClassification(nn.Module):
    def __init__(self, config: BertConfig) -> None: ...
    @classmethod
    def from_pretrained(cls, folder: Path) -> Self: ...
    def save_pretrained(self, folder: Path) -> None: ...

class TrainingArguments:
    world_size: int
    load_best_model_at_end: bool

class TrainerState:
    global_step: int
    max_steps: int

class TrainerControl:
    should_training_stop: bool

class TrainerCallback: ...
