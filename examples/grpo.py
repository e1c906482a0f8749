"""Asynchronous GRPO in one file: a rollout process, a reward process and a trainer that share one table and one weight
channel.

    python examples/grpo.py [--steps 120] [--rollouts 1] [--max-staleness 1]

Shows: groups (the trainer leases whole groups of samples of one prompt), bounded staleness (`Pacing`), weights that
travel by version, a reward stage of its own, and ragged responses that nobody pads on the way. Needs torch.

The task is to count down: to the prompt 4 the right response is 4 3 2 1 and the end token. The policy is a small GRU
with random weights, so its first rewards are near 0.1; after 120 steps (about 15 seconds on two cores) they are near 1.

To make a real job of it, put an engine in place of `Policy.sample`, a reward function in place of `score`, and a model
in place of `Policy`; the calls to the queue stay as they are. Run the three functions on as many machines as you like:
they only need the address of the queue.
"""

import argparse
import contextlib
import itertools
import multiprocessing

import numpy as np
import torch
from torch import nn
from torch.nn.functional import log_softmax

import transferqueue as tq

TOKENS, END, RESPONSE_TOKENS_MAX = 8, 0, 8
GROUP = 8  # samples of one prompt
PROMPTS = 16  # groups in a batch of the trainer
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Policy(nn.Module):
    """A GRU: the prompt token, then the response so far, to the logits of the next token."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.core = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of each next token: [batch, positions, tokens]."""
        hidden, _ = self.core(self.embed(tokens_BT))
        return log_softmax(self.head(hidden), dim=-1)

    @torch.no_grad()
    def sample(self, prompts_B: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """One response for each prompt: its tokens, up to and with the end token, and their log-probabilities."""
        token_B, state, tokens, logprobs = prompts_B, None, [], []
        for _ in range(RESPONSE_TOKENS_MAX):
            hidden, state = self.core(self.embed(token_B[:, None]), state)
            logits = log_softmax(self.head(hidden[:, 0]), dim=-1)
            token_B = torch.multinomial(logits.exp(), 1)[:, 0]
            tokens.append(token_B)
            logprobs.append(logits.gather(1, token_B[:, None])[:, 0])
        tokens_BT, logprobs_BT = torch.stack(tokens, 1).numpy(), torch.stack(logprobs, 1).numpy()
        ended_BT = tokens_BT == END
        lengths = np.where(ended_BT.any(1), ended_BT.argmax(1) + 1, RESPONSE_TOKENS_MAX)
        cut = list(enumerate(lengths))
        return [tokens_BT[row, :n] for row, n in cut], [logprobs_BT[row, :n] for row, n in cut]


def score(prompt: int, response: np.ndarray) -> float:
    """The share of positions that are as they should be: 1.0 for the exact countdown."""
    wanted = np.arange(prompt, -1, -1)
    shared = min(len(wanted), len(response))
    return float((wanted[:shared] == response[:shared]).sum() / max(len(wanted), len(response)))


# ---------------------------------------------------------------- the three programs


def rollout(address: str, seed: int) -> None:
    """Generate groups with the newest weights, as far ahead of the trainer as the pacing allows."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    draw, group_ids = np.random.default_rng(seed), itertools.count(seed << 32)
    policy, version = Policy(), -1
    with tq.connect(address, label=f"rollout-{seed}") as queue, contextlib.suppress(tq.Sealed):  # ends with the table
        table, channel = queue.table("rollouts"), queue.weights("policy")
        while True:
            reservation = table.reserve(GROUP * PROMPTS)  # waits while production is as far ahead as it may be
            with channel.pull() as weights:  # views of shared memory: nothing is copied but into the policy
                if weights.version != version:
                    policy.load_state_dict(weights.torch())
                    version = weights.version
            prompts = np.repeat(draw.integers(1, RESPONSE_TOKENS_MAX, PROMPTS), GROUP)
            responses, logprobs = policy.sample(torch.from_numpy(prompts))
            table.put(
                prompt=prompts,
                response_ids=responses,  # ragged: arrays of different lengths
                rollout_logprobs=logprobs,
                group_id=np.repeat([next(group_ids) for _ in range(PROMPTS)], GROUP),
                group_size=GROUP,
                policy_version=version,
                reservation=reservation,
            )


def reward(address: str) -> None:
    """Score rows one by one, as they come; groups do not matter here."""
    with tq.connect(address, label="reward") as queue:
        for batch in queue.table("rollouts").leases("reward", rows=GROUP * PROMPTS, at_least=1):
            with batch:
                prompts, responses = batch["prompt"].list(), batch["response_ids"].list()
                batch.ack(rewards=[score(prompt, ids) for prompt, ids in zip(prompts, responses, strict=True)])


def train(queue: tq.Queue, table: tq.Table, steps: int) -> list[float]:
    """Lease whole groups, make a step, publish; returns the mean reward of each step."""
    policy, channel, history = Policy(), queue.weights("policy"), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    channel.publish(0, policy.state_dict())
    for step in range(1, steps + 1):
        with table.lease("train", groups=PROMPTS) as batch:
            loss = grpo_loss(policy, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            history.append(float(batch["rewards"].numpy().mean()))
            if step % 20 == 0 or step == steps:
                stale = batch.version - batch.policy_version
                print(f"step {step}: mean reward {history[-1]:.2f}, staleness up to {stale.max()}", flush=True)
            channel.publish(step, policy.state_dict())  # before the ack, whose room is then used with these weights
    return history


def grpo_loss(policy: Policy, batch: tq.Batch) -> torch.Tensor:
    """Clipped policy gradient with group-relative advantages (GRPO: arXiv 2402.03300; clip-higher: arXiv
    2503.14476)."""
    responses = batch["response_ids"]
    targets_BT = torch.from_numpy(responses.padded(END))
    mask_BT = torch.arange(targets_BT.shape[1]) < torch.as_tensor(responses.lengths)[:, None]
    old_BT = torch.from_numpy(batch["rollout_logprobs"].padded(0.0))
    inputs_BT = torch.cat([batch["prompt"].torch()[:, None], targets_BT[:, :-1]], dim=1)
    new_BT = policy(inputs_BT).gather(2, targets_BT[..., None])[..., 0]
    ratio_BT = (new_BT - old_BT).exp()
    advantage_B1 = torch.from_numpy(advantages(batch["rewards"].numpy(), batch.group_id))[:, None]
    clipped_BT = ratio_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain_BT = torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    return -(gain_BT * mask_BT).sum() / mask_BT.sum()


def advantages(rewards: np.ndarray, group_id: np.ndarray) -> np.ndarray:
    """Each reward less the mean of its group, over the group's standard deviation."""
    _, group = np.unique(group_id, return_inverse=True)
    size = np.bincount(group)
    centred = rewards - (np.bincount(group, rewards) / size)[group]
    deviation = np.sqrt(np.bincount(group, centred**2) / size)[group]
    return (centred / (deviation + 1e-4)).astype(np.float32)


# ---------------------------------------------------------------- all of it on one machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rollouts", type=int, default=1, help="generating processes")
    parser.add_argument("--max-staleness", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tq.connect("embedded") as queue:  # other processes join queue.address
        table = queue.create_table(
            "rollouts",
            tasks=[
                tq.Task("reward", needs=["prompt", "response_ids"], gives=["rewards"]),
                tq.Task("train", needs=["prompt", "response_ids", "rollout_logprobs", "rewards"], groups=tq.Complete()),
            ],
            pacing=tq.Pacing(
                "train",
                batch_rows=GROUP * PROMPTS,
                depth=1,  # a batch is generated while the one before is trained on
                max_staleness=options.max_staleness,
                channel="policy",  # its versions are the clock
            ),
        )
        spawn = multiprocessing.get_context("spawn")
        stages = [(rollout, (queue.address, seed)) for seed in range(options.rollouts)] + [(reward, (queue.address,))]
        processes = [spawn.Process(target=stage, args=words, daemon=True) for stage, words in stages]
        for process in processes:
            process.start()
        history = train(queue, table, options.steps)
        table.seal()  # no more rows: the others end
        for process in processes:
            process.join()
        counts = table.audit()
    print(f"mean reward {np.mean(history[:10]):.2f} -> {np.mean(history[-10:]):.2f}")
    print(f"rows put {counts.rows_put}, done {counts.rows_done}, live {counts.rows_live}, dropped {counts.dropped}")


if __name__ == "__main__":
    main()
