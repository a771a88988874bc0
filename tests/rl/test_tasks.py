"""Tasks: the split is disjoint and reproducible, rewards are exact, and bad input is refused with a way out."""

import itertools
import json
import sys
import textwrap

import pyarrow
import pyarrow.parquet
import pytest

from logra.errors import DataError
from logra.rl.methods import training_set
from logra.rl.tasks import gym, load_task
from logra.rl.tasks.gym import VerifierReward, last_number_reward
from logra.rl.tasks.problems import distinct, prompt_key, split_heldout


def keys(rows):
    return [prompt_key(row) for row in rows]


@pytest.mark.parametrize(
    ("name", "num_distinct", "num_heldout"),
    [("chain_sum", 200, 128), ("products", 100, 66)],  # a + b and a - b; a * b, of which two thirds are 66
)
def test_small_spaces_are_split_without_overlap(name, num_distinct, num_heldout):
    task = load_task(name)
    assert len(task.heldout) == num_heldout
    assert len(task.train) == num_distinct - num_heldout
    # Catches holding out rows instead of problems: with 200 sums, every drawn problem would also be trained on.
    assert len(set(keys(task.train)) | set(keys(task.heldout))) == num_distinct
    assert task.score_name == "accuracy"


def test_large_spaces_are_split_without_overlap():
    task = load_task("chain_sum", options={"min_digits": 4, "max_digits": 4}, num_steps=30)
    assert len(task.heldout) == 128
    assert len(task.train) == 30 * 8
    assert not set(keys(task.train)) & set(keys(task.heldout))


def test_the_split_depends_on_the_seed_alone():
    first, again, longer, other = (
        load_task("chain_sum", seed=seed, num_steps=steps) for seed, steps in ((3, 15), (3, 15), (3, 60), (4, 15))
    )
    assert first.train == again.train
    # Runs of different length are measured on the same problems.
    assert first.heldout == again.heldout == longer.heldout
    assert first.heldout != other.heldout
    wide = {"min_digits": 3, "max_digits": 3}
    short, long = (load_task("chain_sum", options=wide, num_heldout=8, num_steps=n) for n in (1, 100))
    assert short.heldout == long.heldout
    neighbour = load_task("chain_sum", options=wide, num_heldout=8, seed=1)
    assert not set(keys(short.heldout)) & set(keys(neighbour.heldout))


@pytest.mark.parametrize("settings", [{"num_steps": 20_000}, {"num_heldout": 10**9}], ids=str)
def test_a_small_space_is_not_searched_forever(monkeypatch, settings):
    """Fails if the problems that a long run asks for are drawn for long after the last of 200 sums was found."""
    drawn, row = itertools.count(), gym._row

    def counted(*entry):
        if next(drawn) == 20_000:
            pytest.fail("drawn on")
        return row(*entry)

    monkeypatch.setattr(gym, "_row", counted)
    task = load_task("chain_sum", **settings)
    assert len(task.train) + len(task.heldout) == 200
    # The end of the search changes none of what was found.
    expected = load_task("chain_sum")
    assert task.heldout + task.train == expected.heldout + expected.train


def test_prompts_are_short_conversations():
    row = load_task("chain_sum").train[0]
    (user,) = row["prompt"]
    assert user["role"] == "user"
    assert user["content"].endswith(" = ?")
    expression = user["content"].removesuffix(" = ?")
    assert int(row["answer"]) == eval(expression)


