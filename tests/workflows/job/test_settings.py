"""A job file: what it may say, what it leaves open, and what is refused before anything starts."""

import json
import re
import tomllib

import msgspec
import pytest

from transferqueue.errors import Impossible, NotFound, TransferQueueError, UsageError
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.environment_factories import environments_of
from transferqueue.workflows.job.settings.job import DataSettings, EngineSettings, Job, ModelSettings
from transferqueue.workflows.job.settings.read import checked, job_from_file, job_from_values
from transferqueue.workflows.job.settings.sizes import (
    batch_rows,
    lora_requests,
    rows_ahead,
    rows_kept,
    staleness_when_new,
)
from transferqueue.workflows.job.settings.write import job_as_toml

GRPO = """
model = { path = "models/tiny" }
data = { path = "data/sums.jsonl", template = "{question}" }
engine = [{ kind = "transformers" }]
reward = [{ function = "my_rewards:exact" }]
algorithm = { kind = "grpo", old = "trainer", tis_max = 2.0 }
"""
SIMPLE = GRPO.replace(', old = "trainer", tis_max = 2.0', "")
PPO = """
steps = 500
model = { path = "models/sft" }
data = { path = "data/prompts.parquet" }
engine = [{ kind = "vllm", count = 2 }]
sampling = { group_size = 1 }
reward = [{ model = "models/reward" }]
algorithm = { kind = "ppo", kl = 0.05, kl_in = "reward", kl_estimator = "k1", minibatches = 4 }
reference = { path = "models/sft" }
critic = { path = "models/reward" }
trainer = { prompts_per_step = 128, parallel = "fsdp2", ranks = 4 }
"""
DISTILL = """
model = { path = "models/Qwen2.5-0.5B" }
data = { path = "data/prompts.jsonl" }
engine = [{ kind = "vllm" }]
sampling = { group_size = 1 }
algorithm = { kind = "distill", top_k = 64 }
teacher = { path = "models/Qwen2.5-7B" }
"""
SFT = """
model = { path = "models/base" }
data = { path = "data/answers.jsonl", response = "answer" }
algorithm = { kind = "sft" }
"""


@pytest.fixture
def job_file(tmp_path):
    def written(text):
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


