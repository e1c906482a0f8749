"""All numbers of the demo job in one place, each with its reason."""

from dataclasses import dataclass

from transferqueue.workflows.grpo.model import ModelShape
from transferqueue.workflows.grpo.tokenizer import VOCABULARY_SIZE


@dataclass(frozen=True, kw_only=True)
class Settings:
    dataset: str = "spell_backward"
    seed: int = 0
    group_size: int = 8
    prompts_per_step: int = 128
    steps: int = 150
    warmup_steps: int = 120
    warmup_rows: int = 64
    warmup_learning_rate: float = 3e-3
    learning_rate: float = 1e-3
    final_share: float = 0.1
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_weight: float = 0.0
    gradient_norm_max: float = 1.0
    width: int = 128
    layers: int = 2
    heads: int = 4
    hidden: int = 256
    context: int = 32
    evaluation_samples: int = 4

    def model_shape(self) -> ModelShape:
        return ModelShape(
            vocabulary=VOCABULARY_SIZE,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            context=self.context,
        )
