"""A reinforcement learning loop of your own: REINFORCE with a plain torch policy on a grid world that is written below.

    python examples/reinforce.py [--updates 100] [--actors 2]

Shows: episodes of different lengths as ragged rows, batches by a budget of steps (`tokens=`) and not of episodes, the
freshest episodes first (`Freshest`), actors that wait because the table is full (`Limits`), and weights by version.
Nothing here is about language models. Needs torch.

Actors and the learner are threads of one process. As processes they would run the same functions, with
`tq.connect(address)` for each of them: see grpo.py.

The agent starts anywhere and should reach the corner of a 6 x 6 grid. A step costs 1 and the corner gives 10, so a good
policy has a return near 5 (5 steps on average); a random walk rarely arrives, and has a return near -22.
"""

import argparse
import contextlib
import threading

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import transferqueue as tq

SIZE, STEPS_MAX, GOAL_REWARD = 6, 32, 10.0
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])
BATCH_STEPS = 512  # of an update, whatever the number of episodes
DISCOUNT, ENTROPY = 0.97, 0.01


def policy_network() -> nn.Module:
    """The position, scaled, to the logits of four moves."""
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, len(MOVES)))


def observation(places: np.ndarray) -> torch.Tensor:
    """Positions as the network takes them: [..., 2], about zero."""
    return torch.from_numpy(places).float() / (SIZE - 1) * 2 - 1


@torch.no_grad()
def episodes(policy: nn.Module, count: int, draw: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """Play several episodes beside each other; places [steps, 2], moves [steps] and rewards [steps] of each."""
    place = draw.integers(0, SIZE, (count, 2))
    place[(place == SIZE - 1).all(1)] = 0
    running = np.ones(count, bool)
    history = []
    while running.any() and len(history) < STEPS_MAX:
        move = Categorical(logits=policy(observation(place))).sample().numpy()
        history.append((place, move, running))
        place = np.clip(place + MOVES[move], 0, SIZE - 1)
        running = running & (place != SIZE - 1).any(1)
    places, moves, alive = (np.stack(part, 1) for part in zip(*history, strict=True))
    rewards = np.where(alive, -1.0, 0.0)
    lengths = alive.sum(1)
    rewards[np.arange(count)[~running], lengths[~running] - 1] += GOAL_REWARD
    return [
        {"places": places[row, :n], "moves": moves[row, :n], "rewards": rewards[row, :n]}
        for row, n in enumerate(lengths)
    ]


def discounted(rewards: np.ndarray) -> np.ndarray:
    """What is still to come at each step."""
    returns, ahead = np.empty_like(rewards), 0.0
    for at in reversed(range(len(rewards))):
        returns[at] = ahead = rewards[at] + DISCOUNT * ahead
    return returns


# ---------------------------------------------------------------- the two programs


def act(queue: tq.Queue, seed: int) -> None:
    """Play with the newest weights. A put waits while the table is full, and ends with `Sealed` when the learner is
    done."""
    policy, version, draw = policy_network(), -1, np.random.default_rng(seed)
    table, channel = queue.table("episodes"), queue.weights("policy")
    with contextlib.suppress(tq.Sealed):
        while True:
            with channel.pull() as weights:
                if weights.version != version:
                    policy.load_state_dict(weights.torch())
                    version = weights.version
            played = episodes(policy, 16, draw)
            table.put(
                **{name: [episode[name] for episode in played] for name in ("places", "moves", "rewards")},
                tokens=[len(episode["moves"]) for episode in played],  # what the learner's budget counts
                policy_version=version,
            )


def learn(queue: tq.Queue, table: tq.Table, updates: int) -> list[float]:
    """Take the freshest episodes, BATCH_STEPS steps of them, and follow the policy gradient; mean returns by update."""
    policy, channel, history = policy_network(), queue.weights("policy"), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    channel.publish(0, policy.state_dict())
    for update in range(1, updates + 1):
        with table.lease("learn", tokens=BATCH_STEPS) as batch:
            rewards = batch["rewards"].list()
            returns = torch.from_numpy(np.concatenate([discounted(np.asarray(one)) for one in rewards])).float()
            places, _ = batch["places"].ragged()  # the steps of all episodes, one after the other: [steps, 2]
            moves, _ = batch["moves"].ragged()
            chosen = Categorical(logits=policy(observation(places)))
            advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
            loss = -(chosen.log_prob(torch.from_numpy(moves)) * advantage).mean() - ENTROPY * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(float(np.mean([sum(one) for one in rewards])))
            if update % 20 == 0 or update == updates:
                age = update - 1 - batch.policy_version.min()
                print(
                    f"update {update}: mean return {history[-1]:.1f} of {len(batch)} episodes, up to {age} versions old"
                )
        channel.publish(update, policy.state_dict())
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--actors", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tq.connect("embedded") as queue:
        table = queue.create_table(
            "episodes",
            fields=[
                tq.Field("places", "int64", (None, 2)),
                tq.Field("moves", "int64", (None,)),
                tq.Field("rewards", "float64", (None,)),
            ],
            tasks=[tq.Task("learn", needs=["places", "moves", "rewards"], selector=tq.Freshest())],
            limits=tq.Limits(rows=128),
        )
        actors = [threading.Thread(target=act, args=(queue, seed)) for seed in range(options.actors)]
        for actor in actors:
            actor.start()
        history = learn(queue, table, options.updates)
        table.seal()
        for actor in actors:
            actor.join()
        counts = table.audit()
    print(f"mean return {np.mean(history[:10]):.1f} -> {np.mean(history[-10:]):.1f}")
    print(f"episodes put {counts.rows_put}, learned from {counts.rows_done}, left over {counts.rows_live}")


if __name__ == "__main__":
    main()