TWO = 'reward=[] ; environment=[{factory="c:a"}, {function="c:b"}]'
SOURCES = 'data.path="" ; data.sources=[{{path="x", environment="{}"}}, {{path="y", environment="{}"}}]'
# What the file says (the changes to it), and the words of the refusal.
REFUSED = [
    # keys
    (GRPO, "trainer.micro_token=1024", "trainer.micro_token: there is no such key; did you mean micro_tokens?"),
    (GRPO, "optim={lr=1e-6}", "optim: there is no such table; see critic.lr, trainer.lr"),
    (GRPO, "data.lr=1e-6", "data.lr: there is no such key; see critic.lr, trainer.lr"),
    (GRPO, "trainer.learning_rate=1e-6", "trainer.learning_rate: there is no such key; see trainer.lr"),
    (GRPO, "trainer.num_generations=4", "see sampling.group_size"),
    (GRPO, "stepps=3", "stepps: there is no such key; did you mean steps?"),
    (GRPO, "engine.0.slot=3", "engine.0.slot: there is no such key; did you mean slots?"),
    (GRPO, "wholly_unknown=3", "wholly_unknown: there is no such key; there are model, data"),
    # values of one key
    (GRPO, "trainer.ranks=two", "trainer.ranks='two': give an integer, at least 1 and at most 1024"),
    (GRPO, "trainer.ranks=2.5", "trainer.ranks=2.5: give an integer, at least 1"),
    (GRPO, "engine.0.devices=gpu", 'engine.0.devices=\'gpu\': give an array of integer, or "auto", "cpu"'),
    (GRPO, "sampling.stop=x", "sampling.stop='x': give an array of string"),
    (GRPO, "trainer=fast", "trainer='fast': give a table"),
    (GRPO, 'reward={function="a:b"}', "reward={'function': 'a:b'}: give an array of tables: [[reward]]"),
    (GRPO, "data.columns=x", "data.columns='x': give a table"),
    (GRPO, "data.columns={a=1}", "data.columns={'a': 1}: its values: give str, got int"),
    (GRPO, "pacing.mode=asynch", "pacing.mode='asynch': give sync, delayed, async, colocated; did you mean async?"),
    (GRPO, "engine.0.kind=vlm", "engine.0.kind='vlm': give builtin, transformers, vllm, .* ; did you mean vllm?"),
    (GRPO, "sampling.temperature=0", "sampling.temperature=0.0: give more than 0"),
    (GRPO, "trainer.lr=-1e-6", "trainer.lr=-1e-06: give more than 0"),
    (GRPO, "trainer.lr=nan", "trainer.lr=nan: give more than 0"),
    (GRPO, "steps=0", "steps=0: give at least 1"),
    (GRPO, "algorithm.tis_max=0.5", "tis_max=0.5: give 0, or at least 1"),
    (GRPO, "model.dtype=float8", "model.dtype='float8': give float32, bfloat16, float16"),
    (GRPO, 'model.path=""', 'model.path="": required'),
    (GRPO, 'reward.0.function="exact"', "reward.0.function='exact' is not named as \"module:function\""),
    (GRPO, "engine.1.count=2", "engine.1.count: '1' is no place in an array of 1"),
    # what contradicts
    (PPO, 'critic.path=""', 'kind="ppo" needs critic.path'),
    (GRPO, 'critic.path="models/x"', "critic.path='models/x' is read by ppo alone"),
    (DISTILL, 'teacher.path=""', 'kind="distill" needs teacher.path'),
    (GRPO, 'teacher.path="models/x"', "teacher.path='models/x' is read by distill alone"),
    (GRPO, 'reference.path="models/x"', "reference.path='models/x' with algorithm.kl=0: nothing reads"),
    (GRPO, "sampling.top_p=0.9", "sampling.top_p: responses are drawn from the whole distribution .* leave it out"),
    (GRPO, "algorithm.old=rollout", 'tis_max=2 with old="rollout": the mismatch would count twice'),
    (GRPO, "reward=[]", "kind='grpo' needs a reward"),
    (
        GRPO,
        "reward.0.model=models/x",
        "reward.0 has function and model of function, model; give exactly one",
    ),
    (GRPO, 'reward=[{model="m",args={ouput="score"}}]', "reward.0.args.ouput: a reward model takes output alone"),
    (
        GRPO,
        'reward=[{model="m",args={output="logit"}}]',
        'reward.0.args.output=\'logit\': give "score" or "probability"',
    ),
    (GRPO, "reward=[{weight=1.0}]", "reward.0 has none of function, model"),
    (GRPO, 'environment=[{factory="c:d"}]', "reward with environment: episodes bring their own rewards"),
    (SFT, 'environment=[{factory="c:d"}]', 'environment with kind="sft"'),
    (GRPO, 'reward=[] ; environment=[{factory="c"}]', "environment.0.factory='c' is not named as"),
    (
        GRPO,
        'reward=[] ; environment=[{factory="c:d", url="http://h"}]',
        "environment.0 has factory and url of agent, factory",
    ),
    (GRPO, 'reward=[] ; environment=[{url="h:1"}]', "environment.0.url='h:1': give an address such as"),
    (GRPO, 'reward=[] ; environment=[{url="http://[::1"}]', "environment.0.url='http://[::1': give an address such"),
    (GRPO, 'reward=[] ; environment=[{url="http://h:x"}]', "environment.0.url='http://h:x': give an address such"),
    (GRPO, 'reward=[] ; environment=[{url="http://"}]', "environment.0.url='http://': give an address such"),
    (
        GRPO,
        'reward=[] ; environment=[{factory="c:d", name="-d"}]',
        "environment.0.name='-d': give up to 64 ASCII letters",
    ),
    (GRPO, 'reward=[] ; environment=[{factory="c:größe"}]', "environment.0.name='größe': give up to 64 ASCII letters"),
    (
        GRPO,
        'reward=[] ; environment=[{factory="c:d", name="a/b"}]',
        "environment.0.name='a/b': give up to 64 ASCII letters",
    ),
    (
        GRPO,
        'reward=[] ; environment=[{url="http://h", args={x=1}}]',
        "environment.0.args.x: with a url, args has action",
    ),
    (GRPO, 'reward=[] ; environment=[{factory="c:d", weight=0.0}]', "environment.0.weight=0.0: give a finite number"),
    (GRPO, f"{TWO} ; environment.1.name=a", "environment has the names a, a; give each another one"),
    (GRPO, TWO, "2 environments, and data.path for all: give each its data and its share of the prompts"),
    (GRPO, f"{TWO} ; {SOURCES.format('a', 'a')}", "no data source names environment b: it would play no row"),
    (GRPO, f"{TWO} ; {SOURCES.format('a', 'bb')}", "data.sources.1.environment='bb': the job has a, b; did you mean b"),
    (GRPO, f'{TWO} ; {SOURCES.format("a", "b")} ; data.sources.1.environment=""', "no data source names environment b"),
    (
        GRPO,
        f"{TWO} ; {SOURCES.format('a', 'b')} ; evaluation.path=x",
        "evaluation.environment: required with several environments; give one of a, b",
    ),
    (
        GRPO,
        'reward=[] ; environment=[{factory="c:d"}] ; evaluation={path="x", environment="e"}',
        "environment='e': the",
    ),
    (GRPO, "sampling.group_size=4 ; sampling.group_min=5", "group_min=5 with group_size=4: no group has so many"),
    (GRPO, "sampling.refills=2", "sampling.refills=2 without an environment: only a response whose"),
    (GRPO, "sampling.group_min=1", "sampling.group_min=1: give 0, or at least 2: a response that is alone"),
    (
        PPO,
        "sampling.group_min=2 ; sampling.group_size=2",
        "group_min=2 with kind='ppo', whose rows are trained one by one",
    ),
    (GRPO, "reward.0.weight=0.0", "reward.0.weight=0.0: every weight is 0, so nothing is rewarded; set one"),
    (SFT, 'reward=[{function="a:b"}]', 'reward with kind="sft"'),
    (GRPO, "data.response=answer", "data.response='answer' is read by sft alone"),
    (GRPO, 'evaluation={path="e", response="answer"}', "evaluation.response='answer' is read by sft alone"),
    (
        GRPO,
        'log.to=["tensorbord"]',
        "log.to.0='tensorbord': give tensorboard, wandb, mlflow, or a function of your own",
    ),
    (GRPO, "algorithm.std=none ; algorithm.std_eps=1e-6", 'std_eps=1e-06 with kind="grpo", std="none": no reward is'),
    (GRPO, "algorithm.kind=dr_grpo ; algorithm.std_eps=0", 'std_eps=0 with kind="dr_grpo", std="none"'),
    (GRPO, "algorithm.kind=rloo ; algorithm.std=sample ; algorithm.std_eps=0", 'std_eps=0 with kind="rloo"'),
    (PPO, "algorithm.std_eps=1e-6", 'std_eps=1e-06 with kind="ppo"'),
    (GRPO, "algorithm.top_k=8", "top_k=8 is read by distill alone"),
    (GRPO, "algorithm.token_staleness.mask=9", "token_staleness.mask=9 with .* so none would be left out; give less"),
    (
        GRPO,
        "reproducible=true ; pacing={mode='async', depth=2} ; algorithm.token_staleness.mask=1",
        "token_staleness.mask=1 with reproducible=true: all tokens of a step have the same version",
    ),
    (SFT, "algorithm.router_replay=true", 'router_replay=true with kind="sft": no engine draws its tokens'),
    (
        GRPO,
        "algorithm.router_replay=true ; engine.0.kind=builtin",
        'router_replay=true with engine.0.kind="builtin": it gives no routes; set kind="transformers" or "vllm"',
    ),
    (
        GRPO,
        "algorithm.router_replay=true ; algorithm.epochs=2",
        'router_replay=true with old="trainer": those log-probs are computed without routes',
    ),
    (
        GRPO,
        "algorithm.router_replay=true ; trainer.gradient_checkpointing=true",
        'gradient_checkpointing=True, parallel="single": layers that are computed again, or sharded, choose experts',
    ),
    (GRPO, "algorithm.token_staleness.mask=-1", "token_staleness.mask=-1: give at least 0: 0 leaves no token out"),
    (
        GRPO,
        "engine.0.kind=vllm ; engine.0.options.enable_lora=true",
        "engine.0.options.enable_lora with a job that publishes no adapters apart (trainer.lora_rank=0",
    ),
    (
        GRPO,
        "engine.0.kind=vllm ; engine.0.tensor_parallel=2 ; engine.0.options.enable_lora=true ; trainer.lora_rank=8",
        "vLLM would compute their products for nothing; leave it out",
    ),
    (
        GRPO,
        "engine.0.kind=vllm ; engine.0.options={enable_lora=true, max_lora_rank=16} ; trainer.lora_rank=20",
        "engine.0.options.max_lora_rank=16 is less than trainer.lora_rank=20; leave it out",
    ),
    (
        GRPO,
        "engine.0.kind=vllm ; engine.0.options.enable_lora=true ; trainer.lora_rank=1024",
        "enable_lora with trainer.lora_rank=1024: vLLM takes adapters up to rank 512; leave it out",
    ),
    (GRPO, "weights.lora=merged", 'weights.lora="merged" with lora_rank=0: there are no adapters; leave it out'),
    (
        GRPO,
        "trainer.lora_rank=8 ; weights.lora=adapter ; engine.0.kind=vllm ; engine.0.tensor_parallel=2",
        'weights.lora="adapter" with engine.0.tensor_parallel=2, which takes merged weights alone; leave it out',
    ),
    (
        GRPO,
        "weights.kv=keep ; pacing.mode=sync",
        'weights.kv="keep": no request runs while weights change, unless pacing.mode="async"',
    ),
    (
        GRPO,
        'weights.kv=salt ; pacing.mode=async ; engine=[{kind="sglang_server",url="http://h:1"}]',
        'kv="salt" with engine.0.kind="sglang_server", which cannot do that; kinds that can: builtin, transformers',
    ),
    (SFT, "pacing.staleness_of=mean", 'staleness_of="mean" with kind="sft": its rows have no column of token versions'),
    (
        GRPO,
        "reproducible=true ; pacing={mode='async', depth=2, staleness_of='newest'}",
        'staleness_of="newest" with reproducible=true: all tokens of a step have the same version; leave it out',
    ),
    (
        GRPO,
        "pacing={mode='delayed', staleness_of='mean'}",
        "staleness_of=\"mean\" with mode='delayed' .* all tokens of a row have the same version; leave it out",
    ),
    (
        GRPO,
        "pacing={mode='async', staleness_of='mean'} ; weights.in_flight=false",
        "weights.in_flight=false: all tokens of a row have the same version; leave it out",
    ),
    (SFT, "algorithm.token_staleness.mask=1", 'mask=1 with kind="sft": no version drew its tokens'),
    (GRPO, "algorithm={clip_low=0.3, clip_high=0.2}", "clip_high=0.2 is below clip_low=0.3"),
    (PPO, "trainer.stream=on", 'whiten with stream="on": whitening needs the batch; use stream="auto"'),
    (GRPO, "algorithm.epochs=2 ; trainer.stream=on", 'epochs=2, minibatches=1 with stream="on"'),
    (GRPO, "trainer.betas=[0.9, 2.0]", "trainer.betas.1=2.0: give at least 0 and below 1: they are decays"),
    (GRPO, "trainer.betas=[nan, 0.9]", "trainer.betas.0=nan: give at least 0 and below 1"),
    (GRPO, "engine.0.count=1000000", "engine.0.count=1000000: give at least 1 and at most 1024: they are processes"),
    (GRPO, "queue.memory_gib=1e300", "queue.memory_gib=1e+300: give more than 0 and at most 1.04858e+06"),
    (GRPO, "steps=99999999999999999999", "steps=99999999999999999999: give at least 1 and at most 1e+09"),
    (GRPO, 'name="../up"', "name='../up': it is part of the folder of a run"),
    (GRPO, 'name="\\u0000"', "name='\\x00': it is part of the folder"),
    (GRPO, f"name={'n' * 300}", "give at most 200 bytes of printable text without a slash"),
    (GRPO, "trainer.ranks=2", 'ranks=2 with parallel="single"'),
    (
        GRPO,
        "pacing.mode=colocated ; engine.0={kind='vllm_server', url='http://x'}",
        'mode="colocated" with engine.kind=\'vllm_server\': a server has devices of its own .* mode="sync"',
    ),
    (GRPO, "pacing.mode=colocated ; engine.0.count=2", 'mode="colocated" with 2 engine processes: .* mode="sync"'),
    (
        GRPO,
        "pacing.mode=colocated ; trainer={parallel='ddp', ranks=2}",
        'mode="colocated" with 2 trainer.ranks: one process generates and trains',
    ),
    (GRPO, "pacing.mode=colocated ; on=ray", 'mode="colocated" with on="ray": .* leave it out, or set mode="sync"'),
    (GRPO, "pacing.mode=colocated ; trainer.stream=on", 'mode="colocated" with trainer.stream="on"'),
    (
        GRPO,
        "pacing.mode=colocated ; engine.0.devices=[0] ; trainer.devices=[1]",
        'mode="colocated" with engine.0.devices=[0] and trainer.devices=[1]: both use one device in turn',
    ),
    (GRPO, "pacing={mode='colocated', over_sample=1.5}", "over_sample=1.5 with mode='colocated': rows would be"),
    (GRPO, "pacing={mode='colocated', max_staleness=1}", "a synchronous job has 0 of both"),
    (SFT, "pacing.mode=colocated", 'mode="colocated" with kind="sft", which generates nothing'),
    (GRPO, "engine.0.url=http://x", "engine.0.url='http://x' with kind='transformers', which runs here"),
    (GRPO, "engine.0.kind=openai", "engine.0.kind='openai' needs engine.0.url"),
    (
        GRPO,
        "steps=10 ; engine.0={kind='openai', url='http://x'}",
        "step 10 would train rows that are 9 versions old; pacing.max_staleness=1 allows 2 steps",
    ),
    (GRPO, "engine.0={kind='sglang_server', url='http://x'}", 'engine.0.options has no "weights": give an empty'),
    (GRPO, "engine.0.kind=factory", 'an engine of your own has kind="factory" and names its function'),
    (GRPO, "engine.0.factory=mine:engine", "engine.0.kind='transformers' with engine.0.factory='mine:engine'"),
    (GRPO, "engine.0={kind='factory', factory='mine'}", "engine.0.factory='mine' is not named as"),
    (GRPO, "reproducible=true ; engine.0.kind=vllm", "reproducible=true with engine.0.kind='vllm', which batches"),
    (
        GRPO,
        "reproducible=true ; engine.0={kind='openai', url='http://x'}",
        "reproducible=true with engine.0.kind='openai'",
    ),
    (
        GRPO,
        "reproducible=true ; sampling.budget=64",
        "reproducible=true with sampling.budget=64: responses .* in parts",
    ),
    (
        GRPO,
        "reproducible=true ; pacing={mode='sync', over_sample=1.5}",
        "reproducible=true with pacing.over_sample=1.5",
    ),
    (
        GRPO,
        "reproducible=true ; evaluation={path='x', patience=2}",
        "reproducible=true with evaluation.patience=2: training goes on",
    ),
    (
        GRPO,
        "reproducible=true ; engine=[{kind='transformers'}, {kind='transformers', options={dtype='float16'}}]",
        "reproducible=true with engine.1, whose kind, model or options are not those of engine.0",
    ),
    (
        GRPO,
        "reproducible=true ; algorithm.kl=0.1 ; reference.sync_every=5",
        "reproducible=true with reference.sync_every=5: the time would decide",
    ),
    (
        GRPO,
        "reproducible=true ; algorithm.filter_equal=true",
        "mode='async' with algorithm.filter_equal=true: later prompts .* set pacing.mode=\"sync\"",
    ),
    (
        GRPO,
        "reproducible=true ; reward.0.on_error=drop",
        "mode='async' with reward.0.on_error=\"drop\": later prompts",
    ),
    (
        GRPO,
        f"reproducible=true ; {TWO} ; {SOURCES.format('a', 'b')} ; environment.1.on_error=drop",
        "mode='async' with environment.1.on_error=\"drop\": later prompts",
    ),
    (
        GRPO,
        'reproducible=true ; pacing.mode=sync ; sampling.refills=1 ; reward=[] ; environment=[{factory="c:d"}]',
        "reproducible=true with sampling.refills=1: an environment that is late once would give the row other tokens",
    ),
    (GRPO, "reproducible=true ; on=ray", 'with on="ray" and ray.replicas=1: later prompts'),
    (
        GRPO,
        "reproducible=true ; data.sampler.by=pass_rate",
        "with data.sampler.by='pass_rate': the time would decide which pass rates are known",
    ),
    (
        GRPO,
        "reproducible=true ; data.sampler.by=pass_rate ; pacing.mode=sync ; algorithm.filter_equal=true",
        "the time would decide .* drop no rows",
    ),
    (
        GRPO,
        "reproducible=true ; data.sampler.by=pass_rate ; pacing.mode=sync ; on=ray ; ray.replicas=2",
        'the time would decide .* leave on="ray" out',
    ),
    (GRPO, "data.sampler.low=0.1", "data.sampler without by"),
    (GRPO, "data.sampler.by=rate", "data.sampler.by='rate': give \"pass_rate\", or a function"),
    (GRPO, "data.sampler={by='pass_rate', low=0.9}", "data.sampler.low=0.9 is above high=0.8"),
    (GRPO, "data.sampler.by=pass_rate ; data.epochs=9", "data.epochs=9 with data.sampler: prompts come again"),
    (PPO, "data.sampler.by=pass_rate", "kind='ppo', which compares no responses to a prompt"),
    (
        GRPO,
        "algorithm={kind='reinforce_pp', filter_equal=true, tis_max=0} ; algorithm.old=rollout",
        "filter_equal with kind='reinforce_pp', whose rows are trained one by one",
    ),
    (GRPO, "engine.0.tensor_parallel=2", 'tensor_parallel=2 with kind="transformers"'),
    (GRPO, "trainer.warmup=100", "warmup=100 of steps=100"),
    (GRPO, "algorithm.overlong_buffer=600", "overlong_buffer=600 is more than tokens_max=512"),
    # rows that are trained again
    (GRPO, "pacing.uses=0", "pacing.uses=0: give .* 1 trains each row once"),
    (GRPO, "pacing.uses=2 ; pacing.max_staleness=1", "uses=2 with max_staleness=1 and mode='async' .* at least 2 vers"),
    (GRPO, "pacing.uses=2 ; pacing.mode=sync ; pacing.max_staleness=0", "uses=2 with max_staleness=0 and mode='sync'"),
    (GRPO, "pacing.uses=2 ; pacing.mode=sync ; pacing.max_staleness=2", "max_staleness=2, 1 of it for uses=2: a sync"),
    (
        GRPO,
        "pacing.uses=3 ; weights.every=2 ; pacing.max_staleness=3",
        "set pacing.max_staleness=4, or weights.every=1",
    ),
    (GRPO, "pacing.uses=2 ; checkpoint.every=0", "pacing.uses=2 with checkpoint.every=0: a trainer that dies would"),
    (
        GRPO,
        "pacing.uses=2 ; algorithm.old=trainer ; algorithm.minibatches=2",
        'pacing.uses=2 with old="trainer" and epochs=1, minibatches=2: those log-probs are computed once',
    ),
    (
        GRPO,
        "pacing.uses=2 ; algorithm.tis_max=2.0 ; algorithm.epochs=2",
        'pacing.uses=2 with old="trainer" and epochs=2',
    ),
    (GRPO, "pacing.uses=2 ; algorithm.tis_max=0.0", 'pacing.uses=2 with old="trainer" and no tis_max: nothing would'),
    (SIMPLE, "pacing.uses=2 ; algorithm.tis_max=0.0", 'pacing.uses=2 with old="trainer" and no tis_max: nothing would'),
    (PPO, "pacing.uses=2", 'pacing.uses=2 with kind="ppo": its critic takes each row once .* set algorithm.epochs'),
    (DISTILL, "pacing.uses=2", 'pacing.uses=2 with kind="distill": its loss has no ratio'),
    (SFT, "pacing.uses=2", 'pacing.uses=2 with kind="sft": its rows are the data; leave it out, and set data.epochs'),
    (
        GRPO,
        "pacing.uses=2 ; pacing.mode=sync ; reproducible=true ; on=ray",
        'pacing.uses=2 and reproducible=true with on="ray"',
    ),
    # what could never progress
    (GRPO, "sampling.group_size=1", "group_size=1 with grpo: all advantages are 0"),
    (GRPO, "algorithm.kind=rloo ; sampling.group_size=1", "group_size=1 with rloo"),
    (PPO, "algorithm.filter_equal=true", "filter_equal with group_size=1"),
    (GRPO, "algorithm.minibatches=33", "minibatches=33 of prompts_per_step=32"),
    (GRPO, 'trainer={parallel="ddp", ranks=33}', "ranks=33 share prompts_per_step=32"),
    (GRPO, "trainer.at_least=33", "at_least=33 is more than the prompts_per_step=32"),
    (GRPO, "engine=[]", "engine=[] with kind='grpo': nothing would generate"),
    (
        GRPO,
        "reproducible=true ; checkpoint.every=0",
        "checkpoint.every=0: a trainer that dies would go on with new mom",
    ),
    (GRPO, "trainer.order=ordinal", "trainer.order: there is no such key; see reproducible"),
    (GRPO, "dispatch.kind=length ; reproducible=true", 'dispatch.kind="length" with reproducible=true'),
    (SFT, "dispatch.kind=length", 'dispatch.kind="length" with kind="sft": nothing is generated'),
    (GRPO, "trainer.micro_tokens=1535", "1024 + tokens_max=512 = 1536 tokens; give at least 1536"),
    (PPO, "critic.tokens=1000", "critic.tokens=1000 is under one row"),
    (
        GRPO,
        "pacing.mode=sync ; pacing.max_staleness=1",
        "mode='sync' with depth=None and max_staleness=1: .* 0 of both",
    ),
    (GRPO, "pacing.mode=sync ; pacing.depth=1", "mode='sync' with depth=1"),
    (GRPO, "pacing.mode=delayed ; pacing.depth=2", "a one-step delay is 1 of both"),
    (GRPO, "pacing.over_sample=1.25", "over_sample=1.25 with mode='async'"),
    (
        GRPO,
        "pacing.max_staleness=0",
        "mode='async' with depth=None and max_staleness=0: nothing could be generated ahead",
    ),
    (GRPO, "pacing.over_sample=1.5", "over_sample=1.5 with mode='async'"),
    (
        GRPO,
        "pacing={mode='sync', over_sample=2.5, max_staleness=1}",
        "over_sample=2.5 with max_staleness=1: .* 2 versions later",
    ),
    (GRPO, "pacing.mode=sync ; weights.every=2", "weights.every=2 with mode='sync'"),
    (GRPO, "pacing.mode=delayed ; weights.every=2", "weights.every=2 with mode='delayed': rows .* up to 1 steps older"),
    (
        GRPO,
        "pacing.mode=async ; weights.every=2",
        "weights.every=2 with max_staleness=1: .* 2 versions old .* set pacing.max_staleness=2",
    ),
    (
        DISTILL,
        "checkpoint.every=400 ; queue.memory_gib=2",
        (
            "checkpoint.every=400, top_k=64 keep 12,864 rows, up to 3.26 GiB; memory_gib=2; set queue.memory_gib=4, or "
            "checkpoint.every="
        ),
    ),
    # Ray
    (GRPO, "ray.replicas=2", 'ray with on="processes": nothing reads it; set on="ray"'),
    (
        GRPO,
        "on=ray ; queue.durability=disk",
        'queue.durability="disk" with on="ray": .* a snapshot beside each checkpoint',
    ),
    (GRPO, "on=ray ; queue.record=on", 'queue.record="on" with on="ray": the server of a run on Ray has no dir'),
    (GRPO, "queue.record=on ; queue.address=tcp://h:1", 'queue.record="on" with queue.address="tcp://h:1": that'),
    (GRPO, "queue.record=best_effort ; queue.address=tcp://h:1", 'queue.record="best_effort" with queue.address='),
    (GRPO, "on=ray ; engine=[{site='far'}] ; queue.address=tcp://h:1", 'engine.site="far" with on="ray": Ray places'),
    (GRPO, "on=slurm", "on='slurm': give processes, ray"),
    # memory
    (GRPO, "sampling.group_size=8192 ; queue.memory_gib=0.05", "a group of 8192 rows has up to"),
    (GRPO, "trainer.prompts_per_step=4096 ; queue.memory_gib=0.5", "are 65,536 rows, up to"),
    (GRPO, "data.sources=[{path='a.jsonl'}]", "data.path= .* with data.sources: both name the data"),
    (GRPO, "data.path=\"\" ; data.sources=[{path='a.jsonl'}] ; data.epochs=2", "data.epochs=2 with data.sources"),
    (GRPO, 'data.path=""', 'data.path="": required; a file or directory of prompts'),
    (GRPO, "data.path=\"\" ; data.sources=[{path=''}]", 'data.sources.0.path="": required'),
    (GRPO, "data.path=\"\" ; data.sources=[{path='a', weight=0}]", "data.sources.0.weight=0"),
    (GRPO, "data.turns=all", "data.turns=\"all\" with kind='grpo'"),
    (GRPO, "model.template_args={tokenize=true}", "model.template_args.tokenize: the job sets it itself"),
    (GRPO, "reference.sync_every=5", "reference.sync_every=5 with algorithm.kl=0: there is no reference"),
    (
        GRPO,
        "algorithm.kl=0.1 ; reference={path='other', sync_every=5}",
        "with reference.path='other': a reference that takes .* leave the path out",
    ),
    (GRPO, "trainer.lora_targets=['q_proj']", "lora_targets=['q_proj'] with lora_rank=0: there are no adapters"),
    (GRPO, "trainer.lora_rank=2 ; trainer.lora_targets=['a.q_proj']", "give the last part of a layer's name"),
    (GRPO, "trainer.lora_adapter=gone ; algorithm.kl=0.1", "the policy at its start has no directory of its own"),
    (GRPO, "trainer.lora_adapter=gone", "trainer.lora_adapter='gone' has no adapter_config.json"),
    (SFT, "algorithm.entropy=0.1", "entropy=0.1 with kind='sft', which explores nothing"),
    (GRPO, "evaluation.sets=[{name='a', path='x'}]", "evaluation.sets has 'a' without evaluation.path"),
    (
        GRPO,
        "evaluation.path=x ; evaluation.sets=[{name='a', path='x'}, {name='a', path='y'}]",
        "evaluation.sets.1.name='a': its figures begin with it",
    ),
    (GRPO, "evaluation.pass_at=[4]", "evaluation.pass_at has 4, and evaluation.samples=1 .* set evaluation.samples=4"),
    (GRPO, "evaluation.pass_at=[4] ; evaluation.samples=4", "with temperature=0: all responses .* are equal"),
    (GRPO, "evaluation.patience=2", "evaluation.patience=2 without evaluation.path"),
    (GRPO, "evaluation.figure=reward", "is compared by evaluation.patience and checkpoint.best; set one"),
    (
        GRPO,
        "evaluation.path=x ; evaluation.patience=2 ; evaluation.figure=aime/reward",
        "evaluation.figure='aime/reward': evaluations give reward",
    ),
]


