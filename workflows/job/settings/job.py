"""A job as a value: one frozen struct for each table of a job file, and `Job`, which holds them.

The structs hold the file's values; the defaults are in this module only. The text beside a type says what the key
means, and `For` which jobs need it; both stand on the page `transferqueue docs job-keys`. Open settings (an empty text,
None) are filled in by `transferqueue.workflows.job.settings.resolve`. Rules about one value are checked when a struct
is made; rules between tables by `transferqueue.workflows.job.settings.rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, dataclass_transform

import msgspec

AlgorithmKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "ppo", "distill", "sft"]
EngineKind = Literal["builtin", "transformers", "vllm", "vllm_server", "sglang_server", "openai", "factory"]
Mode = Literal["sync", "delayed", "async", "colocated"]
IN_TURN: Final = ("sync", "colocated")
"""Modes in which nothing is generated ahead: a step's rows have the weights of the step before."""
Devices = tuple[int, ...] | Literal["auto", "cpu"]

_DTYPES: Final = "One of `float32`, `bfloat16` and `float16`."
_GPUS: Final = "by their numbers on this machine, on Ray in the cluster. `cpu`: none. `auto`: "


class For(msgspec.Struct, frozen=True):
    """The jobs that set a key, or the users whose jobs do: a key that none needs is removed."""

    jobs: str


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a job file: compared by value, unknown keys refused."""


class ModelSettings(_Table):
    """The policy: the model that is trained, and its tokenizer."""

    path: Annotated[
        str,
        "The policy: a Hugging Face directory or id, the directory of a built-in model, or a run's folder or checkpoint"
        " `step-N`, whose weights alone are taken.",
        For("every job"),
    ]
    revision: Annotated[
        str,
        "Branch, tag or commit of a model that is given by its id. Empty: the default branch of the hub.",
        For("runs that must repeat: a model of the hub that may change"),
    ] = ""
    tokenizer: Annotated[
        str,
        "Directory or id of the tokenizer. Empty: `model.path`.",
        For("models without tokenizer files, such as built-in ones"),
    ] = ""
    chat_template: Annotated[
        str,
        "File with a chat template in Jinja. Empty: the tokenizer's own.",
        For("base models, and templates that mark turns for SFT"),
    ] = ""
    template_args: Annotated[
        dict[str, Any],
        "Arguments of the chat template, such as `{ enable_thinking = false }`.",
        For("models with a switch in the template, such as Qwen3's thinking"),
    ] = {}
    tools: Annotated[
        str,
        "JSON file with the tools that the chat template describes: an array of functions, as OpenAI has them.",
        For("agents that call tools"),
    ] = ""
    dtype: Annotated[
        str,
        "Dtype of engines that the job starts, of scoring models, and of the trainer's passes.",
        _DTYPES,
        For("CPUs and comparisons: `float32`; older GPUs: `float16`"),
    ] = "bfloat16"
    trust_remote_code: Annotated[
        bool, "Run Python code that comes with a model or tokenizer.", For("models that transformers does not have yet")
    ] = False


class DataPart(_Table):
    """A data set whose open keys are those of `data`."""

    path: Annotated[str, "Files, directory or id, as `data.path`.", For("every set")]
    subset: Annotated[
        str,
        "Configuration of a data set that is given by its id.",
        For("data sets of the hub with several configurations"),
    ] = ""
    split: Annotated[str, "Split. Empty: as that of the table it belongs to.", For("sets whose splits differ")] = ""
    prompt: Annotated[
        str, "Column of the prompt. Empty, with an empty `template`: as in `data`.", For("sets whose columns differ")
    ] = ""
    template: Annotated[str, "Text of the prompt, as `data.template`.", For("sets whose columns differ")] = ""
    response: Annotated[
        str, "Column of the response. Empty: as in `data`.", For("SFT on sets whose columns differ")
    ] = ""
    columns: Annotated[
        dict[str, str],
        "Columns by the names that rewards ask for. Empty: as in `data`.",
        For("sets whose right answer has another name"),
    ] = {}
    environment: Annotated[
        str,
        "Name of the environment that plays its rows. Empty: the only one.",
        For("jobs with several environments"),
    ] = ""


class MixtureSource(DataPart):
    """One of several data sets that prompts are drawn from. `data.sources` is an array of these tables."""

    weight: Annotated[
        float,
        "Share of the prompts, as a part of the sum of all weights.",
        For("mixtures: mathematics and code, old data and new"),
    ] = 1.0


class SamplerSettings(_Table):
    """Which prompts a step takes."""

    by: Annotated[
        str,
        "`pass_rate`: a `share` of the prompts of each step is drawn from those whose pass rate, that of their newest"
        " group, is from `low` to `high`. Or a function of your own, `module:function` or `file.py:function`, that"
        " chooses these. Empty: all follow the order of the data.",
        For("data of mixed difficulty, much of it too hard or too easy"),
    ] = ""
    low: Annotated[float, "Least pass rate.", For("data with many prompts that no response answers")] = 0.2
    high: Annotated[float, "Largest pass rate.", For("data with many prompts that each response answers")] = 0.8
    share: Annotated[
        float,
        "Part of each step, and of each source, that is chosen so: on average, and less where fewer fit. The others"
        " follow the order of the data, so new prompts come too, and old ones are measured again.",
        For("small shares of useful prompts: more; pass rates that change fast: less"),
    ] = 0.5
    pass_reward: Annotated[
        float, "Least reward of a response that passes.", For("rewards where a right answer gives other than 1")
    ] = 1.0


class DataSettings(_Table):
    """The prompts that the policy is trained on."""

    path: Annotated[
        str,
        "Parquet, Arrow, JSONL or CSV, a file or a directory of them, a directory that `datasets` saved, or an id of"
        ' the hub, such as `"openai/gsm8k"`. Empty: `sources` name the data.',
        For("every job with one data set"),
    ] = ""
    subset: Annotated[
        str,
        "Configuration of a data set that is given by its id. Empty: its only one.",
        For("data sets of the hub with several configurations, such as GSM8K"),
    ] = ""
    split: Annotated[
        str,
        "Split of a directory, by the names of its files. Where `path` is a file, it is not read.",
        For("data with several splits"),
    ] = "train"
    sampler: SamplerSettings = SamplerSettings()
    sources: Annotated[
        tuple[MixtureSource, ...],
        "Several data sets instead of `path`, mixed by weight: `{ path, weight, … }`, with the keys `subset`, `split`,"
        " `prompt`, `template`, `response` and `columns` where they differ from these.",
        For("mixtures: mathematics and code, old data and new"),
    ] = ()
    prompt: Annotated[
        str,
        "Column of the prompt, a text or a list of messages. Not read with a `template`.",
        For("data whose prompts have another name"),
    ] = "prompt"
    template: Annotated[
        str,
        'Text of the prompt with columns in braces: `"{question}"`. Empty: the column `prompt` has it.',
        For("data with a question in a column, such as GSM8K"),
    ] = ""
    images: Annotated[
        str,
        "Column of a prompt's images: one or a list, each the bytes of a file or what `datasets` stores of an `Image`."
        ' A message has a part `{ type = "image" }` for each; else they stand before the text. Empty: none.',
        For("vision-language models: charts, scenes, documents"),
    ] = ""
    system: Annotated[
        str,
        "System message before each prompt that has none, for models with a chat template. Empty: none.",
        For("chat models that are told the form of the answer"),
    ] = ""
    response: Annotated[
        str,
        "Column of the response that `sft` learns; other kinds refuse it.",
        "Empty: messages end with one of the assistant.",
        For("SFT on pairs of columns"),
    ] = ""
    turns: Annotated[
        Literal["last", "all"],
        "Messages of the assistant that `sft` learns: the `last` one, or `all` of a conversation.",
        For("SFT on conversations and on traces of agents"),
    ] = "last"
    columns: Annotated[
        dict[str, str],
        'Columns by the names that rewards ask for: `{ answer = "solution" }`.',
        "Rewards that take every column get those named here; if none is named, all of the data.",
        For("rewards that compare with a right answer"),
    ] = {}
    epochs: Annotated[
        int, "Passes over the data. 0: as many as the steps need.", For("SFT, which counts in passes over the data")
    ] = 0
    shuffle: Annotated[
        bool,
        "Draw a new order for each epoch, by `seed`. `false`: the order of the files.",
        For("curricula: data sorted by difficulty"),
    ] = True
    prompt_tokens_max: Annotated[
        int, "Longest prompt, in tokens.", For("every job with longer prompts, or with less memory")
    ] = 1024
    overlong: Annotated[
        Literal["drop", "refuse"],
        "`drop`: a longer prompt is left out and counted; `refuse`: it ends the run.",
        "For `sft` so is a response over `sampling.tokens_max` tokens.",
        For("users of verl's `truncation`: data of which no row may be lost"),
    ] = "drop"


class EngineSettings(_Table):
    """Processes that generate. `engine` is an array of these tables."""

    kind: Annotated[
        EngineKind, "Program that generates. `transferqueue docs job-file` compares them.", For("every job")
    ] = "vllm"
    url: Annotated[
        str,
        "Address of the server, such as `http://127.0.0.1:8000`.",
        "Required for `vllm_server`, `sglang_server` and `openai`; other kinds refuse it.",
        For("engines that run as servers"),
    ] = ""
    factory: Annotated[
        str,
        "Function that starts an engine of your own, `module:function` or `file.py:function`, for the kind `factory`:",
        "called with the model's directory, `slots=` and `options`, it returns a generator.",
        For("engines that have no adapter here"),
    ] = ""
    model: Annotated[
        str,
        "Directory or id of the engine's first weights; for `openai` the endpoint's name. Empty: `model.path`.",
        For("endpoints with a name of their own"),
    ] = ""
    count: Annotated[int, "Processes with these settings.", For("several GPUs")] = 1
    tensor_parallel: Annotated[
        int, "Devices over which one `vllm` process spreads its model.", For("models larger than one GPU")
    ] = 1
    devices: Annotated[
        Devices,
        "GPUs of these processes, `tensor_parallel` for each in turn,",
        _GPUS + "the first ones.",
        For("several GPUs, shared in another way"),
    ] = "auto"
    slots: Annotated[
        int, "Requests that one process runs at a time.", For("every engine: its throughput and memory")
    ] = 64
    site: Annotated[
        str,
        "Site that runs these processes, by `transferqueue train --site NAME`. Empty: where the job runs.",
        For("generation in another data centre"),
    ] = ""
    options: Annotated[
        dict[str, Any],
        "Further arguments of the engine, by the engine's own names.",
        For("vLLM's share of a GPU, caches, keys of endpoints"),
    ] = {}


class SamplingSettings(_Table):
    """How responses are drawn."""

    group_size: Annotated[
        int,
        "Responses to each prompt. `sft` has one, and does not read it.",
        For("GRPO and its kin: cost against the noise of advantages"),
    ] = 8
    group_min: Annotated[
        int,
        "Fewest responses to a prompt that are trained without the others, which were dropped since they failed.",
        "Advantages compare these alone. 0: all; a group that lost a response is dropped, and another prompt is taken.",
        For("tools and judges that fail now and then, with large groups"),
    ] = 0
    refills: Annotated[
        int,
        "Further responses to a prompt, one after the other, in place of one whose environment failed for good: other"
        " tokens, in a new episode. If they fail too, `environment.on_error` and `group_min` apply. 0: none.",
        For("tools that fail for what one response did"),
    ] = 0
    tokens_max: Annotated[int, "Longest response, in tokens.", For("every job that generates")] = 512
    temperature: Annotated[
        float, "Divisor of the logits, for drawing and for log-probs.", For("jobs that explore more or less")
    ] = 1.0
    stop: Annotated[
        tuple[str, ...],
        "Texts of one token each that end a response, as the model's end tokens do.",
        For("base models, and formats that end with a mark"),
    ] = ()
    budget: Annotated[
        int,
        "Most tokens that one lease adds to a response; a later lease goes on with it. 0: no bound.",
        For("long responses in parts (partial rollouts of Kimi k1.5)"),
    ] = 0


class RewardSettings(_Table):
    """A term of the reward, with exactly one of function and model. `reward` is an array of these."""

    function: Annotated[
        str,
        "Function in TRL's form: `module:function` or `file.py:function`.",
        For("rewards by rule: mathematics, code, format"),
    ] = ""
    model: Annotated[str, "Directory or id of a sequence classifier with one label.", For("preferences (RLHF)")] = ""
    weight: Annotated[
        float,
        "Factor of this term in the sum. 0: measured, and not rewarded.",
        For("several terms; one that is only measured"),
    ] = 1.0
    args: Annotated[
        dict[str, Any],
        'Arguments of the class or factory; of a model `output`, which is `"score"` or `"probability"`.',
        For("judges with an address, and reward models with a sigmoid"),
    ] = {}
    processes: Annotated[
        int,
        "Processes that compute rewards. Of several terms the largest number counts.",
        For("slow rewards: code that runs, judges"),
    ] = 1
    timeout_s: Annotated[
        float,
        "Longest call of the function, in seconds; the rows of a longer one have failed.",
        For("code that may hang, slow judges"),
    ] = 60.0
    on_error: Annotated[
        Literal["stop", "drop"],
        "A row for which the term fails is tried again. If it fails for good, `stop`: the run ends; `drop`: the row is"
        " dropped, as `reward_error`.",
        For("judges that fail now and then"),
    ] = "stop"
    failed_max: Annotated[
        float,
        "Largest share of dropped rows among the last 20 batches' rows of a process. Above it the run ends, with the"
        " last failure. Of several terms the smallest counts.",
        For("judges that fail often, or must not"),
    ] = 0.5


class EnvironmentSettings(_Table):
    """An environment, with exactly one of factory, function, url and agent. Each row is an episode of one, which brings
    its reward. `environment` is an array of these; of several, each data source names the one that plays its rows."""

    name: Annotated[
        str,
        "Name, for data sources, figures and drop reasons. Empty: the last part of `factory`, `function` or `agent`, or"
        " the host of `url`.",
        For("several environments of one factory"),
    ] = ""
    factory: Annotated[
        str,
        "Factory of an environment in Gymnasium's form, `module:factory` or `file.py:factory`.",
        For("agents with tools and games of their own"),
    ] = ""
    function: Annotated[
        str,
        "Reward function in TRL's form, `module:function`: episodes of one turn, scored by it.",
        For("questions with a right answer, beside environments"),
    ] = ""
    url: Annotated[
        str,
        "Address of a server of OpenEnv's protocol, such as `http://127.0.0.1:8000`.",
        For("environments that run elsewhere, such as in containers"),
    ] = ""
    agent: Annotated[
        str,
        "Agent that calls an OpenAI-compatible endpoint, `module:name` of a coroutine function `run(data, base_url)` or"
        " of a class with such a method. It returns its reward.",
        For("agents written against an endpoint"),
    ] = ""
    args: Annotated[
        dict[str, Any],
        "Arguments of the factory, function or agent. Of a `url`: `action`, the field of an action that gets the text"
        ' of a turn (`"message"`), and `observation`, the field that is read (all, as JSON).',
        For("environments with settings"),
    ] = {}
    weight: Annotated[float, "Factor of its rewards.", For("environments whose rewards differ in size")] = 1.0
    slots: Annotated[
        int,
        "Most episodes that one generating process plays at a time. 0: as many as the engine has slots.",
        For("sandboxes with a limit of their own"),
    ] = 0
    timeout_s: Annotated[
        float, "Longest call, in seconds; the episode of a longer one has failed.", For("tools that may hang")
    ] = 60.0
    episode_s: Annotated[
        float,
        "Longest episode, in seconds, with all its tries; looked at before each call.",
        For("agents with many slow calls"),
    ] = 3600.0
    on_error: Annotated[
        Literal["stop", "drop"],
        "An episode that fails is tried again. If it fails for good, `stop`: the run ends; `drop`: its row is dropped,"
        " as `environment_` and the cause.",
        For("sandboxes that fail now and then"),
    ] = "stop"
    failed_max: Annotated[
        float,
        "Largest share of failed episodes among its last rows, of 20 batches, of a process. Above it the run ends, with"
        " the last failure.",
        For("sandboxes that fail often, or must not"),
    ] = 0.5


class TokenStalenessSettings(_Table):
    """Tokens whose weights are old: the staleness of a token is the version that the trainer has at the step, less that
    of the weights that drew the token."""

    mask: Annotated[
        int,
        "Largest staleness of the tokens in the policy's loss; older ones are left out. 0: none is.",
        "A step whose tokens are all older leaves the weights as they are.",
        For("asynchronous runs whose long responses begin with old tokens"),
    ] = 0


class AlgorithmSettings(_Table):
    """The advantages and the loss. `kind` decides the keys that are left open."""

    kind: Annotated[AlgorithmKind, "Algorithm. `transferqueue docs losses` compares them.", For("every job")]
    std: Annotated[
        Literal["sample", "population", "none", ""],
        "Divisor of a group's centred rewards: their standard deviation, `sample`: by n − 1, `population`: by n.",
        "Read by `grpo`, `dr_grpo`, `dapo` and `gspo`.",
        For("replays of results by TRL and verl, which differ"),
    ] = ""
    std_eps: Annotated[
        float,
        "Added to that deviation. TRL adds 1e-4, verl, NeMo-RL and slime 1e-6, OpenRLHF 1e-9.",
        'Read where `std` is, unless that is `"none"`.',
        For("jobs of other stacks, and replays of their results"),
    ] = 1e-4
    clip_low: Annotated[
        float, "The ratio is clipped below 1 − `clip_low`.", For("DAPO's clip-higher, published recipes")
    ] = 0.0
    clip_high: Annotated[
        float,
        "The ratio is clipped above 1 + `clip_high`.",
        "Where only `clip_low` is set, it is used here too, but for `dapo` and `gspo`.",
        For("DAPO's clip-higher, published recipes"),
    ] = 0.0
    dual_clip: Annotated[
        float,
        "Where an advantage A is negative, the loss is at most −`dual_clip` · A. 0: no such bound.",
        For("recipes from verl, whose default is 3"),
    ] = 0.0
    ratio: Annotated[
        Literal["token", "sequence", ""],
        "Ratio of each token, or of the `sequence`: the geometric mean over its tokens, for `rloo` their product.",
        For("GSPO's ratio in another kind, RLOO by whole responses"),
    ] = ""
    aggregate: Annotated[
        Literal["tokens", "rows", "rows_max", ""],
        "Unit of the loss's mean: `tokens`; `rows`, each by its token mean; `rows_max`: rows times the longest response"
        " allowed.",
        For("recipes that mix the means of two kinds"),
    ] = ""
    old: Annotated[
        Literal["rollout", "trainer"] | None,
        "Denominator of the ratio: `rollout`: the policy that drew the tokens; `trainer`: the one before the step.",
        "Open: `trainer` with `tis_max`, and where a job with rewards generates ahead (`async`, `delayed`) or trains"
        " rows again (`pacing.uses`), and takes one update a step; else `rollout`.",
        For("comparisons: `rollout`; several updates a step: `trainer`"),
    ] = None
    tis_max: Annotated[
        float | None,
        "Largest importance weight p_old / p_rollout of a token, with `old` at `trainer`. 0: tokens have no weight.",
        "Open: 2 where a job with rewards leaves `old` open, generates ahead or trains rows again, and takes one update"
        " a step; else 0.",
        For("vLLM in bfloat16, several updates a step"),
    ] = None
    entropy: Annotated[
        float,
        "Coefficient of the entropy of the policy's tokens, which is subtracted from the loss. 0: none.",
        For("policies that stop to explore (verl's `entropy_coeff`)"),
    ] = 0.0
    kl: Annotated[
        float,
        "Coefficient of the KL divergence from the reference. 0: there is no reference.",
        For("RLHF, and policies that must stay near their start"),
    ] = 0.0
    kl_in: Annotated[
        Literal["loss", "reward"],
        "Term that has the KL: it is added to the loss, or subtracted from the reward.",
        For("PPO as in InstructGPT: in the reward"),
    ] = "loss"
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"],
        "Estimator of the KL, with x = log p − log p_ref: `k1`: x; `k2`: x² / 2; `k3`: exp(−x) + x − 1.",
        For("recipes from verl, whose default is k1"),
    ] = "k3"
    filter_equal: Annotated[
        bool | None,
        "Drop groups with equal rewards; other prompts take their place.",
        For("DAPO's dynamic sampling in another kind"),
    ] = None
    overlong_buffer: Annotated[
        int,
        "Last tokens before `sampling.tokens_max` over which a penalty grows from 0. 0: no penalty.",
        For("DAPO's soft punishment of length"),
    ] = 0
    overlong_penalty: Annotated[
        float,
        "That penalty of the reward at `sampling.tokens_max` tokens.",
        For("the same, where rewards are not from 0 to 1"),
    ] = 1.0
    mask_truncated: Annotated[
        bool, "Leave responses that `sampling.tokens_max` cut out of the loss.", For("DAPO's filter of cut responses")
    ] = False
    token_staleness: TokenStalenessSettings = TokenStalenessSettings()
    router_replay: Annotated[
        bool,
        "Train with the experts that the engine chose for each token and layer (R3), in a column `routes`.",
        "It takes engines of kind `transformers`, or on a GPU `vllm`, and 2 bytes a token, layer and chosen expert.",
        For("mixtures of experts whose `engine_error` is high"),
    ] = False
    gamma: Annotated[
        float, "Discount of later rewards, for each token. Read by `ppo` and `reinforce_pp`.", For("PPO for agents")
    ] = 1.0
    lam: Annotated[float, "λ of generalized advantage estimation. Read by `ppo`.", For("PPO")] = 0.95
    value_clip: Annotated[
        float,
        "Largest change of a value in the critic's loss, from the value before the step. 0: no bound.",
        For("PPO"),
    ] = 0.2
    whiten: Annotated[
        bool | None, "Give the advantages of a batch mean 0 and standard deviation 1.", For("PPO that streams: `false`")
    ] = None
    epochs: Annotated[int, "Passes over the rows of a step.", For("PPO: several passes over a batch")] = 1
    minibatches: Annotated[int, "Optimizer updates of each such pass.", For("PPO and GRPO with large batches")] = 1
    top_k: Annotated[
        int,
        "KL that `distill` minimises. 0: the reverse one, at the drawn tokens; k: the forward one, over the teacher's k"
        " most probable tokens.",
        For("distillation of whole distributions"),
    ] = 0


class ScorerSettings(_Table):
    """A model that scores rows."""

    path: Annotated[
        str, "Directory or id of the model.", For("PPO, distillation, and a reference other than the start")
    ] = ""
    devices: Annotated[
        Devices,
        "GPUs of its processes, one for each in turn,",
        _GPUS + "those after the trainer's.",
        For("several GPUs, shared in another way"),
    ] = "auto"
    tokens: Annotated[
        int,
        "Most tokens of one forward pass; at least the longest prompt and response.",
        For("long rows, or little memory"),
    ] = 8192
    processes: Annotated[int, "Processes that score.", For("several GPUs")] = 1


class ReferenceSettings(ScorerSettings):
    """The model that `algorithm.kl` holds the policy near; without a path, the policy at its start."""

    sync_every: Annotated[
        int,
        "Steps after which the reference takes the newest weights of the policy. 0: it stays as it is.",
        "A reference process that starts again takes the newest, too.",
        For("users of TRL's `sync_ref_model`: long runs with a KL term"),
    ] = 0


class CriticSettings(ScorerSettings):
    """The value model of `ppo`, which requires its path; other kinds refuse one."""

    lr: Annotated[
        float,
        "Learning rate; everything else of its training is as in `trainer`.",
        For("PPO: a critic learns faster than its policy"),
    ] = 1e-5


class TrainerSettings(_Table):
    """How the policy is trained, by AdamW."""

    prompts_per_step: Annotated[
        int, "New prompts of a step, each with `sampling.group_size` rows.", For("every job")
    ] = 32
    devices: Annotated[
        Devices,
        "GPUs of the ranks, one for each,",
        _GPUS + "those after the engines'.",
        For("several GPUs, shared in another way"),
    ] = "auto"
    parallel: Annotated[
        Literal["single", "ddp", "fsdp2"],
        "`single`: one process; `ddp`: `ranks` processes, each with the whole model; `fsdp2`: each with a shard of it.",
        For("several GPUs that train"),
    ] = "single"
    ranks: Annotated[int, "Processes that train together.", For("several GPUs that train")] = 1
    master_dtype: Annotated[
        str,
        "Dtype of the weights that the optimizer updates.",
        _DTYPES,
        For("memory: `bfloat16` halves weights and moments"),
    ] = "float32"
    micro_tokens: Annotated[
        int,
        "Most tokens of one forward and backward pass; at least the longest prompt and response.",
        For("every job with longer rows, or with less memory"),
    ] = 8192
    stream: Annotated[
        Literal["auto", "on", "off"],
        "`on`: begin with the rows that are ready; `off`: wait for all of a step;",
        "`auto`: on, unless advantages are whitened, a step takes several updates, or the mode is `colocated`.",
        For("comparisons with a step that waits: `off`"),
    ] = "auto"
    at_least: Annotated[
        int,
        "Fewest groups that a streaming step takes at once; rows for `reinforce_pp`, `ppo`, `distill` and `sft`.",
        For("plans (`transferqueue plan` sets it): short rows on a GPU"),
    ] = 1
    gradient_checkpointing: Annotated[
        bool,
        "Compute activations again in the backward pass: less memory, and more time.",
        For("long rows, or little memory"),
    ] = False
    lora_rank: Annotated[
        int, "Rank of LoRA adapters, which are trained alone. 0: all weights are trained.", For("LoRA")
    ] = 0
    lora_alpha: Annotated[
        float, "Scale of the adapters: their product counts `lora_alpha` / `lora_rank` times.", For("LoRA")
    ] = 16.0
    lora_targets: Annotated[
        tuple[str, ...],
        'Linear layers that get adapters, by the last part of their names: `["q_proj", "v_proj"]`.',
        "Empty: all but the output layer.",
        For("LoRA"),
    ] = ()
    lora_adapter: Annotated[
        str,
        "Adapters that training begins with: a directory in the format of peft, a run's folder or checkpoint `step-N`;"
        " their rank, scale and layers are those of the job. Empty: new ones.",
        For("LoRA after LoRA: SFT, then GRPO"),
    ] = ""
    lr: Annotated[float, "Learning rate after the warmup.", For("every job")] = 1e-6
    warmup: Annotated[int, "Steps in which the learning rate rises to `lr`.", For("SFT, and large learning rates")] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        "Learning rate after the warmup: `constant`, or down to 0 at the last step by a line or a cosine.",
        For("SFT: `cosine` or `linear`"),
    ] = "constant"
    weight_decay: Annotated[
        float, "Decay of weights at each update, times the learning rate.", For("SFT, published recipes")
    ] = 0.0
    betas: Annotated[
        tuple[float, float],
        "Decays of the moving averages of the gradient and of its square.",
        For("published recipes"),
    ] = (
        0.9,
        0.95,
    )
    gradient_norm_max: Annotated[
        float, "Largest norm of a step's gradient, which is scaled down to it.", For("published recipes")
    ] = 1.0
    patience_s: Annotated[
        float,
        "Seconds that rank 0 waits for another rank within a step; then all ranks are started again.",
        For("ranks whose passes of a step last over ten minutes"),
    ] = 600.0


class PacingSettings(_Table):
    """How far generation runs ahead of training."""

    mode: Annotated[
        Mode,
        "`sync`: nothing is generated ahead; `delayed`: one batch, with the weights before the current step's; `async`:"
        " `depth` batches, with weights that change between two tokens; `colocated`: as `sync`, in one process, whose"
        " engine and trainer use one device in turn.",
        For("every job: throughput against the age of rows"),
    ] = "async"
    depth: Annotated[
        int | None,
        "Batches that are generated ahead.",
        "Open: 0 for `sync` and `colocated`, 1 for `delayed`, and for `async` `max_staleness`, or 1.",
        For("generation whose time varies from step to step"),
    ] = None
    max_staleness: Annotated[
        int | None,
        "Most versions between the weights of a row and the last step that trains it.",
        "Open: as `depth`, and `uses` − 1 more; with `over_sample` at least ⌈`over_sample`⌉ − 1, and as many more.",
        For("asynchronous runs that lose reward"),
    ] = None
    staleness_of: Annotated[
        Literal["oldest", "newest", "mean"],
        "Version of a row whose tokens have several, which `max_staleness` bounds, and which figures and records show:"
        " of the `oldest` token, of the `newest`, or their `mean`, rounded down.",
        For("long responses of which few tokens are old: `mean`"),
    ] = "oldest"
    uses: Annotated[
        int,
        "Steps that train each row: a step trains its new rows, and again those of the `uses` − 1 steps before it. So"
        " it has `uses` times `trainer.prompts_per_step` prompts, after the first steps.",
        For("jobs that wait for generation: more training of each token"),
    ] = 1
    on_stale: Annotated[
        Literal["requeue", "drop"],
        "`requeue`: an older row is generated again; `drop`: it makes room for another prompt.",
        For("many prompts and long responses: `drop`"),
    ] = "requeue"
    over_sample: Annotated[
        float,
        "Batches of prompts that a `sync` job begins. A step takes the groups that are ready first; generators stop the"
        " others between two tokens, and these go on under the next weights. Episodes are generated to their end.",
        For("synchronous jobs with a few long responses"),
    ] = 1.0


class DispatchSettings(_Table):
    """Which engine generates which row."""

    kind: Annotated[
        Literal["given", "length"],
        "`given`: any engine takes rows in the order of the data; `length`: by the expected length of the response"
        " (StreamRL).",
        "That adds a process, and helps where engines take several rounds for a step whose responses differ in length.",
        For("several engines, responses of very different lengths"),
    ] = "given"


class ElasticSettings(_Table):
    """How many generating processes there are while the job runs. More are started like the last of `engine`."""

    min: Annotated[
        int,
        "Fewest processes. 0: the last one ends while no row waits.",
        For("shared clusters: engines that may all go"),
    ] = 1
    max: Annotated[
        int, "Most processes. 0: always the counts of `engine`.", For("responses that grow or shrink while they train")
    ] = 0


class WeightsSettings(_Table):
    """How weights are published."""

    dtype: Annotated[
        str, "Dtype of published weights.", _DTYPES, "Empty: the trainer's.", For("comparisons in `float32`")
    ] = "bfloat16"
    every: Annotated[int, "Steps between two versions.", For("asynchronous runs of large models on slow networks")] = 1
    keep: Annotated[
        int,
        "Versions that the queue keeps; more in a `reproducible` job whose rows may need them.",
        For("several sites, or memory for a single version"),
    ] = 2
    in_flight: Annotated[
        bool,
        "In mode `async`, engines change weights between two tokens. `false`: running requests finish first.",
        For("comparisons with engines that finish first (StreamRL)"),
    ] = True
    kv: Annotated[
        Literal["recompute", "keep", "salt"],
        "Key-value caches of running requests when weights change in flight. `recompute`: computed again with the new"
        " weights. `keep`: they stay, for later requests with the same prefix too. `salt`: they stay, and later"
        " requests share none of them. LoRA requests (vLLM with `enable_lora`) keep theirs whatever is set, and share"
        " them within a version alone.",
        For("long responses, whose contexts would be read again at each version"),
    ] = "recompute"
    lora: Annotated[
        Literal["adapter", "merged", ""],
        "What a job with adapters (`trainer.lora_rank`) publishes. `adapter`: the weights of the model once, and of"
        " each version the adapters, which engines merge (vLLM with `enable_lora` does not). `merged`: merged weights"
        " in each version. Empty: `adapter`, but `merged` with `fsdp2`, in mode `colocated`, and for vLLM on several"
        " devices or as a server.",
        For("LoRA with engines of one's own that read no adapters: `merged`"),
    ] = ""


class CheckpointSettings(_Table):
    """Checkpoints of the trainer and its queue."""

    every: Annotated[
        int,
        "Steps between two checkpoints; the last step has one too. 0: none is written, and the run leaves no model.",
        For("every long run"),
    ] = 50
    keep: Annotated[
        int,
        "Checkpoints, and snapshots of the queue, that stay.",
        For("disks that are small, or runs that are looked at later"),
    ] = 2
    best: Annotated[
        Literal["evaluation", ""],
        "`evaluation`: the checkpoint that was evaluated best stays too, for `transferqueue export --best`.",
        "Empty: the newest ones alone.",
        For("runs that get worse at their end"),
    ] = ""
    resume: Annotated[
        str,
        "Checkpoint that a new run begins with: a run's folder, or a directory `step-N`. Empty: none, it begins with"
        " `model.path`.",
        For("another job that goes on with the moments of a run"),
    ] = ""


class EvaluationSet(DataPart, kw_only=True):
    """A further set of held-out prompts. `evaluation.sets` is an array of these tables."""

    name: Annotated[str, "Beginning of its figures: `aime/reward`.", For("benchmarks beside the main set")]
    rows: Annotated[int, "Most prompts. 0: as `evaluation.rows`.", For("large benchmarks")] = 0
    samples: Annotated[
        int, "Responses to each prompt. 0: as `evaluation.samples`.", For("pass@k of small benchmarks")
    ] = 0


class EvaluationSettings(DataPart):
    """Evaluation on held-out prompts, beside training."""

    path: Annotated[
        str, "Held-out prompts, as `data.path`. Empty: none are evaluated.", For("every job that is to generalise")
    ] = ""
    split: Annotated[
        str, "Split of a directory, as `data.split`.", For("data whose held-out split is called otherwise")
    ] = "test"
    sets: Annotated[
        tuple[EvaluationSet, ...],
        "Further sets of prompts beside `path`: `{ name, path, … }`, with the keys `rows` and `samples`, and those of"
        " `data.sources` but the weight.",
        For("benchmarks beside the main set"),
    ] = ()
    devices: Annotated[
        Devices, "GPUs of the process,", _GPUS + "that of the first engine.", For("several GPUs, shared in another way")
    ] = "auto"
    every: Annotated[int, "Steps between two evaluations. 0: before and after the run only.", For("every long run")] = (
        50
    )
    rows: Annotated[int, "Most prompts that are evaluated, the first ones of the file.", For("large held-out sets")] = (
        256
    )
    samples: Annotated[int, "Responses to each prompt.", For("pass@k, small held-out sets")] = 1
    temperature: Annotated[
        float,
        "Temperature of these responses; 0 takes the most probable token. `distill` draws as in training.",
        For("pass@k"),
    ] = 0.0
    pass_at: Annotated[
        tuple[int, ...],
        "Each k of a figure `pass@k`: the probability that one of k responses passes, estimated without bias from"
        " `samples` responses. Sets with fewer samples leave it out.",
        For("benchmarks of mathematics and code"),
    ] = ()
    pass_reward: Annotated[
        float, "Least reward of a response that passes.", For("pass@k where a right answer gives other than 1")
    ] = 1.0
    figure: Annotated[
        str,
        "Figure that `patience` and `checkpoint.best` compare, such as `aime/pass@8`. Lower is better for `kl` and"
        " `loss`. Empty: the reward, or where rows have none, `kl` or `loss`.",
        For("several sets, or pass@k, with an early end or a best checkpoint"),
    ] = ""
    patience: Annotated[
        int,
        "Evaluations in a row without a better figure after which the run ends; training goes on while they are made."
        " 0: it takes all steps.",
        For("SFT, and runs that stop to improve"),
    ] = 0


class LogSettings(_Table):
    """Where figures go."""

    to: Annotated[
        tuple[str, ...],
        "Loggers beside the files in the run's folder, which are always written: `tensorboard`, `wandb`, `mlflow`, or a"
        " function of your own, `module:function`, which is called with each step and its figures.",
        For("labs with TensorBoard, W&B, MLflow or a tracker of their own"),
    ] = ()
    samples: Annotated[
        int,
        "Responses of each step that are kept as text in `samples.jsonl`, each to another prompt, where `queue.record`"
        " does not keep all.",
        For("reading what the policy writes: `transferqueue samples`"),
    ] = 4


class QueueSettings(_Table):
    """The queue of the job."""

    address: Annotated[
        str,
        "Address of a running server. Empty: the job starts its own.",
        For("several sites, or one server for several jobs"),
    ] = ""
    durability: Annotated[
        Literal["memory", "process", "disk"],
        "`memory`: rows survive the death of workers; `process`: of all processes; `disk`: also a reboot.",
        "Not read with an `address`.",
        For("hosts that are taken away (`disk`), speed (`memory`)"),
    ] = "process"
    memory_gib: Annotated[
        float, "Memory for rows and weights, in GiB.", For("every job with long rows or a large model")
    ] = 8.0
    record: Annotated[
        Literal["on", "best_effort", "off"],
        "Write each row that ends, with all columns and its lineage, into files in the folder of the run (`rows/`).",
        "`on`: while the disk is full, rows wait, and then the job; `best_effort`: they are freed without a file, and"
        " the summary counts them. Not with an `address` or on Ray.",
        "Columns stay in memory until their row ends.",
        For("people who ask later what a run generated: `transferqueue query`"),
    ] = "off"
    record_gib: Annotated[
        float,
        "Most GiB of these files; the oldest go first. 0: no bound.",
        For("disks that are small, or runs that are kept whole"),
    ] = 16.0
    record_days: Annotated[
        float,
        "Days after which such a file is removed, while the run goes on. 0: never.",
        For("texts that may not be kept"),
    ] = 0.0


class RaySettings(_Table):
    """How a job with `on = "ray"` is spread over the cluster."""

    options: Annotated[
        dict[str, dict[str, Any]],
        "Arguments of Ray's `options` of an actor (`num_gpus`, `resources`, …), by task, or by process (`rollout-1`).",
        For("clusters with several kinds of nodes"),
    ] = {}
    replicas: Annotated[
        int,
        "Shards that store each row. With 2, no row is lost with a node.",
        For("nodes that are taken away (spot instances)"),
    ] = 1
    shard_gib: Annotated[
        float,
        "Most memory of the shard on each node, in GiB. 0: as `queue.memory_gib`, which is the server's.",
        For("nodes with less memory than the server's"),
    ] = 0.0


class Job(_Table):
    """A whole job; `transferqueue.workflows.job.settings.read.job_from_file` reads one, `transferqueue train` runs
    one."""

    model: ModelSettings
    data: DataSettings
    algorithm: AlgorithmSettings
    name: Annotated[
        str,
        "Beginning of the name of the run's folder. Empty: that of the file, or the kind and the model.",
        For("several runs beside each other"),
    ] = ""
    seed: Annotated[
        int,
        "Seed of the order of the data, of drawn tokens, minibatches and adapters.",
        For("runs that must repeat, and spreads over seeds"),
    ] = 0
    reproducible: Annotated[
        bool,
        "The run repeats bit for bit with the same `seed`: in every mode, with any number of processes, whichever of"
        " them die. A step takes prompts in the order of the data, and its number decides the weights of its rows."
        " Engines and settings that cannot repeat are refused.",
        For("comparisons bit for bit, and the search for a defect"),
    ] = False
    steps: Annotated[int, "Steps of the trainer.", For("every job")] = 100
    on: Annotated[
        Literal["processes", "ray"],
        "`processes`: run on this machine; `ray`: as actors of the Ray cluster that `RAY_ADDRESS` names.",
        For("Ray clusters"),
    ] = "processes"
    threads: Annotated[
        int,
        "Threads of each process, its `OMP_NUM_THREADS`. 0: as that variable says here; without it, trainers on"
        " the CPU divide the cores, and so do all processes with a model that work at once.",
        For("rewards that compute, and CPU runs that repeat on other machines"),
    ] = 0
    engine: tuple[EngineSettings, ...] = (EngineSettings(),)
    sampling: SamplingSettings = SamplingSettings()
    reward: tuple[RewardSettings, ...] = ()
    environment: tuple[EnvironmentSettings, ...] = ()
    reference: ReferenceSettings = ReferenceSettings()
    critic: CriticSettings = CriticSettings()
    teacher: Annotated[
        ScorerSettings, "The model that `distill` learns from, which requires its path; other kinds refuse one."
    ] = ScorerSettings()
    trainer: TrainerSettings = TrainerSettings()
    pacing: PacingSettings = PacingSettings()
    dispatch: DispatchSettings = DispatchSettings()
    elastic: ElasticSettings = ElasticSettings()
    weights: WeightsSettings = WeightsSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    log: LogSettings = LogSettings()
    queue: QueueSettings = QueueSettings()
    ray: RaySettings = RaySettings()
