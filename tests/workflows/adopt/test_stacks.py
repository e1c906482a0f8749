"""A job of each stack becomes a job file that our rules take, and no key of it is dropped in silence."""

import ast
import tomllib

import pytest

pytest.importorskip("yaml")

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.adopt.apply import kind_of
from transferqueue.workflows.adopt.read import STACKS
from transferqueue.workflows.adopt.report import adopt, write
from transferqueue.workflows.job.settings.read import job_from_file

VERL = """
set -x
MODEL=models/small
PROMPT=256
FILES="['$PWD/data/train.parquet']"
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$FILES" data.val_files=data/test.parquet \\
    data.train_batch_size=64 data.max_prompt_length=$PROMPT data.max_response_length=$((PROMPT * 3)) \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.003 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.top_p=0.9 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.level=2 \\
    +actor_rollout_ref.rollout.new_knob=3 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_training_steps=40 $@
"""
NEMO_BASE = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 60, normalize_rewards: true,
  use_leave_one_out_baseline: false, async_grpo: {enabled: true, max_trajectory_age_steps: 2}}
loss_fn: {reference_policy_kl_penalty: 0, ratio_clip_min: 0.2, ratio_clip_max: 0.2, token_level_loss: false,
  kl_input_clamp_value: 20.0}
policy:
  model_name: models/small
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, 2}
  max_total_sequence_length: 640
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.999]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 5}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}
    - {milestones: [5]}
  generation: {backend: vllm, max_new_tokens: 512, temperature: 0.7,
    colocated: {enabled: false, resources: {gpus_per_node: 2}}}
data:
  max_input_seq_length: 128
  train: {data_path: data/train.jsonl, input_key: question, output_key: final}
  default: {env_name: math}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""
NEMO = "defaults: base.yaml\ngrpo: {max_num_steps: 30}\npolicy: {generation: {temperature: 1.0}}\n"
TRL = """
model_name_or_path: models/small
dataset_name: org/data
reward_funcs: [my.rewards.exact, accuracy_reward]
reward_weights: [1.0, 0.5]
per_device_train_batch_size: 16
gradient_accumulation_steps: 2
steps_per_generation: 4
num_generations: 8
max_steps: 100
beta: 0.04
loss_type: dr_grpo
"""
OPENRLHF = """
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path models/small --reward.remote_url rewards/mine.py \\
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \\
   --rollout.batch_size 32 --rollout.n_samples_per_prompt 4 --train.batch_size 64 \\
   --data.max_len 1024 --rollout.max_new_tokens 768 --data.max_samples 3200 --data.prompt_dataset org/data \\
   --algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 1e-4 --algo.kl.use_loss --algo.kl.estimator k2 \\
   --actor.eps_clip_low_high 0.2 0.3 --train.async_enable --actor.adam.lr 5e-7 --logger.wandb.key 12345
"""
SLIME = """
source models/small.sh
CKPT=(--hf-checkpoint models/small  # --hf-checkpoint other
   --load runs/a)
ROLLOUT=(
   --prompt-data data/math.jsonl
   --input-key prompt --label-key label
   --rm-type deepscaler
   --num-rollout 50
   --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 64
   --rollout-max-response-len 2048
   --over-sampling-batch-size 32
)
ray job submit -- python3 train.py --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} ${CKPT[@]} ${ROLLOUT[@]} \\
   --lr 1e-6 --adam-beta2 0.98 --eps-clip 0.2 --eps-clip-high 0.28
"""
SOURCES = {
    "verl": ("run.sh", VERL),
    "nemo-rl": ("child.yaml", NEMO),
    "trl": ("grpo.yaml", TRL),
    "openrlhf": ("run.sh", OPENRLHF),
    "slime": ("run.sh", SLIME),
}
EXPECTED = {
    "verl": {
        "model.path": "models/small",
        "data.prompt_tokens_max": 256,
        "sampling.tokens_max": 768,
        "trainer.prompts_per_step": 64,
        "trainer.lr": 2e-6,
        "trainer.betas": [0.9, 0.999],
        "algorithm.minibatches": 4,
        "algorithm.kl": 0.003,
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.aggregate": "tokens",
        "algorithm.old": "trainer",
        "sampling.group_size": 4,
        "steps": 40,
        "trainer.ranks": 4,
        "engine.0.kind": "vllm",
        "engine.0.options.compilation_config.level": 2,
        "evaluation.path": "data/test.parquet",
        "reward.0.function": "adopted_rewards:reward",
    },
    "nemo-rl": {
        "steps": 30,
        "trainer.prompts_per_step": 8,
        "algorithm.minibatches": 2,
        "algorithm.aggregate": "rows",
        "algorithm.std": "sample",
        "trainer.warmup": 5,
        "sampling.temperature": 1.0,
        "data.template": "{question}",
        "data.columns": {"answer": "final"},
        "pacing.mode": "async",
        "pacing.max_staleness": 2,
        "engine.0.count": 2,
        "trainer.ranks": 2,
    },
    "trl": {
        "trainer.prompts_per_step": 8,
        "algorithm.minibatches": 2,
        "steps": 50,
        "algorithm.kl": 0.04,
        "algorithm.aggregate": "rows_max",
        "reward.0.function": "my.rewards:exact",
        "reward.1.function": "trl.rewards:accuracy_reward",
        "reward.1.weight": 0.5,
        "engine.0.kind": "transformers",
        "pacing.mode": "colocated",
    },
    "openrlhf": {
        "trainer.prompts_per_step": 32,
        "algorithm.minibatches": 2,
        "data.prompt_tokens_max": 256,
        "sampling.tokens_max": 768,
        "steps": 100,
        "trainer.warmup": 3,
        "algorithm.kind": "grpo",
        "algorithm.std": "none",
        "algorithm.whiten": True,
        "algorithm.kl_in": "loss",
        "algorithm.clip_high": 0.3,
        "pacing.mode": "async",
        "log.to": ["wandb"],
    },
    "slime": {
        "model.path": "models/small",
        "data.columns": {"label": "label"},
        "algorithm.minibatches": 2,
        "algorithm.aggregate": "rows",
        "pacing.over_sample": 2.0,
        "data.shuffle": False,
        "trainer.betas": [0.9, 0.98],
        "steps": 50,
    },
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with the source of each stack, by its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    paths = {}
    for name, (file, text) in SOURCES.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / file).write_text(text)
        paths[name] = str(folder / file)
    (tmp_path / "nemo-rl" / "base.yaml").write_text(NEMO_BASE)
    return paths