@pytest.mark.parametrize(("text", "change", "words"), REFUSED, ids=[change for _, change, _ in REFUSED])
def test_a_job_is_refused_with_key_value_rule_and_remedy(job_file, text, change, words):
    with pytest.raises(UsageError, match=".*".join(map(re.escape, words.split(" .* ")))):
        job_from_file(job_file(text), set=change.split(" ; "))


@pytest.mark.parametrize(
    ("text", "change", "old", "tis_max"),
    [
        (DISTILL, "steps=9", "rollout", 0.0),
        (PPO, "steps=9", "rollout", 0.0),  # several updates a step
        (PPO, "algorithm.tis_max=3.0", "trainer", 3.0),
        (SIMPLE, "steps=9", "trainer", 2.0),
        (SIMPLE, "pacing.mode=delayed", "trainer", 2.0),
        (SIMPLE, "pacing.mode=sync", "rollout", 0.0),
        (SIMPLE, "pacing.mode=sync ; pacing.uses=2", "trainer", 2.0),
        (SIMPLE, "pacing.mode=sync ; pacing.uses=2 ; algorithm.minibatches=2", "rollout", 0.0),
        (SIMPLE, "pacing.mode=sync ; algorithm.tis_max=2.0", "trainer", 2.0),
        (SIMPLE, "algorithm.old=rollout", "rollout", 0.0),
        (SIMPLE, "algorithm.old=trainer", "trainer", 0.0),
        (SIMPLE, "algorithm.tis_max=0.0", "trainer", 0.0),
    ],
)
def test_rows_that_are_generated_ahead_are_corrected(job_file, text, change, old, tis_max):
    algorithm = job_from_file(job_file(text), set=change.split(" ; ")).algorithm
    assert (algorithm.old, algorithm.tis_max) == (old, tis_max)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ('url="http://127.0.0.1:8000"', "127-0-0-1"),
        ('url="ws://[::1]:8000"', "1"),
        ('url="https://games.example.org/chess"', "games-example-org"),
        ('url="http://spiele-münchen.de"', "spiele-m-nchen-de"),
        ('factory="c:_make"', "_make"),
        ('function="file.py:f", name="2nd-game"', "2nd-game"),
    ],
)
def test_every_environment_has_a_name_without_naming_it(job_file, environment, name):
    job = job_from_file(job_file(GRPO), set=["reward=[]", f"environment=[{{{environment}}}]"])
    assert [*environments_of(job)] == [name]


