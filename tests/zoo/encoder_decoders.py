"""Encoder-decoders from transformers: the encoder's output feeds every decoder block."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo.entry import BATCH, HEADS, LENGTH, VOCAB, WIDTH, Entry, Made, ragged, tokens

END = 2
BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
    "decoder_start_token_id": END,
    "forced_eos_token_id": END,
    "use_cache": False,
}
LAYERED_BART = dict(BART, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def translator(
    name: str, config: str, model: str, *, shift_inside: bool = False, entry: Any = None, **sizes: Any
) -> Entry:
    """Ragged source text and a shorter target; ``shift_inside`` leaves the decoder's inputs to the model's own glue."""

    def make() -> Made:
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        mask = ragged()
        target = tokens(BATCH, LENGTH - 4)
        inputs = {"input_ids": tokens(BATCH, LENGTH).masked_fill(mask == 0, 0), "attention_mask": mask}
        if not shift_inside:
            start = torch.full((BATCH, 1), END)
            inputs["decoder_input_ids"] = torch.cat([start, target[:, :-1]], dim=1)
        return net, {**inputs, "labels": target}

    return Entry(name, "encoder_decoder", make, **(entry or {}))


ENTRIES = [
    translator("t5", "T5Config", "T5ForConditionalGeneration", **T5),
    translator("t5_gated", "T5Config", "T5ForConditionalGeneration", entry={"lr": 0.005}, shift_inside=True,
               feed_forward_proj="gated-gelu", tie_word_embeddings=False, **T5),
    translator("t5_dropout", "T5Config", "T5ForConditionalGeneration", entry={"random": True}, **{**T5,
               "dropout_rate": 0.2}),
    translator("mt5", "MT5Config", "MT5ForConditionalGeneration", entry={"lr": 0.005}, **T5),
    translator("umt5", "UMT5Config", "UMT5ForConditionalGeneration", **T5),
    translator("longt5", "LongT5Config", "LongT5ForConditionalGeneration", **T5, local_radius=3,
               encoder_attention_type="local"),
    translator("switch_transformers", "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", **T5,
               num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4, router_jitter_noise=0.0,
               expert_capacity=32),
    translator("bart", "BartConfig", "BartForConditionalGeneration", shift_inside=True, **LAYERED_BART),
    translator("bart_layerdrop", "BartConfig", "BartForConditionalGeneration", entry={"random": True}, **{**BART,
               "dropout": 0.1, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}),
    translator("mbart", "MBartConfig", "MBartForConditionalGeneration", **LAYERED_BART),
    translator("pegasus", "PegasusConfig", "PegasusForConditionalGeneration", **LAYERED_BART),
    translator("marian", "MarianConfig", "MarianMTModel", **LAYERED_BART),
    translator("m2m100", "M2M100Config", "M2M100ForConditionalGeneration", **LAYERED_BART),
    translator("blenderbot", "BlenderbotConfig", "BlenderbotForConditionalGeneration", **LAYERED_BART),
    translator("blenderbot_small", "BlenderbotSmallConfig", "BlenderbotSmallForConditionalGeneration", **LAYERED_BART),
    translator("plbart", "PLBartConfig", "PLBartForConditionalGeneration", **LAYERED_BART),
    translator("led", "LEDConfig", "LEDForConditionalGeneration", attention_window=4,
               max_encoder_position_embeddings=32, max_decoder_position_embeddings=32, **{k: v for k,
               v in LAYERED_BART.items() if k != "max_position_embeddings"}),
    translator("fsmt", "FSMTConfig", "FSMTForConditionalGeneration", langs=["en", "de"], src_vocab_size=VOCAB,
               tgt_vocab_size=VOCAB, **{k: v for k, v in LAYERED_BART.items() if k != "vocab_size"}),
    translator("prophetnet", "ProphetNetConfig", "ProphetNetForConditionalGeneration", vocab_size=VOCAB,
               hidden_size=WIDTH, encoder_ffn_dim=48, decoder_ffn_dim=48, num_encoder_layers=2, num_decoder_layers=2,
               num_encoder_attention_heads=HEADS, num_decoder_attention_heads=HEADS, max_position_embeddings=32,
               dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, ngram=2, pad_token_id=0,
               decoder_start_token_id=END, use_cache=False),
]