def test_the_last_number_is_scored():
    completions = ["12", [{"role": "assistant", "content": "8 + 4 = 12."}], "12 or 13", "none", "-12"]
    assert last_number_reward(completions, answer=["12"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_verifiers_give_full_marks_or_none():
    class Dataset:
        def __getitem__(self, index):
            return {"answer": str(index)}

        def score_answer(self, answer, entry):
            if answer == "raise":
                raise RuntimeError("garbage")
            return 1.0 if answer == entry["answer"] else 0.05

    reward = VerifierReward("numbers", Dataset())
    completions = ["3", "4", "raise", "thinking <answer>1</answer> no <answer> 3 </answer>"]
    # Partial credit of 0.05 would make GRPO push towards well-formed wrong answers.
    assert reward(completions, index=[3, 3, 3, 3]) == [1.0, 0.0, 0.0, 1.0]
    assert reward.__name__ == "numbers_verifier"


def test_any_reasoning_gym_dataset_works():
    task = load_task("letter_counting", num_heldout=4, num_steps=1)
    row = task.train[0]
    assert task.reward([str(row["answer"])], index=[row["index"]]) == [1.0]
    assert task.reward(["not a number"], index=[row["index"]]) == [0.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chainsum", {}, "Did you mean chain_sum"),
        ("qqqq", {}, "For example: chain_sum, products"),
        ("chain_sum", {"num_terms": 2}, "num_terms"),
        ("chain_sum", {"min_terms": 0}, "min_terms"),
        ("missing.py", {}, "no such file"),
        ("missing.py", {"a": 1}, "only reasoning-gym tasks take options"),
    ],
)
def test_unusable_tasks(name, options, message):
    with pytest.raises(DataError, match=message):
        load_task(name, options=options)


def test_too_few_prompts_for_a_step():
    with pytest.raises(DataError, match=r"leaves 34 distinct prompts .* one step takes 40"):
        load_task("products", num_prompts=40)


# --- tasks from a file ---


@pytest.fixture
def write_task(tmp_path):
    def write(source, name="task.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


REWARD = """
def reward(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]
"""
DATASET = """
def dataset():
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(20)] * 2
"""


def test_a_file_with_its_own_dataset(write_task):
    task = load_task(write_task(REWARD + DATASET), num_heldout=128)
    # 40 rows are 20 problems, of which at most a fifth is held out.
    assert (len(task.train), len(task.heldout)) == (16, 4)
    assert not set(keys(task.train)) & set(keys(task.heldout))
    assert task.reward(["= 5"], answer=["5"]) == [1.0]
    assert task.score_name == "mean reward"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_with_a_dataset_on_disk(write_task, tmp_path, suffix):
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "answer": "a"} for i in range(10)]
    data = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        data.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    task = load_task(write_task(REWARD), dataset=str(data), num_heldout=2)
    assert len(task.train) == 8
    assert sorted(keys(task.train + task.heldout)) == sorted(keys(rows))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no function `reward.*define one"),
        ("reward = 3" + DATASET, "defines no function `reward"),
        (REWARD, r"defines no function `dataset\(\)`"),
        (REWARD + "def dataset(): return []", "is empty"),
        (REWARD + "def dataset(): return [{'question': 'a', 'answer': 'b'}]", "no column 'prompt'.*question, answer"),
        (REWARD + "def dataset(): return [{'prompt': 'a'}] * 9", "needs 'answer'.*Its columns: prompt"),
        (REWARD + "def dataset(): return ['a']", "row 1: str"),
        (REWARD + "def dataset(): return open('not-there.txt')", r"dataset\(\) of .* failed: FileNotFoundError"),
        (REWARD + "def dataset(): return 3", r"dataset\(\) of .* failed: TypeError"),
        (REWARD + "def dataset(): return [{'prompt': '', 'answer': 'a'}]", "row 1: prompt=''"),
        (
            REWARD + "def dataset(): return [{'prompt': [{'role': 'user'}]}]",
            r"row 1: prompt=.* must be a text, or a list",
        ),
        (REWARD + "def dataset(): return [{'prompt': ['hello']}]", r"row 1: prompt=\['hello'\]"),
        (REWARD + "def dataset(): return [{'prompt': 'a', 'completions': 'b'}]", "cannot be named completions"),
        (REWARD + "def dataset(): return [{'prompt': 'a', 'image': 'b'}]", "cannot be named image"),
        (REWARD + "def dataset(): raise SystemExit(0)", r"dataset\(\) of .* failed: SystemExit: 0"),
        (REWARD + "def dataset(): return [{'prompt': 'a', 'answer': 'b'}]", "leaves 1 distinct prompts"),
        ("def reward(completions): return [1.0]" + DATASET, r"must accept \*\*kwargs"),
        ("import not_a_module_at_all", "cannot be imported: ModuleNotFoundError"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("import sys; sys.exit()", "cannot be imported: SystemExit"),
    ],
)
def test_unusable_files(write_task, source, message):
    with pytest.raises(DataError, match=message):
        load_task(write_task(source + "\n"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"prompt": "a"}\nnot json\n', "line 2: not JSON"),
        ("rows.jsonl", "", "is empty"),
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt": "a", "x": [{"y": 9223372036854775808}]}', "line 2: .*'x'.*64 bits"),
        ("rows.jsonl", '{"prompt": "a", "x": ' + "9" * 5000 + "}", r"rows\.jsonl', line 1 cannot be read: .*digits"),
        ("rows.jsonl", "\n" + "[" * 100_000, r"rows\.jsonl', line 2 cannot be read: .*recursion"),
        ("rows.csv", "prompt\na\n", "a .jsonl or .parquet file is needed"),
        ("rows.parquet", "not parquet", "not a Parquet file"),
    ],
)
def test_unusable_datasets(write_task, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_task(write_task(REWARD), dataset=str(tmp_path / name))


def test_lines_of_a_dataset_end_at_newlines_only(write_task, tmp_path):
    # U+2028 may stand in a JSON text; str.splitlines would break the line there.
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a\u2028b", "answer": "c"}\r\n\n' * 1, encoding="utf-8")
    task = load_task(write_task(REWARD), dataset=str(tmp_path / "rows.jsonl"), num_prompts=1, num_heldout=0)
    assert [row["prompt"] for row in task.train] == ["a\u2028b"]
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="cannot be read"):
        load_task(write_task(REWARD), dataset=str(tmp_path / "rows.jsonl"))


