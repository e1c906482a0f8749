"""GRPO without a queue, as a user would write it: ``python -m bench.plain_loop PLACE --engine vllm --steps 12``.

One process: the engine generates a step's responses, a function rewards them, torch takes a step, the engine gets the
weights. `bench.ladder` writes PLACE, and runs it by turns with jobs of the same engine, model and optimizer. Prints a
JSON line after each step. With ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` vLLM computes in this process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

Row = tuple[list[int], list[int], list[float]]
"""A prompt, a response, and the log-probs with which it was drawn; none: those of the model that is trained."""


def with_transformers(model: Any, tokenizer: Any, chosen: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """The trained model draws the responses itself."""
    end = tokenizer.eos_token_id
    terms = {"do_sample": True, "top_k": 0, "num_return_sequences": chosen.group, "max_new_tokens": chosen.tokens}

    @torch.no_grad()
    def generate(prompts: list[list[int]]) -> list[Row]:
        inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        drawn = model.generate(**inputs, **terms, eos_token_id=end, pad_token_id=end)
        responses = enumerate(drawn[:, inputs["input_ids"].shape[1] :].tolist())
        return [(prompts[at // chosen.group], ids[: (*ids, end).index(end) + 1], []) for at, ids in responses]

    return generate, lambda: None


def with_vllm(model: Any, tokenizer: Any, chosen: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """The engine is vLLM, which loads the weights anew after each step."""
    from vllm import LLM, SamplingParams

    options = {"max_model_len": chosen.tokens + 64, "max_num_seqs": chosen.prompts * chosen.group, "dtype": "float32"}
    options |= {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "skip_tokenizer_init": True}
    engine = LLM(str(chosen.place / "model"), logprobs_mode="processed_logprobs", **options)
    terms: dict[str, Any] = {"max_tokens": chosen.tokens, "stop_token_ids": [tokenizer.eos_token_id]}
    sampling = SamplingParams(n=chosen.group, logprobs=0, detokenize=False, **terms)

    def generate(prompts: list[list[int]]) -> list[Row]:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        drawn = [(prompt, each) for prompt, output in zip(prompts, outputs, strict=True) for each in output.outputs]
        return [(prompt, each.token_ids, [*map(_logprob, each.logprobs, each.token_ids)]) for prompt, each in drawn]

    def update() -> None:
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(model.state_dict().items())})

    update()
    return generate, update


def step(model: Any, optimizer: torch.optim.Optimizer, rows: list[Row], rewards: list[float], group: int) -> None:
    """One clipped GRPO update, with the mean over rows of token means."""
    rewards_PG = torch.tensor(rewards).view(-1, group)
    advantages_PG = (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-4)
    ids_BT = padded([[*prompt, *response] for prompt, response, _ in rows])
    attended_BT = padded([[1] * len(prompt) + [1] * len(response) for prompt, response, _ in rows])
    mask_BT = padded([[0] * len(prompt) + [1] * len(response) for prompt, response, _ in rows])[:, 1:]
    logits_BTV = model(ids_BT, attention_mask=attended_BT).logits[:, :-1]
    logprobs_BT = log_softmax(logits_BTV, -1).gather(2, ids_BT[:, 1:, None])[..., 0]
    drawn = [[0.0] * (len(prompt) - 1) + logprobs for prompt, _, logprobs in rows]
    ratio_BT = torch.exp(logprobs_BT - (padded(drawn) if rows[0][2] else logprobs_BT.detach()))
    gain_BT = torch.minimum(*(ratio * advantages_PG.view(-1, 1) for ratio in (ratio_BT, ratio_BT.clamp(0.8, 1.2))))
    (-(gain_BT * mask_BT).sum(1) / mask_BT.sum(1)).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _logprob(position: Any, token: int) -> float:
    return float(position[token].logprob)


def padded(rows: list[list[Any]]) -> torch.Tensor:
    """Rows of different lengths as a tensor, with zeros at their ends."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(prog="python -m bench.plain_loop", description=__doc__)
    parser.add_argument("place", type=Path)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    for name, default in (("steps", 12), ("prompts", 8), ("group", 8), ("tokens", 24), ("seed", 0), ("lr", 1e-4)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    chosen = parser.parse_args()
    sys.path.insert(0, str(chosen.place))
    from even_reward import even

    tokenizer = AutoTokenizer.from_pretrained(chosen.place / "model")
    questions = [tokenizer.encode(json.loads(line)["question"]) for line in (chosen.place / "data/train.jsonl").open()]
    torch.manual_seed(chosen.seed)
    random.Random(chosen.seed).shuffle(questions)
    model = AutoModelForCausalLM.from_pretrained(chosen.place / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr, betas=(0.9, 0.95), weight_decay=0.0)
    generate, update = (with_vllm if chosen.engine == "vllm" else with_transformers)(model, tokenizer, chosen)
    for number in range(chosen.steps):
        rows = generate(questions[number * chosen.prompts : (number + 1) * chosen.prompts])
        rewards = even([response for _, response, _ in rows])
        step(model, optimizer, rows, rewards, chosen.group)
        update()
        print(json.dumps({"at": time.monotonic(), "reward": sum(rewards) / len(rewards)}), flush=True)


if __name__ == "__main__":
    main()