def test_what_could_never_progress_is_another_error_than_a_contradiction(job_file):
    with pytest.raises(Impossible):
        job_from_file(job_file(GRPO), set=["sampling.group_size=1"])
    with pytest.raises(TransferQueueError) as caught:
        job_from_file(job_file(PPO), set=['critic.path=""'])
    assert not isinstance(caught.value, Impossible)


@pytest.mark.parametrize("text", [GRPO, PPO, DISTILL, SFT], ids=["grpo", "ppo", "distill", "sft"])
def test_the_files_of_the_manual_are_jobs_and_resolve_to_themselves(job_file, text):
    job = job_from_file(job_file(text))
    assert job.name == "job"
    assert checked(job) == job
    assert job_from_values(tomllib.loads(job_as_toml(job))) == job


def test_what_has_no_engine_may_be_trained_in_order_and_messages_need_no_response_column(job_file):
    job = job_from_file(job_file(SFT), set=["reproducible=true", 'data.response=""'])
    assert (job.reproducible, job.data.response) == (True, "")
    assert job_from_file(job_file(GRPO), set=["reproducible=true"]).engine[0].kind == "transformers"


def test_what_a_job_leaves_open_is_filled_by_its_kind_and_mode(job_file):
    job = job_from_file(job_file(GRPO))
    assert (job.algorithm.std, job.algorithm.aggregate, job.algorithm.clip_high) == ("sample", "rows", 0.2)
    assert (job.pacing.depth, job.pacing.max_staleness, job.trainer.stream) == (1, 1, "on")
    assert job.model.tokenizer == "models/tiny"
    sync = job_from_file(job_file(GRPO), set=["pacing.mode=sync"])
    assert (sync.pacing.depth, sync.pacing.max_staleness) == (0, 0)
    ahead = job_from_file(job_file(GRPO), set=["pacing.max_staleness=3"])
    assert (ahead.pacing.depth, ahead.pacing.max_staleness) == (3, 3)
    ppo = job_from_file(job_file(PPO))
    assert ppo.trainer.stream == "off"


