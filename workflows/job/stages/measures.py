"""The measure of a held-out evaluation: the reward of responses; for distillation the divergence from the teacher; for
sft the loss.

- With rewards: ``reward`` of responses drawn at `evaluation.temperature` (0: greedy), scored as in training, and
  ``reward/NAME`` for each term.
- With an environment: ``reward`` of episodes, played the same way.
- distill: ``kl``, the mean over tokens of log p_student − log p_teacher, of responses that the student draws at the
  temperature of training: an estimate of the reverse KL.
- sft: ``loss``, the mean negative log-prob of the tokens of held-out responses.

With `evaluation.pass_at`, rewards also give ``pass@k``: the probability that one of k responses to a prompt passes,
``1 - C(n - c, k) / C(n, k)`` of n responses with c that pass (Chen et al., arXiv 2107.03374), the mean over prompts.
Figures of a further set of prompts begin with its name: ``aime/reward``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, Self

import msgspec
import numpy as np

from transferqueue.adapters.protocols import STOP, Completion, Generator, Ids, Prompt, Sampling, WeightSource
from transferqueue.adapters.stages.environments import Episode
from transferqueue.adapters.stages.generation import row_seed
from transferqueue.adapters.weights import copy_weights
from transferqueue.errors import UsageError, listing
from transferqueue.workflows.job.data.prompt_data import open_held_out
from transferqueue.workflows.job.data.sequence import NumberedPrompt, held_out_prompts
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.reward_terms.scorer import RewardScorer
from transferqueue.workflows.job.settings.job import EvaluationSettings, Job, ScorerSettings
from transferqueue.workflows.job.stages.episodes import JobEpisodes, PlayedEpisode
from transferqueue.workflows.job.stages.policy_weights import FixedWeights
from transferqueue.workflows.job.stages.rollout import sampling_of

_SEED: Final = 1_000_003
"""Added to the job's seed: held-out responses are drawn with other numbers than training's, and with the same ones in
each evaluation."""

OpenEngine = Callable[[], AbstractContextManager[Generator]]


class Measure(Protocol):
    """Figures of a version on held-out prompts."""

    def load(self, source: WeightSource, version: int) -> None:
        """Take the weights of a version."""

    def figures(self, prompts: Sequence[NumberedPrompt], samples: int) -> dict[str, Any]:
        """Measure them on these prompts, each with so many responses. Blocks."""


class HeldOut:
    """The sets of held-out prompts of a job with their measure."""

    def __init__(self, job: Job, prompts: Mapping[str, Sequence[NumberedPrompt]], measure: Measure) -> None:
        self._evaluation, self._prompts, self._measure = job.evaluation, prompts, measure
        self._samples = {each.name: each.samples for each in job.evaluation.sets}

    def load(self, source: WeightSource, version: int) -> None:
        """Take the weights of a version."""
        self._measure.load(source, version)

    def figures(self) -> dict[str, Any]:
        """Return the figures of all sets. Blocks. `UsageError` if `evaluation.figure` is not among them."""
        found: dict[str, Any] = {}
        for name, prompts in self._prompts.items():
            samples = self._samples.get(name) or self._evaluation.samples
            figures = self._measure.figures(prompts, samples)
            found |= {f"{name}/{figure}" if name else figure: value for figure, value in figures.items()}
        if self._evaluation.figure and self._evaluation.figure not in found:
            raise UsageError(
                f"evaluation.figure={self._evaluation.figure!r} is not among the figures of this evaluation, "
                f"{listing(found)}; give one of them"
            )
        return found


@contextmanager
def held_out(job: Job, open_engine: OpenEngine) -> Iterator[HeldOut]:
    """Open the held-out prompts and their measure. open_engine: opens a generator, if responses are drawn.

    Raises as `open_held_out` does, and `UsageError` if no held-out prompt is short enough.
    """
    tokenizer = load_tokenizer(job.model)
    prompts = held_out_prompts(open_held_out(job, tokenizer), job)
    with _measure(job, open_engine, tokenizer) as measure:
        yield HeldOut(job, prompts, measure)


@contextmanager
def _measure(job: Job, open_engine: OpenEngine, tokenizer: TextTokenizer) -> Iterator[Measure]:
    if job.algorithm.kind == "sft":
        yield HeldOutLoss(job)
        return
    sampling = held_out_sampling(job)
    with open_engine() as engine:
        if job.algorithm.kind == "distill":
            yield TeacherDivergence(job, engine, sampling)
        elif job.environment:
            with EpisodeReward(job, engine, sampling, tokenizer) as measure:
                yield measure
        else:
            with RewardScorer(job, tokenizer) as scorer:
                yield ResponseReward(job, engine, sampling, scorer)


def held_out_sampling(job: Job) -> Sampling:
    """Return how held-out responses are drawn: as in training for distill, at `evaluation.temperature` otherwise."""
    drawn = sampling_of(job)
    temperature = job.sampling.temperature if job.algorithm.kind == "distill" else job.evaluation.temperature
    return Sampling(tokens_max=drawn.tokens_max, temperature=temperature, stop_ids=drawn.stop_ids)


class _Drawing:
    """Draws responses to prompts."""

    def __init__(self, job: Job, engine: Generator, sampling: Sampling) -> None:
        self._job, self._engine, self._sampling = job, engine, sampling

    def load(self, source: WeightSource, version: int) -> None:
        """Give the engine the weights."""
        self._engine.update_weights(source, version)

    def _drawn(self, prompts: Sequence[NumberedPrompt], samples: int) -> list[Completion]:
        seed = self._job.seed + _SEED
        requested = [
            Prompt(ids=prompt.ids, samples=samples, seed=row_seed(seed, prompt.number), images=prompt.images)
            for prompt in prompts
        ]
        drawn = self._engine.generate(requested, self._sampling)
        return sorted(drawn, key=lambda completion: (completion.prompt, completion.sample))


class ResponseReward(_Drawing):
    """The mean reward of responses, by the reward functions of the job."""

    def __init__(self, job: Job, engine: Generator, sampling: Sampling, scorer: RewardScorer) -> None:
        super().__init__(job, engine, sampling)
        self._scorer = scorer

    def figures(self, prompts: Sequence[NumberedPrompt], samples: int) -> dict[str, Any]:
        """``rows`` (scored), ``reward``, ``reward/NAME``, ``pass@k``, ``tokens`` (mean), ``ended`` (share that drew an
        end token), ``failed`` if a reward did."""
        drawn = self._drawn(prompts, samples)
        scores = self._scorer.score(
            ids=[prompts[completion.prompt].number for completion in drawn],
            data=[prompts[completion.prompt].data for completion in drawn],
            prompt_ids=[prompts[completion.prompt].ids for completion in drawn],
            response_ids=[completion.ids for completion in drawn],
        )
        kept = ~scores.failed
        terms = {
            f"reward/{name}": float(np.nanmean(term))
            for name, term in zip(self._scorer.names, scores.terms[kept].T, strict=True)
            if not np.isnan(term).all()
        }
        failed = {"failed": len(scores.failures)} if scores.failures else {}
        prompts_of = [completion.prompt for completion, is_kept in zip(drawn, kept, strict=True) if is_kept]
        passed = pass_figures(prompts_of, scores.rewards[kept], self._job.evaluation)
        return {**_mean("reward", scores.rewards[kept]), **terms, **passed, **failed, **_lengths(drawn)}


class EpisodeReward(_Drawing):
    """The mean reward of episodes, by the environment of each prompt."""

    def __init__(self, job: Job, engine: Generator, sampling: Sampling, tokenizer: TextTokenizer) -> None:
        super().__init__(job, engine, sampling)
        slots = max(each.slots for each in job.engine)
        held_out_job = msgspec.structs.replace(job, seed=job.seed + _SEED)
        self._play = JobEpisodes(engine, FixedWeights(), sampling, held_out_job, slots=slots, tokenizer=tokenizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._play.close()

    def figures(self, prompts: Sequence[NumberedPrompt], samples: int) -> dict[str, Any]:
        """``rows``, ``reward``, ``pass@k``, ``turns`` and ``tokens`` (means); ``failed`` if an environment did."""
        rows = [
            PlayedEpisode(prompt.ids, prompt.data, prompt.number, prompt.number * samples + sample, prompt.environment)
            for prompt in prompts
            for sample in range(samples)
        ]
        ended = list(self._play.played(rows))
        whole = [(at, episode) for at, episode in ended if isinstance(episode, Episode)]
        episodes = [episode for _, episode in whole]
        rewards = np.array([self._play.reward(rows[at], episode) for at, episode in whole])
        failed = {"failed": len(ended) - len(episodes)} if len(episodes) < len(ended) else {}
        return {
            **_mean("reward", rewards),
            **pass_figures([at // samples for at, _ in whole], rewards, self._job.evaluation),
            **(_lengths_of(episodes) if episodes else {}),
            **failed,
        }


def _lengths_of(episodes: Sequence[Episode]) -> dict[str, float]:
    return {
        "turns": float(np.mean([episode.turns for episode in episodes])),
        "tokens": float(np.mean([sum(episode.trajectory.drawn) for episode in episodes])),
    }


class TeacherDivergence(_Drawing):
    """The divergence of the student from the teacher."""

    def __init__(self, job: Job, engine: Generator, sampling: Sampling) -> None:
        from transferqueue.adapters.scoring import LogProbs, load_causal_lm
        from transferqueue.workflows.job.stages.score import load_scorer

        super().__init__(job, engine, sampling)
        self._teacher = LogProbs(
            load_scorer(load_causal_lm, job.teacher, job.model),
            temperature=job.sampling.temperature,
            tokens=job.teacher.tokens,
        )

    def figures(self, prompts: Sequence[NumberedPrompt], samples: int) -> dict[str, Any]:
        """``rows``, ``kl`` (nats a token), ``tokens`` (mean), ``ended``."""
        drawn = self._drawn(prompts, samples)
        (teacher,) = self._teacher.in_order(
            [prompts[completion.prompt].ids for completion in drawn], [completion.ids for completion in drawn]
        )
        teacher_N = np.concatenate(teacher)
        student_N = np.concatenate([completion.logprobs for completion in drawn])
        return {"rows": len(drawn), "kl": float(np.mean(student_N - teacher_N)), **_lengths(drawn)}


class HeldOutLoss:
    """The mean negative log-prob of the tokens of held-out responses."""

    def __init__(self, job: Job) -> None:
        from transferqueue.adapters.scoring import LogProbs, load_causal_lm
        from transferqueue.workflows.job.stages.score import load_scorer

        self._model = load_scorer(load_causal_lm, ScorerSettings(), job.model)
        self._logprobs = LogProbs(self._model, tokens=job.trainer.micro_tokens)

    def load(self, source: WeightSource, version: int) -> None:
        """Copy the weights into the model."""
        copy_weights(source, self._model)

    def figures(self, prompts: Sequence[NumberedPrompt], samples: int) -> dict[str, Any]:
        """``rows`` and ``loss`` (nats a token that is learned)."""
        responses = [_response(prompt) for prompt in prompts]
        logprobs_N = np.concatenate(self._logprobs.in_order([prompt.ids for prompt in prompts], responses)[0])
        learned_N = np.concatenate([_learned(prompt) for prompt in prompts])
        return {"rows": len(prompts), "loss": float(-np.mean(logprobs_N[learned_N]))}


def pass_figures(
    prompts: Iterable[int], rewards: Sequence[float] | Any, evaluation: EvaluationSettings
) -> dict[str, float]:
    """Return ``pass@k`` for each k of `evaluation.pass_at` that a prompt has responses for; the mean over those
    prompts. prompts: of each response.

    >>> pass_figures([0, 0, 0, 0], [1.0, 0.0, 0.0, 1.0], EvaluationSettings(pass_at=(1, 2)))
    {'pass@1': 0.5, 'pass@2': 0.8333333333333334}
    """
    drawn, passed = Counter[int](), Counter[int]()
    for prompt, reward in zip(prompts, rewards, strict=True):
        drawn[prompt] += 1
        passed[prompt] += bool(reward >= evaluation.pass_reward)
    estimates = {
        k: [1.0 - math.comb(n - passed[prompt], k) / math.comb(n, k) for prompt, n in sorted(drawn.items()) if n >= k]
        for k in evaluation.pass_at
    }
    return {f"pass@{k}": sum(each) / len(each) for k, each in estimates.items() if each}


def _response(prompt: NumberedPrompt) -> Ids:
    if prompt.response_ids is None:
        raise UsageError(
            f"held-out prompt {prompt.number} has no response; sft needs data.response in the held-out data too"
        )
    return prompt.response_ids


def _learned(prompt: NumberedPrompt) -> Any:
    return np.ones(len(_response(prompt)), bool) if prompt.learned is None else prompt.learned


def _mean(name: str, values: Any) -> dict[str, Any]:
    if not len(values):
        raise UsageError("the reward failed for every held-out row; the run has no figure to compare")
    return {"rows": len(values), name: float(np.mean(values))}


def _lengths(drawn: Sequence[Completion]) -> Mapping[str, float]:
    return {
        "tokens": float(np.mean([len(completion.ids) for completion in drawn])),
        "ended": float(np.mean([completion.finish_reason == STOP for completion in drawn])),
    }
