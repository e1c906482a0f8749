"""YAML is read as plain values, with the files that it builds on and its interpolation."""

import pytest

pytest.importorskip("yaml")

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.adopt.sources.yaml_files import flatten, interpolated, read_value, read_yaml

LAUGHS = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
"""Lists of which each has the one before it nine times."""


def written(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(texts))}.yaml"


def test_numbers_are_those_of_yaml_12(tmp_path):
    values = read_yaml(written(tmp_path, a="lr: 1e-6\nbig: 1E5\nwhole: 20\nhalf: .5\nday: 2026-01-02\nname: 1e\n"))
    assert values == {"lr": 1e-6, "big": 1e5, "whole": 20, "half": 0.5, "day": "2026-01-02", "name": "1e"}


def test_a_file_lies_on_those_that_it_names(tmp_path):
    path = written(
        tmp_path,
        child="defaults: [middle, _self_]\na: {x: 1}\nlist: [3]\nb: {_override_: true, only: 1}\n",
        middle="defaults: base.yaml\na: {x: 2, y: 2}\nb: {gone: 1}\n",
        base="a: {x: 3, y: 3, z: 3}\nlist: [1, 2]\n",
    )
    assert read_yaml(path) == {"a": {"x": 1, "y": 2, "z": 3}, "list": [3], "b": {"only": 1}}


def test_bases_of_the_stack_itself_add_nothing_and_others_are_missed(tmp_path):
    path = written(tmp_path, a="defaults:\n  - ppo_trainer\n  - other@x: dp\nk: 1\n")
    assert read_yaml(path, missing=lambda name: name in ("ppo_trainer", "other@x/dp")) == {"k": 1}
    with pytest.raises(NotFound, match=r"other@x/dp.yaml does not exist"):
        read_yaml(path, missing=lambda name: name == "ppo_trainer")


def test_interpolation():
    leaves = flatten(
        {
            "n": {"size": 512, "rows": 4, "tokens": "${mul:${n.size}, ${.rows}}"},
            "o": {"size": 8, "up": "${..m.name}", "text": "a-${.size}"},
            "m": {"name": "q", "other": "${oc.select:none.there,7}", "env": "${oc.env:HOME}", "lost": "${no.where}"},
        }
    )
    values = interpolated(leaves)
    assert (values["n.tokens"], values["o.up"], values["o.text"], values["m.other"]) == (2048, "q", "a-8", 7)
    assert (values["m.env"], values["m.lost"]) == ("${oc.env:HOME}", "${no.where}")
    assert interpolated({"a": "${b}", "b": "${a}"}) == {"a": "${b}", "b": "${a}"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: !!python/object/apply:os.system ['touch x']", "not YAML that can be read safely"),
        ("a: 1\nb: 2\na: 3", "the key a stands twice"),
        ("a: &x [*x]", "tables more than 32"),
        (LAUGHS, "over 20,000 keys"),
        ("[" * 1_000, "not YAML that can be read safely"),
        ("a: [", "not YAML that can be read safely"),
        ("- 1", "no tables at its top"),
        ("x: " + "a" * (1 << 18), "over 262,144 bytes"),
        ("defaults: a", "builds on itself"),
    ],
    ids=["python", "twice", "itself", "laughs", "deep", "cut", "list", "large", "circle"],
)  # fmt: skip
def test_what_is_refused(tmp_path, monkeypatch, text, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=error):
        read_yaml(written(tmp_path, a=text))
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


def test_one_value():
    assert [read_value(text) for text in ("null", "[a, b]", "1e-6", "on", "a: [")] == [
        None,
        ["a", "b"],
        1e-6,
        True,
        "a: [",
    ]
