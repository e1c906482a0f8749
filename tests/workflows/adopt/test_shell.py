"""A shell script is read as the commands that it would start, and nothing of it runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transferqueue.errors import UsageError
from transferqueue.workflows.adopt.sources import shell
from transferqueue.workflows.adopt.sources.shell import is_open, read_script

ARRAY = ["run", "--lr", "1e-6", "--name", "a b", "--on"]


def words_of(text, **variables):
    return read_script(text, variables).commands[-1].words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a=1 \\\n  b=2", ["run", "a=1", "b=2"]),
        ("run 'a b' \"c d\" e\\ f", ["run", "a b", "c d", "e f"]),
        ("run a=b#c # the rest", ["run", "a=b#c"]),
        ("A=1\nexport B=2\nrun $A ${B} ${C:-3} ${A:-4}", ["run", "1", "2", "3", "1"]),
        ("A='x y'\nrun $A \"$A\" '$A'", ["run", "x", "y", "x y", "$A"]),
        ('A=(\n --lr 1e-6 # a note\n #--off\n --name "a b"\n)\nA+=(--on)\nrun "${A[@]}"', ARRAY),
        ("P=1024\nR=$((P * 2 + (P - 24)))\nrun $R $((R / 8))", ["run", "3048", "381"]),
        ("F=/data\nL=\"['$F/a', '$F/b']\"\nrun files=\"$L\"", ["run", "files=['/data/a', '/data/b']"]),
        ("run a \"$@\" $@ > log 2>&1", ["run", "a"]),
        ("cat <<EOF\nrun not me\nEOF\nrun me <<< text", ["run", "me", "text"]),
        ("A=1 B=2 run $A", ["run", "1"]),
        ("run ${1:-vllm} $2", ["run", "vllm", "$2"]),
    ],
)  # fmt: skip
def test_words_are_those_of_the_shell(text, words):
    assert words_of(text) == words


def test_what_only_the_shell_can_compute_stays_as_it_is_written():
    words = words_of('D=$(cd "$(dirname "$0")" && pwd)\nrun $D/ckpt $UNSET/data `date` ok', HOME="/home/me")
    assert words == ["run", '$(cd "$(dirname "$0")" && pwd)/ckpt', "$UNSET/data", "`date`", "ok"]
    assert [is_open(word) for word in words] == [False, True, True, True, False]


def test_variables_come_from_the_environment_too():
    assert words_of("run $HOME/data", HOME="/home/me") == ["run", "/home/me/data"]


def test_a_value_of_a_condition_is_taken_and_said():
    script = read_script('N=0\nif [ -z "$N" ]; then\n  N=8\nfi\necho hello\nrun --gpus $N', {})
    assert [command.words for command in script.commands][-1] == ["run", "--gpus", "8"]
    assert script.commands[-1].notes == ("N is set in a condition: taken as '8'",)
    assert script.commands[-2].notes == ()


def test_sourced_files_are_named_and_not_read():
    assert read_script("source models/small.sh\nrun", {}).notes == [
        "not read: models/small.sh, which the script sources"
    ]


def test_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read_script("touch a\nA=$(touch b)\nrun `touch c` > d", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("run " + "a " * shell.WORDS_MAX, "over 20,000 words"),
        ("A=aaaaaaaa\n" + "A=$A$A\n" * 40, "expand to over"),
        ("run " + "${a:-" * 20_000, None),
        ("run $((" + "(" * 20_000 + "1" + ")" * 20_000 + "))", None),
    ],
)
def test_large_scripts_are_refused_or_read(text, error):
    if error is None:
        assert read_script(text, {}).commands
    else:
        with pytest.raises(UsageError, match=error):
            read_script(text, {})


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="$(){}[]'\"\\`ab=1 \n#<>|&;:-@+", max_size=60))
def test_any_text_is_read_to_its_end(text):
    for command in read_script(text, {"a": "1"}).commands:
        assert all(isinstance(word, str) for word in command.words)
