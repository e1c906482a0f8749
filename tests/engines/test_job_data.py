"""What others wrote and wrote for: data sets saved by `datasets`, reward functions of TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from transferqueue.adapters.engines.images import decoded
from transferqueue.adapters.stages.reward_functions import load_reward
from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.job.data.files import open_data
from transferqueue.workflows.job.data.prompts import row_images

datasets = pytest.importorskip("datasets", reason="make test-engines installs it")
trl_rewards = pytest.importorskip("trl.rewards", reason="make test-engines installs it")

ROWS = [
    {"prompt": [{"role": "user", "content": f"{n}+1?"}], "answer": str(n + 1), "level": ["easy", "hard"][n % 2]}
    for n in range(7)
]


@pytest.fixture
def data() -> Any:
    made = datasets.Dataset.from_list(ROWS)
    return made.cast_column("level", datasets.ClassLabel(names=["easy", "hard"]))


def rows(path: Path, split: str = "train") -> list[dict[str, Any]]:
    opened = open_data(path, split=split)
    return [opened.select(opened.columns).row(at) for at in range(len(opened))]


def expected(data: Any) -> list[dict[str, Any]]:
    return list(data)


def test_a_saved_data_set_is_read_as_datasets_reads_it(data: Any, tmp_path: Path) -> None:
    data.save_to_disk(tmp_path / "one", num_shards=2)
    assert rows(tmp_path / "one") == expected(datasets.load_from_disk(tmp_path / "one"))
    chosen = data.select([4, 1, 5]).shuffle(seed=1)
    chosen.save_to_disk(tmp_path / "chosen")
    assert rows(tmp_path / "chosen") == expected(chosen)


def test_a_saved_dictionary_of_splits_is_read_by_split(data: Any, tmp_path: Path) -> None:
    split = data.train_test_split(test_size=2, seed=0)
    split.save_to_disk(tmp_path / "both")
    assert rows(tmp_path / "both") == expected(split["train"])
    assert rows(tmp_path / "both", "test") == expected(split["test"])


def test_a_directory_as_the_hub_has_it_is_read_by_split(data: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, part in {"train-00000-of-00002": [0, 1], "train-00001-of-00002": [2], "test-00000-of-00001": [3]}.items():
        data.select(part).to_parquet(tmp_path / "data" / f"{name}.parquet")
    for split in ("train", "test"):
        assert rows(tmp_path, split) == expected(datasets.load_dataset(str(tmp_path), split=split))


def test_json_lines_of_datasets_are_read(data: Any, tmp_path: Path) -> None:
    data.to_json(tmp_path / "train.jsonl")
    assert rows(tmp_path) == expected(data)


def test_images_are_read_as_datasets_stores_them(tmp_path: Path) -> None:
    drawn = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    several = datasets.Features({"images": datasets.List(datasets.Image())})
    made = datasets.Dataset.from_dict({"images": [[image] for image in drawn]}, features=several)
    made.to_parquet(tmp_path / "files" / "train.parquet")
    made.save_to_disk(tmp_path / "saved")
    one = datasets.Dataset.from_dict({"images": drawn}, features=datasets.Features({"images": datasets.Image()}))
    one.save_to_disk(tmp_path / "one")
    for name in ("files", "saved", "one"):
        found = [decoded(row_images(row["images"], "images", "here"))[0] for row in rows(tmp_path / name)]
        assert [image.getpixel((0, 0)) for image in found] == [(255, 0, 0), (0, 0, 255)]


def test_rewards_of_trl_work_as_they_are() -> None:
    think = load_reward("trl.rewards:think_format_reward")
    messages = [[{"role": "assistant", "content": text}] for text in ("<think>\nso\n</think>\n4", "4")]
    scores = think({"completions": messages}, rows=2)
    assert scores.tolist() == trl_rewards.think_format_reward(messages) == [1.0, 0.0]
    assert think.takes_all


def test_a_reward_that_trl_makes_is_made_with_its_args() -> None:
    made = load_reward("trl.rewards:get_soft_overlong_punishment", {"max_completion_len": 10, "soft_punish_cache": 4})
    ids = [list(range(length)) for length in (3, 8, 20)]
    assert made({"completion_ids": ids}, rows=3).tolist() == [0.0, -0.5, -1.0]


def test_an_id_of_the_hub_is_read_from_the_cache_without_a_network(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is as `load_dataset` leaves it, under the name of an id."""
    (tmp_path / "sums").mkdir()
    data.remove_columns("level").to_parquet(tmp_path / "sums" / "train.parquet")
    cache = tmp_path / "cache"
    datasets.load_dataset(str(tmp_path / "sums"), cache_dir=str(cache))
    (cache / "sums").rename(cache / "own___sums")
    monkeypatch.chdir(tmp_path / "sums")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    opened = open_data("own/sums").select(["answer", "prompt"])
    assert [opened.row(at)["answer"] for at in range(len(opened))] == [row["answer"] for row in ROWS]
    assert opened.row(2)["prompt"] == ROWS[2]["prompt"]
    assert opened.place(3) == "own/sums, row 3"
    with pytest.raises(NotFound, match=r"data.path own/gone: .* no data set that the hub or the local cache gives"):
        open_data("own/gone")
    with pytest.raises(UsageError, match=r"data.path own/sums: .* set data.subset and data.split"):
        open_data("own/sums", split="other")
    with pytest.raises(UsageError, match=r"data.path own/sums: .* set data.subset and data.split"):
        open_data("own/sums", subset="other")