@pytest.mark.parametrize(
    ("change", "pacing"),
    [
        ("pacing.mode=sync", (0, 2)),
        ("pacing.mode=delayed", (1, 3)),
        ("pacing.mode=async", (1, 3)),
        ("pacing.max_staleness=5", (3, 5)),
        ("pacing.depth=2 ; weights.every=2", (2, 4)),
        ("pacing.mode=sync ; pacing.over_sample=1.5", (0, 3)),
    ],
)
def test_further_uses_of_rows_have_a_part_of_the_bound_on_staleness(job_file, change, pacing):
    """The rest is for new rows, as without further uses; so is what rows may be ahead."""
    once = job_from_file(job_file(GRPO), set=change.split(" ; ")) if "max" not in change else None
    job = job_from_file(job_file(GRPO), set=["pacing.uses=3", *change.split(" ; ")])
    assert (job.pacing.depth, job.pacing.max_staleness) == pacing
    assert staleness_when_new(job) == pacing[1] - 2
    assert once is None or (once.pacing.depth, once.pacing.max_staleness) == (pacing[0], pacing[1] - 2)
    assert checked(job) == job
    assert rows_kept(job) - rows_ahead(job) == (job.checkpoint.every + 2) * batch_rows(job)


def test_a_kl_term_without_a_reference_takes_the_model_as_it_begins(job_file):
    job = job_from_file(job_file(GRPO), set=["algorithm.kl=0.04"])
    assert job.reference.path == "models/tiny"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("trainer.lr=2e-6", 2e-6),
        ("trainer.lr=1", 1),
        ("data.path=data/other.jsonl", "data/other.jsonl"),
        ('data.path="with space.jsonl"', "with space.jsonl"),
        ("sampling.stop=['a', 'b']", ["a", "b"]),
        ("data.shuffle=false", False),
    ],
)
def test_a_change_is_toml_and_a_bare_word_a_text(change, value):
    values: dict = {}
    apply(values, change)
    table, key = change.partition("=")[0].split(".")
    assert values == {table: {key: value}}