def test_a_byte_order_mark_is_no_part_of_the_first_line(write_task, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "c"}\n', encoding="utf-8-sig")
    task = load_task(write_task(REWARD), dataset=str(tmp_path / "rows.jsonl"), num_prompts=1, num_heldout=0)
    assert task.train == [{"prompt": "a", "answer": "c"}]


@pytest.mark.parametrize("seed", range(4))
def test_a_column_that_some_rows_lack_is_kept(write_task, seed):
    """Fails if the row that the seed puts first decides which columns there are."""
    rows = "[{'prompt': str(i), 'answer': 'a'} | ({'hint': 'h'} if i == 3 else {}) for i in range(8)]"
    reward = "def reward(completions, answer, hint, **kwargs): return [0.0] * len(completions)\n"
    task = load_task(write_task(reward + f"def dataset(): return {rows}\n"), num_heldout=1, num_prompts=1, seed=seed)
    hints = {row["prompt"]: row["hint"] for row in task.train + task.heldout}
    assert hints == {str(i): "h" if i == 3 else None for i in range(8)}


def test_a_task_imports_its_neighbours(write_task, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_task("ANSWERS = ['a']\n", name="neighbour_of_the_task.py")
    dataset = "def dataset(): return [{'prompt': str(i), 'answer': ANSWERS[0]} for i in range(8)]\n"
    assert load_task(write_task("from neighbour_of_the_task import ANSWERS\n" + REWARD + dataset), num_prompts=1).train
    monkeypatch.delitem(sys.modules, "neighbour_of_the_task")


def test_a_missing_dataset_and_one_that_nobody_reads(write_task):
    with pytest.raises(DataError, match="no such file"):
        load_task(write_task(REWARD), dataset="nowhere.jsonl")
    with pytest.raises(DataError, match="only a task from a Python file reads a dataset"):
        load_task("chain_sum", dataset="rows.jsonl")


def test_splitting():
    rows = [{"prompt": str(i)} for i in range(10)]
    assert split_heldout(rows, 3, most=0.5) == (rows[3:], rows[:3])
    assert split_heldout(rows, 8, most=0.5) == (rows[5:], rows[:5])
    assert split_heldout(rows, 0, most=0.5) == (rows, [])
    assert list(distinct([{"prompt": "a", "x": 1}, {"prompt": "b"}, {"prompt": "a", "x": 2}])) == [
        {"prompt": "a", "x": 1},
        {"prompt": "b"},
    ]


def test_rows_that_no_table_takes(write_task):
    """A file's own rows have no lines; the table they are put into says what is wrong with them."""
    rows = "[{'prompt': str(i), 'answer': 2**64} for i in range(20)]"
    task = load_task(write_task(REWARD + f"def dataset(): return {rows}\n"))
    with pytest.raises(DataError, match=r"rows do not form a table.*: \w"):
        training_set(task)