def flat(values, at=""):
    """Yield the values of a job file by key, a table of columns whole."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        key = f"{at}{name}"
        is_array = isinstance(value, list) and value and isinstance(value[0], dict)
        if is_array or (isinstance(value, dict) and key != "data.columns"):
            yield from flat(value, f"{key}.")
        else:
            yield key, value


@pytest.mark.parametrize("stack", SOURCES)
def test_the_job_is_that_of_the_stack_and_passes_our_rules(sources, tmp_path, stack):
    adopted = adopt([sources[stack]])
    assert (adopted.stack, adopted.problem) == (stack, "")
    values = dict(flat(tomllib.loads(adopted.job)))
    assert {key: values.get(key) for key in EXPECTED[stack]} == EXPECTED[stack]
    out = tmp_path / "out"
    out.mkdir()
    assert write(adopted, out)[0] == out / "job.toml"
    assert job_from_file(out / "job.toml").model.path == "models/small"
    if adopted.rewards:
        tree = ast.parse((out / "adopted_rewards.py").read_text())
        assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == ["reward"]


def test_every_key_has_a_line_with_its_verdict_and_reason(sources):
    lines = {line.key: line for line in adopt([sources["verl"]]).lines}
    assert lines["data.train_batch_size"].verdict == "kept"
    assert lines["actor_rollout_ref.actor.ppo_mini_batch_size"].verdict == "mapped"
    assert lines["actor_rollout_ref.rollout.top_p"].verdict == "refused"
    assert "whole distribution" in lines["actor_rollout_ref.rollout.top_p"].why
    assert lines["actor_rollout_ref.rollout.new_knob"].verdict == "unknown"
    assert lines["actor_rollout_ref.actor.optim.weight_decay (its default)"].to == {"trainer.weight_decay": 0.01}
    words = [word for word in VERL.replace("\\\n", " ").split() if "=" in word and "." in word.partition("=")[0]]
    assert {word.lstrip("+").partition("=")[0] for word in words} <= set(lines)


def test_the_report_ends_with_what_to_look_at(sources):
    text = adopt([sources["verl"]]).text()
    assert text.index("kept:") < text.index("mapped:") < text.index("unknown:") < text.index("refused:")
    assert text.splitlines()[-1].endswith("1 unknown, 1 refused")


def test_words_after_the_file_go_before_it(sources):
    adopted = adopt([sources["verl"], "data.train_batch_size=32", "actor_rollout_ref.rollout.n=16"])
    assert tomllib.loads(adopted.job)["trainer"]["prompts_per_step"] == 32
    child = adopt([sources["nemo-rl"], "grpo.max_num_steps=7"])
    assert tomllib.loads(child.job)["steps"] == 7
    other = adopt([sources["nemo-rl"], "grpo.adv_estimator.name=reinforce_plus_plus"])
    assert tomllib.loads(other.job)["algorithm"].keys().isdisjoint(("std", "std_eps"))
    assert tomllib.loads(other.job)["algorithm"]["kind"] == "reinforce_pp"


def test_words_alone_are_a_command(sources):
    words = ["trl", "grpo", "--config", sources["trl"], "--max_steps", "20", "--learning_rate=3e-6"]
    values = tomllib.loads(adopt(words).job)
    assert (values["steps"], values["trainer"]["lr"]) == (10, 3e-6)
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--reward.remote_url", "r.py"]
    assert adopt(words, stack="openrlhf").stack == adopt(words).stack == "openrlhf"


def test_what_the_shell_would_compute_is_refused_by_name(sources, tmp_path, monkeypatch):
    script = tmp_path / "open.sh"
    script.write_text(VERL.replace("MODEL=models/small", "MODEL=$WHERE/small"))
    adopted = adopt([str(script)])
    assert [line.key for line in adopted.lines if "not known here" in line.why] == ["actor_rollout_ref.model.path"]
    monkeypatch.setenv("WHERE", "/models")
    assert tomllib.loads(adopt([str(script)]).job)["model"]["path"] == "/models/small"


def test_the_program_that_a_script_starts_counts(sources, tmp_path):
    script = tmp_path / "ahead.sh"
    script.write_text(SLIME.replace("train.py", "train_async.py").replace("--colocate", "--rollout-num-gpus 4"))
    values = tomllib.loads(adopt([str(script)]).job)
    assert values["pacing"] == {"mode": "delayed"}
    assert (values["engine"][0]["count"], values["trainer"]["ranks"]) == (4, 8)


def test_an_asynchronous_trainer_of_verl_generates_beside_training(sources):
    ahead = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1"]
    ahead += ["actor_rollout_ref.rollout.n_gpus_per_node=4", "trainer.v1.sampler.max_off_policy_threshold=3"]
    values = tomllib.loads(adopt([sources["verl"], *ahead]).job)
    assert values["pacing"] == {"mode": "async", "depth": 1, "max_staleness": 2, "on_stale": "drop"}
    assert (values["trainer"]["ranks"], values["engine"][0]["count"]) == (8, 2)
    further = tomllib.loads(adopt([sources["verl"], *ahead, "trainer.v1.separate_async.num_warmup_batches=2"]).job)
    assert further["pacing"]["depth"] == 2
    older = adopt([sources["verl"], *ahead, "trainer.use_v1=False"])
    assert tomllib.loads(older.job)["pacing"]["mode"] == "sync"
    for value in ("1", "null"):
        refused = adopt([sources["verl"], *ahead[:-1], f"trainer.v1.sampler.max_off_policy_threshold={value}"])
        assert "trainer.v1.sampler.max_off_policy_threshold" in [
            line.key for line in refused.lines if line.verdict == "refused"
        ]
    assert tomllib.loads(adopt([sources["verl"]]).job)["pacing"] == {"mode": "sync"}
    waits = adopt([sources["verl"], *ahead, "trainer.v1.sampler.max_off_policy_strategy=wait"])
    assert [line.key for line in waits.lines if line.why.startswith("a row that is being generated")] != []


@pytest.mark.parametrize(
    "given",
    [
        "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
        "actor_rollout_ref.actor.fsdp_config.qat.enable=True",
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.001",
        "actor_rollout_ref.actor.optim.min_lr=1e-7",
        "critic.ppo_epochs=3",
    ],
)
def test_what_changes_training_and_is_not_built_is_refused(sources, given):
    adopted = adopt([sources["verl"], "algorithm.adv_estimator=gae", given])
    assert [line.verdict for line in adopted.lines if line.key == given.partition("=")[0]] == ["refused"]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ('{"model_type": "llama", "num_experts": null}', None),
        ('{"num_experts": 8, "router_aux_loss_coef": 0.01}', ("refused", "0.01")),
        ('{"text_config": {"num_local_experts": 8}}', ("refused", "that of its architecture")),
        ('{"n_routed_experts": 8, "text_config": "none"}', ("refused", "that of its architecture")),
        ('{"num_experts": 8, "router_aux_loss_coef": 0.0}', None),
        (None, ("assumed", "of the model")),
        ('["no configuration', ("assumed", "of the model")),
    ],
    ids=["dense", "experts", "no coefficient", "routed", "off", "not here", "malformed"],
)
def test_the_routers_loss_of_a_mixture_of_experts_is_said_where_the_job_leaves_it_out(tmp_path, config, line):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    words = ["trl", "grpo", "--model_name_or_path", str(tmp_path)]
    lines = [each for each in adopt(words).lines if each.key == "router_aux_loss_coef (its default)"]
    assert [(each.verdict, each.value) for each in lines] == ([] if line is None else [line])
    assert all("experts have no loss of their own" in each.why for each in lines)
    given = adopt([*words, "--router_aux_loss_coef", "0"]).lines
    assert [each.verdict for each in given if each.key.startswith("router")] == ["no effect"]


def test_trls_correction_of_the_kl_is_said_where_it_counts():
    words = ["trl", "grpo", "--model_name_or_path", "m"]
    for more, verdicts in [([], []), (["--beta", "0.1"], ["refused"])]:
        lines = adopt([*words, *more]).lines
        assert [each.verdict for each in lines if each.key == "use_bias_correction_kl (its default)"] == verdicts
    off = adopt([*words, "--beta", "0.1", "--use_bias_correction_kl", "false"]).lines
    assert [each.verdict for each in off if each.key.startswith("use_bias")] == ["mapped"]


def test_a_setting_of_the_critic_may_be_written_otherwise_than_the_policys(sources):
    adopted = adopt([sources["verl"], "algorithm.adv_estimator=gae", "critic.optim.weight_decay=1e-2"])
    assert [line.verdict for line in adopted.lines if line.key == "critic.optim.weight_decay"] == ["mapped"]


def test_a_group_of_hydra_that_is_not_there_is_named(tmp_path):
    job = tmp_path / "mine.yaml"
    job.write_text(
        "defaults:\n  - actor@actor_rollout_ref.actor: fsdp\n  - _self_\nactor_rollout_ref: {model: {path: m}}\n"
    )
    assert adopt([str(job)]).notes == ["not read: actor@actor_rollout_ref.actor/fsdp, which the file's defaults name"]


def test_a_kind_that_does_not_exist_here_gives_no_job(sources):
    adopted = adopt([sources["verl"], "algorithm.adv_estimator=remax"])
    assert adopted.job == ""
    assert "algorithm.kind" in adopted.problem
    assert "there is no advantage 'remax' here" in adopted.text()


def test_secrets_are_not_shown(sources):
    assert "12345" not in adopt([sources["openrlhf"]]).text()


def test_what_a_script_names_and_is_not_read_is_said(sources):
    notes = adopt([sources["slime"]]).notes
    assert notes == ["not read: models/small.sh, which the script sources", "not read: ${MODEL_ARGS[@]}"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "adopt needs a job"),
        (["none.yaml"], "none.yaml does not exist"),
        (["none.sh"], "none.sh does not exist"),
        (["hello"], "hello is neither a file nor the command of a known trainer"),
        (["other.yaml"], r"its tables \(a\) are of no known stack"),
        (["other.sh"], r"none of its 1 commands \(make\) starts a trainer that is known"),
    ],
)
def test_what_is_no_job(tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "other.sh").write_text("make all\n")
    with pytest.raises((UsageError, NotFound), match=error):
        adopt(words)


@pytest.mark.parametrize("stack", STACKS)
def test_a_table_names_keys_of_our_job_file(stack):
    names = [rule.name for rule in STACKS[stack].rules]
    assert sorted(names) == sorted(set(names))
    for key in {rule.to for rule in STACKS[stack].rules if "." in rule.to}:
        assert kind_of(key) is not None, key