def test_tables_merge_and_arrays_are_replaced():
    values = tomllib.loads(PPO)
    apply(values, "trainer={ranks=2}")
    apply(values, 'reward=[{function="a:b"}]')
    apply(values, "engine.0.count=3")
    assert values["trainer"] == {"prompts_per_step": 128, "parallel": "fsdp2", "ranks": 2}
    assert values["reward"] == [{"function": "a:b"}]
    assert values["engine"] == [{"kind": "vllm", "count": 3}]


def test_an_engine_that_the_file_leaves_out_can_be_changed():
    values: dict = {}
    apply(values, "engine.0.count=2")
    assert values == {"engine": [{"count": 2}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("trainer.lr", "is not key=value"),
        ("=3", "is not key=value"),
        ("trainer..lr=3", "is not key=value"),
        ("trainer.lr=2e-6\nranks=3", "more than one value"),
        ("trainer.lr=a b", "not TOML"),
        ("steps.more=1", "below a value that is no table"),
    ],
)
def test_a_change_that_is_none_is_refused(change, words):
    with pytest.raises(UsageError, match=words):
        apply({"steps": 1}, change)


def test_files_that_cannot_be_read_are_refused(tmp_path, job_file):
    with pytest.raises(NotFound, match="does not exist"):
        job_from_file(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is not TOML"):
        job_from_file(job_file("model = ["))
    with pytest.raises(UsageError, match="cannot be read"):
        job_from_file(tmp_path)
    with pytest.raises(UsageError, match="over 1,048,576 bytes"):
        job_from_file(job_file("#" * (1 << 20) + "\n"))
    with pytest.raises(UsageError, match=r"model\.path: required"):
        job_from_file(job_file("model = {}"))
    with pytest.raises(UsageError, match="algorithm: required"):
        job_from_file(job_file('model = { path = "x" }\ndata = { path = "y" }'))


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path, job_file):
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + job_file(GRPO).read_bytes())
    assert job_from_file(marked).algorithm.kind == "grpo"


