"""Text encoders from transformers, with heads for masked words, single tokens, whole texts and spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from zoo.entry import BATCH, CLASSES, DEPTH, HEADS, LENGTH, VOCAB, WIDTH, Entry, Made, classes, ragged, tokens

BERT = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MASK_TOKEN = 3


def masked_words(text: Tensor, mask: Tensor) -> dict[str, Tensor]:
    hidden = (torch.rand(text.shape) < 0.4) & mask.bool()
    hidden[:, 0] = True
    return {"input_ids": text.masked_fill(hidden, MASK_TOKEN), "labels": text.masked_fill(~hidden, -100)}


def token_classes(text: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": text, "labels": classes(*text.shape).masked_fill(mask == 0, -100)}


def text_class(text: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": text, "labels": classes()}


def span(text: Tensor, mask: Tensor) -> dict[str, Tensor]:
    start = torch.randint(0, 4, (BATCH,))
    return {"input_ids": text, "start_positions": start, "end_positions": start + 3}


def choice(text: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Two endings for each text, (BATCH, 2, LENGTH): dims that a model folds into its batch."""
    return {"input_ids": torch.stack([text, text.flip(1)], 1), "labels": torch.randint(0, 2, (BATCH,))}


def encoder(
    name: str,
    config: str,
    model: str,
    task: Callable[[Tensor, Tensor], dict[str, Tensor]] = masked_words,
    *,
    entry: Any = None,
    **sizes: Any,
) -> Entry:
    """An encoder under one of the tasks above, over texts of ragged length."""

    def make() -> Made:
        labels = {"num_labels": CLASSES} if task in (token_classes, text_class) else {}
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes, **labels))
        mask = ragged()
        text = tokens(BATCH, LENGTH).masked_fill(mask == 0, 0)
        inputs = task(text, mask)
        return net, {**inputs, "attention_mask": mask.expand_as(inputs["input_ids"]) if task is not choice
                     else torch.stack([mask, mask.flip(1)], 1)}

    return Entry(name, "encoder", make, **(entry or {}))


DISTIL = {"vocab_size": VOCAB, "pad_token_id": 0, "dim": WIDTH, "hidden_dim": 48, "n_layers": DEPTH, "n_heads": HEADS,
          "max_position_embeddings": 40, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
          "qa_dropout": 0.0}

ENTRIES = [
    encoder("bert", "BertConfig", "BertForMaskedLM", **BERT),
    encoder("bert_dropout", "BertConfig", "BertForTokenClassification", token_classes, entry={"random": True},
            **{**BERT, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}),
    encoder("bert_choice", "BertConfig", "BertForMultipleChoice", choice, **BERT),
    encoder("roberta", "RobertaConfig", "RobertaForSequenceClassification", text_class, **BERT, bos_token_id=1,
            eos_token_id=2),
    encoder("xlm_roberta", "XLMRobertaConfig", "XLMRobertaForMaskedLM", **BERT, bos_token_id=1, eos_token_id=2),
    encoder("camembert", "CamembertConfig", "CamembertForTokenClassification", token_classes, **BERT),
    encoder("distilbert", "DistilBertConfig", "DistilBertForQuestionAnswering", span, **DISTIL),
    encoder("electra", "ElectraConfig", "ElectraForTokenClassification", token_classes, **BERT, embedding_size=16),
    # One layer's weights are used at every depth.
    encoder("albert", "AlbertConfig", "AlbertForMaskedLM", **BERT, embedding_size=16),
    encoder("albert_groups", "AlbertConfig", "AlbertForSequenceClassification", text_class, **BERT, embedding_size=16,
            num_hidden_groups=2, inner_group_num=1, classifier_dropout_prob=0.0),
    encoder("deberta", "DebertaConfig", "DebertaForTokenClassification", token_classes, **BERT,
            relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
    encoder("deberta_v2", "DebertaV2Config", "DebertaV2ForSequenceClassification", text_class, **BERT,
            relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, norm_rel_ebd="layer_norm",
            share_att_key=True, conv_kernel_size=3, pooler_dropout=0.0),
    encoder("xlnet", "XLNetConfig", "XLNetForSequenceClassification", text_class, vocab_size=VOCAB, d_model=WIDTH,
            n_layer=DEPTH, n_head=HEADS, d_inner=48, dropout=0.0, summary_last_dropout=0.0, pad_token_id=0),
    encoder("mpnet", "MPNetConfig", "MPNetForMaskedLM", **BERT),
    encoder("squeezebert", "SqueezeBertConfig", "SqueezeBertForTokenClassification", token_classes, **BERT,
            embedding_size=WIDTH, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1, intermediate_groups=2,
            output_groups=2),
    encoder("modernbert", "ModernBertConfig", "ModernBertForMaskedLM", vocab_size=VOCAB, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, hidden_size=WIDTH, intermediate_size=40,
            num_hidden_layers=DEPTH, num_attention_heads=HEADS, max_position_embeddings=40, local_attention=6,
            embedding_dropout=0.0, mlp_dropout=0.0, attention_dropout=0.0),
    encoder("longformer", "LongformerConfig", "LongformerForSequenceClassification", text_class, **BERT,
            attention_window=[4] * DEPTH),
    encoder("roformer", "RoFormerConfig", "RoFormerForMaskedLM", **BERT, embedding_size=WIDTH),
    encoder("rembert", "RemBertConfig", "RemBertForTokenClassification", token_classes, **BERT,
            input_embedding_size=16, output_embedding_size=24, classifier_dropout_prob=0.0),
    encoder("mobilebert", "MobileBertConfig", "MobileBertForSequenceClassification", text_class, **BERT,
            embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2),
    encoder("megatron_bert", "MegatronBertConfig", "MegatronBertForMaskedLM", **BERT),
    encoder("convbert", "ConvBertConfig", "ConvBertForTokenClassification", token_classes, **BERT,
            embedding_size=WIDTH, head_ratio=2, conv_kernel_size=3),
    encoder("ibert", "IBertConfig", "IBertForTokenClassification", token_classes, **BERT, quant_mode=False),
    encoder("esm", "EsmConfig", "EsmForMaskedLM", **BERT, mask_token_id=MASK_TOKEN, token_dropout=True,
            position_embedding_type="rotary"),
    encoder("funnel", "FunnelConfig", "FunnelForTokenClassification", token_classes, vocab_size=VOCAB, block_sizes=[2,
            2], num_decoder_layers=1, d_model=WIDTH, n_head=HEADS, d_head=8, d_inner=48, hidden_dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0),
    encoder("layoutlm", "LayoutLMConfig", "LayoutLMForTokenClassification", token_classes, **BERT),
    encoder("bigbird", "BigBirdConfig", "BigBirdForMaskedLM", **BERT, attention_type="original_full"),
]
