"""Train a Llama of transformers in two stages, with its own loss and its dict of inputs.

    python examples/train_huggingface.py

Nothing is downloaded: the model is a tiny Llama made from a config. It learns to count. Prints how the model was cut
(by its repeated blocks), the loss as it falls, and what the trained model predicts after 1 2 3 4. The saved folder
loads with transformers' own `from_pretrained`, which the last line does.
"""

import tempfile
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stageflow as sf


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def batch_of(size: int) -> dict[str, Tensor]:
    """Sequences of eight numbers that count up from somewhere."""
    tokens = torch.randint(0, 24, (size, 1)) + torch.arange(8)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def main() -> None:
    model = build_model()
    optimizer = partial(torch.optim.AdamW, lr=5e-3)
    with sf.Pipeline(model, stages=2, microbatches=4, schedule="zb_h1", optimizer=optimizer) as pipe:
        for step in range(25):
            loss = pipe.train_step(**batch_of(16))  # no loss= given: the model's own
            if step == 0:
                print(pipe, end="\n\n")
            if step % 6 == 0:
                print(f"step {step:2}   loss {loss:.3f}")

        with tempfile.TemporaryDirectory() as folder:
            pipe.save(f"{folder}/model")
            loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/model")

    with torch.no_grad():
        following = loaded(torch.tensor([[1, 2, 3, 4]])).logits[0, -1].argmax()
    print(f"after 1 2 3 4 comes {following}")


if __name__ == "__main__":
    main()