def test_a_job_made_in_python_passes_the_same_rules(job_file):
    job = job_from_file(job_file(GRPO))
    worse = msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, group_size=1))
    with pytest.raises(UsageError, match="all advantages are 0"):
        checked(worse)


def test_a_written_job_keeps_every_value(job_file):
    text = GRPO + '[data.columns]\nanswer = "the \\"solution\\"\\n"\n'
    text = text.replace('data = { path = "data/sums.jsonl", template = "{question}" }\n', '[data]\npath = "p"\n')
    job = job_from_values(tomllib.loads(GRPO))
    odd = msgspec.structs.replace(
        job,
        data=DataSettings(path="p", columns={'odd "name"': "sol\nution\t\x7f"}),
        engine=(EngineSettings(kind="vllm", options={"deep": {"list": [1, 2.5, True, {"a": "b"}]}, "empty": {}}),),
        model=ModelSettings(path="ünïcode\\path"),
    )
    assert isinstance(odd, Job)
    read = job_from_values(tomllib.loads(job_as_toml(checked(odd))))
    assert read == checked(odd)


# ---------------------------------------------------------------- adapters

ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.1}


def adapter(tmp_path, **values):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER | values))
    (tmp_path / "adapter_model.safetensors").touch()
    return f'trainer.lora_adapter="{tmp_path}"'


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (["trainer.lora_rank=20"], {"max_lora_rank": 32, "max_loras": 2}),
        (["trainer.lora_rank=8", "pacing.mode=sync"], {"max_lora_rank": 8}),
        (["trainer.lora_rank=8", "engine.0.options.enable_lora=false"], {}),
    ],
)
def test_vllm_takes_the_adapters_of_the_job_and_of_two_versions_where_it_generates_ahead(job_file, changes, wanted):
    vllm = ["engine.0.kind=vllm", "engine.0.options={enable_lora=true}", "pacing.mode=async"]
    job = job_from_file(job_file(GRPO), set=[*vllm, *changes])
    assert lora_requests(job.engine[0], job) == wanted


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        ([], ""),
        (["trainer.lora_rank=4"], "adapter"),
        (["trainer.lora_rank=4", "pacing.mode=colocated"], "merged"),
        (["trainer.lora_rank=4", "engine.0.kind=vllm_server", "engine.0.url=http://h:1"], "merged"),
        (["trainer.lora_rank=4", "weights.lora=merged"], "merged"),
    ],
)
def test_a_resolved_job_says_what_it_publishes_of_adapters(job_file, changes, published):
    job = job_from_file(job_file(GRPO), set=changes)
    assert job.weights.lora == published
    assert checked(job) == job


