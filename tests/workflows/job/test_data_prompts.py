"""Prompts: what is tokenized is what the template says, and what is no prompt is refused with its row."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.workflows.job.tokens import CHAT, save_tokenizer
from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.job.data.prompts import PromptRenderer, PromptTemplate
from transferqueue.workflows.job.data.tokenizer import CLASS_VARIABLE, class_environment, load_tokenizer
from transferqueue.workflows.job.settings.job import DataSettings, ModelSettings

PLACE = "data.jsonl, line 1"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_tokenizer(ModelSettings(path=str(save_tokenizer(tmp_path_factory.mktemp("chat")))))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_tokenizer(ModelSettings(path=str(save_tokenizer(tmp_path_factory.mktemp("base"), template=""))))


def renderer(tokenizer, columns=("prompt",), *, sft=False, **settings) -> PromptRenderer:
    return PromptRenderer(DataSettings(path="data.jsonl", **settings), tokenizer, columns, learns_response=sft)


def test_a_text_becomes_a_message_of_the_user_between_the_tokens_of_the_template(chat):
    made = renderer(chat, system="Be brief.").render({"prompt": "2+2?"}, PLACE)
    assert made.value == "2+2?"
    assert made.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    (ids,) = renderer(chat).tokens([made])
    assert ids.dtype == np.int32
    assert chat.decode(ids.tolist()) == made.text
    assert list(ids).count(chat.get_vocab()["<|im_start|>"]) == 3, "each marker is one token"


def test_messages_keep_their_own_system_message_and_lose_keys_without_a_value(chat):
    messages = [
        {"role": "system", "content": "Own.", "name": None},
        {"role": "user", "content": "Hi", "tool_calls": None},
    ]
    made = renderer(chat, system="Other.").render({"prompt": messages}, PLACE)
    assert made.value == [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    assert "Own." in made.text
    assert "Other." not in made.text


def test_a_message_of_the_assistant_at_the_end_is_gone_on_with(chat):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    assert renderer(chat).render({"prompt": messages}, PLACE).text.endswith("<|im_start|>assistant\nWell")


def test_a_base_model_reads_the_text_as_it_is(base):
    made = renderer(base, ("q", "n"), template="Q{n}: {q} {{x}}\nA:").render({"q": "2+2?", "n": 7}, PLACE)
    assert (made.value, made.text) == ("Q7: 2+2? {x}\nA:",) * 2
    (ids,) = renderer(base).tokens([made])
    assert base.decode(ids.tolist()) == made.text


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{qestion}", r"\{qestion\} is no column of data.jsonl, which has answer, question; did you mean question\?"),
        ("{question.__class__}", "reads inside a value; a field is the name of a column"),
        ("{question[0]}", "reads inside a value"),
        ("{question!r}", "must be the name of a column and nothing else"),
        ("{question:>9}", "must be the name of a column and nothing else"),
        ("{}", "must be the name of a column and nothing else"),
        ("{question", "a brace that belongs to the text is written twice"),
        ("question", "names no column: every prompt would be the same"),
    ],
)
def test_templates_take_names_of_columns_and_nothing_else(template, match):
    with pytest.raises(UsageError, match=match):
        PromptTemplate(template, ["question", "answer"], "data.jsonl")


def test_a_template_refuses_values_that_are_no_text():
    template = PromptTemplate("{a}", ["a"], "data.jsonl")
    with pytest.raises(UsageError, match=r'data.jsonl, line 1: column "a" has list; a template takes text and numbers'):
        template.fill({"a": [1]}, PLACE)
    with pytest.raises(UsageError, match=r'column "a" has no value'):
        template.fill({"a": None}, PLACE)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (None, 'line 1: column "prompt" has no value; a prompt is a text or a list of messages'),
        ("", "has nothing"),
        ([], "has nothing"),
        (3, "has int"),
        (["hi"], "has a message of str; a message is an object with role and content"),
        ([{"from": "human", "value": "hi"}], "has a message of from, value"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_row(chat, value, match):
    with pytest.raises(UsageError, match=match):
        renderer(chat).render({"prompt": value}, PLACE)


def test_columns_that_the_data_lacks_are_refused_with_a_remedy(chat):
    with pytest.raises(
        NotFound, match=r'"prompt" is no column of .* which has answer, question; set data.prompt = "question"'
    ):
        renderer(chat, ("question", "answer"))
    with pytest.raises(NotFound, match=r'data.prompt: "promt" is no column .*; did you mean prompt'):
        renderer(chat, prompt="promt")
    with pytest.raises(NotFound, match=r'data.response: "answers" is no column .*; did you mean answer'):
        renderer(chat, ("prompt", "answer"), sft=True, response="answers")


def test_a_base_model_refuses_messages_and_a_system_message(base):
    with pytest.raises(UsageError, match=r"has no chat template; set model.chat_template"):
        renderer(base).render({"prompt": [{"role": "user", "content": "Hi"}]}, PLACE)
    with pytest.raises(UsageError, match=r"data.system 'Be brief.' with a model that has no chat template"):
        renderer(base, system="Be brief.")


def test_a_text_far_over_the_limit_is_not_tokenized(chat):
    made = renderer(chat, prompt_tokens_max=4)
    short, long = made.render({"prompt": "2"}, PLACE), made.render({"prompt": "2" * 10_000}, PLACE)
    assert [ids is None for ids in made.tokens([short, long, short])] == [False, True, False]


# ---------------------------------------------------------------- responses that are learned


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "answer": "4"},
        {"prompt": [{"role": "user", "content": "2+2?"}], "answer": [{"role": "assistant", "content": "4"}]},
        {"prompt": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    ],
)
def test_a_response_that_is_learned_ends_with_the_end_of_the_turn(chat, row):
    made = renderer(chat, tuple(row), sft=True, response="answer" * ("answer" in row)).render(row, PLACE)
    assert made.text.endswith("<|im_start|>assistant\n")
    ids = renderer(chat).response_tokens(made).ids
    assert chat.decode(ids.tolist()) == "4<|im_end|>"


def test_the_response_of_a_base_model_ends_with_its_end_token(base):
    settings = renderer(base, ("prompt", "answer"), sft=True, response="answer")
    made = settings.render({"prompt": "2+2=", "answer": "4"}, PLACE)
    assert settings.response_tokens(made).ids.tolist() == [base.get_vocab()["4"], base.eos_token_id]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "2+2?"}, "there is no response to learn; set data.response"),
        ({"prompt": [{"role": "assistant", "content": "4"}]}, "there is no response to learn"),
        ({"prompt": "2+2?", "answer": ""}, 'column "answer" has an empty text; a response is a text'),
        ({"prompt": "2+2?", "answer": None}, 'column "answer" has no value'),
    ],
)
def test_rows_without_a_response_are_refused(chat, row, match):
    with pytest.raises(UsageError, match=match):
        renderer(chat, tuple(row), sft=True, response="answer" * ("answer" in row)).render(row, PLACE)


def test_a_template_that_writes_the_prompt_differently_before_a_response_is_refused(tmp_path):
    odd = CHAT.replace("{% for", "{{ messages | length }}{% for", 1)
    tokenizer = load_tokenizer(ModelSettings(path=str(save_tokenizer(tmp_path, template=odd))))
    settings = renderer(tokenizer, ("prompt", "answer"), sft=True, response="answer")
    with pytest.raises(UsageError, match=r"writes the conversation with its response differently"):
        settings.render({"prompt": "2+2?", "answer": "4"}, PLACE)


# ---------------------------------------------------------------- tokenizers


def test_a_template_with_tokens_that_the_tokenizer_lacks_is_refused(tmp_path):
    path = save_tokenizer(tmp_path, special=("<|endoftext|>",))
    with pytest.raises(
        UsageError, match=r"has <\|im_end\|>, <\|im_start\|>, which the tokenizer does not have as tokens"
    ):
        load_tokenizer(ModelSettings(path=str(path)))


def test_the_template_of_a_file_replaces_the_models(tmp_path):
    path, file = save_tokenizer(tmp_path / "model"), tmp_path / "other.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    tokenizer = load_tokenizer(ModelSettings(path=str(path), chat_template=str(file)))
    assert renderer(tokenizer).render({"prompt": "hi"}, PLACE).text == "[hi]"


@pytest.mark.parametrize(
    ("written", "match"),
    [
        (None, "there is no such file"),
        (b"\xff", "is not text in UTF-8"),
        (b"{% for %}", "the chat template fails for messages of user: TemplateSyntaxError"),
        (b"{{ raise_exception('only tools') }}", "the chat template fails .* only tools"),
        (b"x" * (1 << 20) + b"x", "is over 1 MiB"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, written, match):
    path, file = save_tokenizer(tmp_path / "model"), tmp_path / "other.jinja"
    if written is not None:
        file.write_bytes(written)
    with pytest.raises(UsageError, match=match):
        load_tokenizer(ModelSettings(path=str(path), chat_template=str(file)))


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no tokenizer that can be read"):
        load_tokenizer(ModelSettings(path=str(tmp_path)))
    (tmp_path / "qwen").mkdir()
    with pytest.raises(NotFound, match=r"there is no such directory; .* has qwen"):
        load_tokenizer(ModelSettings(path=str(tmp_path / "qwem")))


def test_an_id_of_the_hub_that_cannot_be_had_is_refused(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        NotFound, match=r"model no/such-model-anywhere: there is no such directory, and the library gives"
    ):
        load_tokenizer(ModelSettings(path="no/such-model-anywhere"))


def test_a_process_that_is_told_the_class_loads_the_same_tokenizer_without_torch(tmp_path, chat):
    path = str(save_tokenizer(tmp_path))
    environment = class_environment(ModelSettings(path=path), load_tokenizer(ModelSettings(path=path)))
    program = (
        "import sys\n"
        "from transferqueue.workflows.job.data.tokenizer import load_tokenizer\n"
        "from transferqueue.workflows.job.settings.job import ModelSettings\n"
        f"tokenizer = load_tokenizer(ModelSettings(path={path!r}))\n"
        "messages = [{'role': 'user', 'content': 'zwei ½'}]\n"
        "text = tokenizer.apply_chat_template(messages, tokenize=False)\n"
        "print(tokenizer([text])['input_ids'][0], tokenizer.all_special_ids, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program]
    ran = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=True)
    text = chat.apply_chat_template([{"role": "user", "content": "zwei ½"}], tokenize=False)
    assert ran.stdout.strip() == f"{chat([text])['input_ids'][0]} {chat.all_special_ids} False"


@pytest.mark.parametrize("named", ["os:system {path}", "transformers.gone:None {path}", "transformers:Gone {path}", ""])
def test_a_class_that_is_not_known_is_chosen_again(tmp_path, monkeypatch, chat, named):
    path = save_tokenizer(tmp_path)
    monkeypatch.setenv(CLASS_VARIABLE, named.format(path=path))
    assert type(load_tokenizer(ModelSettings(path=str(path)))) is type(chat)


def test_a_class_is_known_for_its_own_path_alone(tmp_path, monkeypatch, chat):
    monkeypatch.setenv(CLASS_VARIABLE, f"transformers:GPT2Config {tmp_path / 'other'}")
    assert type(load_tokenizer(ModelSettings(path=str(save_tokenizer(tmp_path))))) is type(chat)


# ---------------------------------------------------------------- all turns of the assistant

TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "+1?"},
    {"role": "assistant", "content": "5"},
]


def test_every_turn_of_the_assistant_is_learned_with_its_end_and_nothing_else(chat):
    turns = renderer(chat, sft=True, turns="all", system="Brief.")
    made = turns.render({"prompt": TALK}, PLACE)
    ids, learned = turns.response_tokens(made)
    assert made.text + chat.decode(ids.tolist()) == (
        "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n+1?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    assert chat.decode(ids[learned].tolist()) == "4<|im_end|>5<|im_end|>"
    assert (
        chat.decode(ids.tolist())
        == chat.decode(turns.encode([made.text + "".join(made.response)])[0].tolist())[len(made.text) : -1]
    )


@pytest.mark.parametrize("messages", [TALK[:3], TALK[1:], TALK[:1], "2+2?"])
def test_conversations_without_a_last_word_of_the_assistant_are_refused(chat, messages):
    with pytest.raises(UsageError, match=r'line 1: data.turns="all" learns messages of the assistant'):
        renderer(chat, sft=True, turns="all").render({"prompt": messages}, PLACE)


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path):
    forgets = CHAT.replace("{{ message.content }}", "{{ message.content if loop.last else '' }}")
    tokenizer = load_tokenizer(ModelSettings(path=str(save_tokenizer(tmp_path, template=forgets))))
    with pytest.raises(UsageError, match=r"set model\.chat_template to one that leaves earlier turns as they are"):
        renderer(tokenizer, sft=True, turns="all").render({"prompt": TALK}, PLACE)


# ---------------------------------------------------------------- arguments and tools of the chat template

THINKS = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
WITH_TOOLS = "{% if tools %}{{ tools[0].function.name }}!{% endif %}" + CHAT


def test_arguments_and_tools_reach_the_chat_template(tmp_path):
    path = str(save_tokenizer(tmp_path, template=WITH_TOOLS + THINKS[len(CHAT) :]))
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "search"}}]')
    model = ModelSettings(path=path, template_args={"enable_thinking": False}, tools=str(tools))
    text = renderer(load_tokenizer(model)).render({"prompt": "Hi"}, PLACE).text
    assert text.startswith("search!<|im_start|>user")
    assert text.endswith("assistant\n<think></think>")
    plain = renderer(load_tokenizer(ModelSettings(path=path))).render({"prompt": "Hi"}, PLACE).text
    assert plain.startswith("<|im_start|>user")
    assert plain.endswith("assistant\n")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"template_args": {"thinking": True}}, r"model.template_args.thinking: the chat template .* does not read it"),
        ({"tools": "gone.json"}, "model.tools gone.json: there is no such file"),
        ({"tools": "bad.json"}, "model.tools bad.json: .* give a JSON array of functions"),
        ({"tools": "good.json"}, "model.tools: the chat template .* does not read tools"),
    ],
)
def test_what_the_chat_template_does_not_read_is_refused(tmp_path, monkeypatch, settings, match):
    path = str(save_tokenizer(tmp_path))
    (tmp_path / "bad.json").write_text('{"name": "search"}')
    (tmp_path / "good.json").write_text('[{"name": "search"}]')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=match.replace("does not read it", "does not read thinking")):
        load_tokenizer(ModelSettings(path=path, **settings))
