"""The measure of a held-out evaluation: the reward of responses; for distillation the divergence from the teacher; for
sft the loss.

- With rewards: ``reward`` of responses drawn at `evaluation.temperature` (0: greedy), scored as in training, and
  ``reward/NAME`` for each term.
- With an environment: ``reward`` of episodes, played the same way.
- distill: ``kl``, the mean over tokens of log p_student − log p_teacher, of responses that the student draws at the
  temperature of training: an estimate of the reverse KL.
- sft: ``loss``, the mean negative log-prob of the tokens of held-out responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from transferqueue.adapters.protocols import STOP, Completion, Generator, Ids, Prompt, Sampling, WeightSource
from transferqueue.adapters.stages.environments import Episode, as_they_end
from transferqueue.adapters.stages.generation import row_seed
from transferqueue.adapters.weights import copy_weights
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.prompt_data import open_held_out
from transferqueue.workflows.job.data.sequence import NumberedPrompt, held_out_prompts
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.reward_terms.scorer import RewardScorer
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.stages.episodes import JobEpisodes, environment_of
from transferqueue.workflows.job.stages.policy_weights import FixedWeights
from transferqueue.workflows.job.stages.rollout import sampling_of

_SEED: Final = 1_000_003
"""Added to the job's seed: held-out responses are drawn with other numbers than training's, and with the same ones in
each evaluation."""

OpenEngine = Callable[[], AbstractContextManager[Generator]]


class Measure(Protocol):
    """Figures of a version on the held-out prompts."""

    def load(self, source: WeightSource, version: int) -> None:
        """Take the weights of a version."""

    def figures(self) -> dict[str, Any]:
        """Measure them. Blocks."""


@contextmanager
def measure_of(job: Job, open_engine: OpenEngine) -> Iterator[Measure]:
    """Open the held-out prompts and their measure. open_engine: opens a generator, if responses are drawn.

    Raises as `open_held_out` does, and `UsageError` if no held-out prompt is short enough.
    """
    tokenizer = load_tokenizer(job.model)
    prompts = held_out_prompts(open_held_out(job, tokenizer), job)
    if job.algorithm.kind == "sft":
        yield HeldOutLoss(job, prompts)
        return
    sampling = held_out_sampling(job)
    with open_engine() as engine:
        if job.algorithm.kind == "distill":
            yield TeacherDivergence(job, prompts, engine, sampling)
        elif any(reward.environment for reward in job.reward):
            yield EpisodeReward(job, prompts, engine, sampling, tokenizer)
        else:
            with RewardScorer(job, tokenizer) as scorer:
                yield ResponseReward(job, prompts, engine, sampling, scorer)


def held_out_sampling(job: Job) -> Sampling:
    """Return how held-out responses are drawn: as in training for distill, at `evaluation.temperature` otherwise."""
    drawn = sampling_of(job, job.engine[0])
    temperature = job.sampling.temperature if job.algorithm.kind == "distill" else job.evaluation.temperature
    return Sampling(tokens_max=drawn.tokens_max, temperature=temperature, stop_ids=drawn.stop_ids)


class _Drawing:
    """Draws `evaluation.samples` responses to each prompt."""

    def __init__(self, job: Job, prompts: Sequence[NumberedPrompt], engine: Generator, sampling: Sampling) -> None:
        self._job, self._prompts, self._engine, self._sampling = job, prompts, engine, sampling

    def load(self, source: WeightSource, version: int) -> None:
        """Give the engine the weights."""
        self._engine.update_weights(source, version)

    def _drawn(self) -> list[Completion]:
        seed = self._job.seed + _SEED
        requested = [
            Prompt(ids=prompt.ids, samples=self._job.evaluation.samples, seed=row_seed(seed, prompt.number))
            for prompt in self._prompts
        ]
        drawn = self._engine.generate(requested, self._sampling)
        return sorted(drawn, key=lambda completion: (completion.prompt, completion.sample))


class ResponseReward(_Drawing):
    """The mean reward of responses, by the reward functions of the job."""

    def __init__(
        self, job: Job, prompts: Sequence[NumberedPrompt], engine: Generator, sampling: Sampling, scorer: RewardScorer
    ) -> None:
        super().__init__(job, prompts, engine, sampling)
        self._scorer = scorer

    def figures(self) -> dict[str, Any]:
        """``rows`` (scored), ``reward``, ``reward/NAME``, ``tokens`` (mean), ``ended`` (share that drew an end token),
        ``failed`` if a reward did."""
        drawn = self._drawn()
        scores = self._scorer.score(
            ids=[self._prompts[completion.prompt].number for completion in drawn],
            data=[self._prompts[completion.prompt].data for completion in drawn],
            prompt_ids=[self._prompts[completion.prompt].ids for completion in drawn],
            response_ids=[completion.ids for completion in drawn],
        )
        kept = ~scores.failed
        terms = {
            f"reward/{name}": float(np.nanmean(term))
            for name, term in zip(self._scorer.names, scores.terms[kept].T, strict=True)
            if not np.isnan(term).all()
        }
        failed = {"failed": len(scores.failures)} if scores.failures else {}
        return {**_mean("reward", scores.rewards[kept]), **terms, **failed, **_lengths(drawn)}


class EpisodeReward(_Drawing):
    """The mean reward of episodes, by the environment of the job."""

    def __init__(
        self,
        job: Job,
        prompts: Sequence[NumberedPrompt],
        engine: Generator,
        sampling: Sampling,
        tokenizer: TextTokenizer,
    ) -> None:
        super().__init__(job, prompts, engine, sampling)
        self._at_once = max(each.slots for each in job.engine)
        self._environment = environment_of(job)
        held_out_job = msgspec.structs.replace(job, seed=job.seed + _SEED)
        self._play = JobEpisodes(
            self._environment, engine, FixedWeights(), sampling, held_out_job, slots=self._at_once, tokenizer=tokenizer
        )

    def figures(self) -> dict[str, Any]:
        """``rows``, ``reward``, ``turns`` and ``tokens`` (means); ``failed`` if an environment did."""
        samples = self._job.evaluation.samples

        def played(at: int, given_up: Callable[[], bool]) -> Any:
            prompt = self._prompts[at // samples]
            ordinal = prompt.number * samples + at % samples
            return self._play.episode(prompt.ids, prompt.data, prompt.number, ordinal, given_up)

        ended = [episode for _, episode in as_they_end(played, len(self._prompts) * samples, self._at_once)]
        episodes = [episode for episode in ended if isinstance(episode, Episode)]
        rewards = np.array([self._environment.weight * sum(episode.rewards) for episode in episodes])
        failed = {"failed": len(ended) - len(episodes)} if len(episodes) < len(ended) else {}
        return {
            **_mean("reward", rewards),
            "turns": float(np.mean([episode.turns for episode in episodes])),
            "tokens": float(np.mean([sum(episode.trajectory.drawn) for episode in episodes])),
            **failed,
        }


class TeacherDivergence(_Drawing):
    """The divergence of the student from the teacher."""

    def __init__(self, job: Job, prompts: Sequence[NumberedPrompt], engine: Generator, sampling: Sampling) -> None:
        from transferqueue.adapters.scoring import load_causal_lm

        super().__init__(job, prompts, engine, sampling)
        self._teacher = load_causal_lm(job.teacher.path, dtype=job.teacher.dtype or job.model.dtype)

    def figures(self) -> dict[str, Any]:
        """``rows``, ``kl`` (nats a token), ``tokens`` (mean), ``ended``."""
        drawn = self._drawn()
        prompts = [self._prompts[completion.prompt].ids for completion in drawn]
        teacher_N = _logprobs(
            self._teacher,
            prompts,
            [each.ids for each in drawn],
            self._job.teacher.tokens,
            self._job.sampling.temperature,
        )
        student_N = np.concatenate([completion.logprobs for completion in drawn])
        return {"rows": len(drawn), "kl": float(np.mean(student_N - teacher_N)), **_lengths(drawn)}


@dataclass
class _Tokens:
    prompts: list[Ids]
    responses: list[Ids]


class HeldOutLoss:
    """The mean negative log-prob of the tokens of held-out responses."""

    def __init__(self, job: Job, prompts: Sequence[NumberedPrompt]) -> None:
        from transferqueue.adapters.scoring import load_causal_lm

        self._model = load_causal_lm(job.model.path, dtype=job.model.dtype, revision=job.model.revision)
        self._tokens = _Tokens([prompt.ids for prompt in prompts], [_response(prompt) for prompt in prompts])
        self._tokens_max = job.trainer.micro_tokens

    def load(self, source: WeightSource, version: int) -> None:
        """Copy the weights into the model."""
        copy_weights(source, self._model)

    def figures(self) -> dict[str, Any]:
        """``rows`` and ``loss`` (nats a token)."""
        logprobs_N = _logprobs(self._model, self._tokens.prompts, self._tokens.responses, self._tokens_max, 1.0)
        return {"rows": len(self._tokens.prompts), "loss": float(-np.mean(logprobs_N))}


def _response(prompt: NumberedPrompt) -> Ids:
    if prompt.response_ids is None:
        raise UsageError(
            f"held-out prompt {prompt.number} has no response; sft needs data.response in the held-out data too"
        )
    return prompt.response_ids


def _logprobs(model: Any, prompts: Sequence[Ids], responses: Sequence[Ids], tokens: int, temperature: float) -> Any:
    """Log-probs of all response tokens, float32 ``[N]`` in the order of the rows; in passes of at most `tokens`
    tokens."""
    import torch

    from transferqueue.adapters.scoring import micro_batches, response_logprobs

    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    rows: dict[int, Any] = {}
    with torch.no_grad():
        for at in micro_batches(lengths, tokens=tokens):
            found_N = response_logprobs(
                model, [prompts[row] for row in at], [responses[row] for row in at], temperature=temperature
            )
            pieces = np.split(found_N.float().cpu().numpy(), np.cumsum([len(responses[row]) for row in at])[:-1])
            rows |= dict(zip(at, pieces, strict=True))
    return np.concatenate([rows[row] for row in range(len(responses))])


def _mean(name: str, values: Any) -> dict[str, Any]:
    if not len(values):
        raise UsageError("the reward failed for every held-out row; the run has no figure to compare")
    return {"rows": len(values), name: float(np.mean(values))}


def _lengths(drawn: Sequence[Completion]) -> Mapping[str, float]:
    return {
        "tokens": float(np.mean([len(completion.ids) for completion in drawn])),
        "ended": float(np.mean([completion.finish_reason == STOP for completion in drawn])),
    }
