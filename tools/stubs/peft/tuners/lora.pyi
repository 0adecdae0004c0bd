from collections.abc import Mapping

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

class LoraLayer(BaseTunerLayer):
    lora_A: nn.ModuleDict
    lora_embedding_A: nn.ParameterDict
    lora_variant: Mapping[str, object]