def test_rank_scale_and_layers_are_those_of_the_adapters(job_file, tmp_path):
    job = job_from_file(job_file(GRPO), set=[adapter(tmp_path)])
    trainer = job.trainer
    assert (trainer.lora_rank, trainer.lora_alpha, trainer.lora_targets) == (4, 8.0, ("q_proj", "v_proj"))
    assert checked(job) == job
    assert job_from_values(tomllib.loads(job_as_toml(job))) == job


@pytest.mark.parametrize(
    ("values", "changes", "words"),
    [
        ({}, ["trainer.lora_rank=8"], "trainer.lora_rank=8 with .* which has 4; leave lora_rank out"),
        ({}, ["trainer.lora_targets=['q_proj']"], "leave lora_targets out"),
        ({"use_dora": True}, [], "has use_dora: trained adapters have one rank"),
        ({"modules_to_save": ["lm_head"]}, [], "has modules_to_save"),
        ({"peft_type": "IA3"}, [], "has IA3"),
        ({"target_modules": "all-linear"}, [], "its target_modules are a list of names"),
        ({"r": 0}, [], "has r=0"),
    ],
)
def test_adapters_that_cannot_be_begun_with_are_refused(job_file, tmp_path, values, changes, words):
    with pytest.raises(UsageError, match=words):
        job_from_file(job_file(GRPO), set=[adapter(tmp_path, **values), *changes])
