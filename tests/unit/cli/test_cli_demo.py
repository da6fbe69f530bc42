"""The demo's own parts: text, batches, the small GPT."""

from pathlib import Path

import pytest
import torch

from stageflow.cli.demo.gpt import GPTConfig, build_gpt, next_token_loss
from stageflow.cli.demo.job import gpt_job
from stageflow.cli.demo.single import train_single
from stageflow.cli.demo.text import Corpus, read_text
from stageflow.errors import InputError

TINY = GPTConfig(length=16, layers=2, width=16, heads=2)


def test_the_standard_library_is_text():
    text = read_text(most=200_000)
    assert len(text) == 200_000
    assert b"import " in text
    assert text == read_text(most=200_000)


def test_a_file_is_read_whole(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert read_text(tmp_path / "a.txt") == b"hello"


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_bytes(b"first")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_bytes(b"hidden")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    assert read_text(tmp_path) == b"first\nsecond"


def test_no_text_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no such file or folder"):
        read_text(tmp_path / "none")
    with pytest.raises(InputError, match="no text found"):
        read_text(tmp_path)


def test_held_out_text_is_never_trained_on():
    corpus = Corpus(torch.arange(1000), 10)
    trained = torch.cat([corpus.batch(0, step, 64)[1] for step in range(50)])
    assert trained.max() < 900
    held_out = torch.cat([target for _, target in corpus.held_out_batches(3, 4)])
    assert held_out.min() >= 900


def test_targets_are_the_next_tokens():
    corpus = Corpus(torch.arange(1000), 10)
    for tokens, target in (corpus.batch(0, 0, 4), *corpus.held_out_batches(2, 4)):
        assert tokens.shape == target.shape == (4, 10)
        assert torch.equal(target, tokens + 1)


def test_batches_are_a_function_of_seed_and_step():
    corpus = Corpus.of_bytes(read_text(most=50_000), 16)
    tokens, _ = corpus.batch(3, 7, 4)
    assert torch.equal(tokens, corpus.batch(3, 7, 4)[0])
    assert not torch.equal(tokens, corpus.batch(3, 8, 4)[0])
    assert not torch.equal(tokens, corpus.batch(4, 7, 4)[0])


def test_too_little_text_is_refused():
    with pytest.raises(InputError, match=r"has 100 tokens; sequences of 10 need at least 110"):
        Corpus(torch.arange(100), 10)


def test_gpt_starts_at_the_loss_of_a_fair_die():
    tokens, target = Corpus.of_bytes(read_text(most=20_000), 16).batch(0, 0, 8)
    loss = next_token_loss(build_gpt(TINY)(tokens), target)
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_gpt_does_not_look_ahead():
    model = build_gpt(TINY)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 200
    assert torch.allclose(model(tokens)[0, :10], model(changed)[0, :10], atol=1e-6)
    assert not torch.allclose(model(tokens)[0, 10:], model(changed)[0, 10:], atol=1e-3)


def test_weights_follow_the_seed_and_leave_the_random_state_alone():
    before = torch.random.get_rng_state()
    first, again, other = build_gpt(TINY, 1), build_gpt(TINY, 1), build_gpt(TINY, 2)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first[0].tokens.weight, other[0].tokens.weight)


def test_one_process_learns(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 500)
    job = gpt_job(tmp_path, 16, 2, 16, seed=0)
    calls = [job.call(*job.corpus.batch(0, step, 8)) for step in range(30)]
    threads = torch.get_num_threads()
    run = train_single(job, calls, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), 1, "cpu")
    assert torch.get_num_threads() == threads
    assert len(run.losses) == 30
    assert run.losses[-1] < run.losses[0] - 2
    assert run.seconds > 0
