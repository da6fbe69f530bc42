"""Two towers and mixed streams from transformers: text with images, sound or video."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo.decoders import ROTARY
from zoo.encoders import BERT
from zoo.entry import BATCH, CLASSES, DEPTH, HEADS, LENGTH, VOCAB, WIDTH, Entry, Made, classes, pixels, ragged, tokens

NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS, "max_position_embeddings": 20, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2}
SIGHT = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
         "image_size": 24, "patch_size": 8}
PATCHES = 9
IMAGE_TOKEN = 3


def matched_pairs(net: nn.Module, *, end: int = 2) -> Made:
    """Captions and images of which the i-th ones belong together; CLIP pools where the end token stands."""
    text = tokens(BATCH, LENGTH)
    text[:, -1] = end
    return net, {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": pixels(24),
                 "return_loss": True}


def clip() -> Made:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=SIGHT, projection_dim=16)
    return matched_pairs(transformers.CLIPModel(config))


def siglip() -> Made:
    config = transformers.SiglipConfig(text_config={**TEXT, "projection_size": WIDTH}, vision_config=SIGHT)
    return matched_pairs(transformers.SiglipModel(config))


def chinese_clip() -> Made:
    config = transformers.ChineseCLIPConfig(text_config={**TEXT, **NO_DROP}, vision_config=SIGHT, projection_dim=16)
    return matched_pairs(transformers.ChineseCLIPModel(config))


def altclip() -> Made:
    text = {**TEXT, **NO_DROP, "project_dim": 16}
    config = transformers.AltCLIPConfig(text_config=text, vision_config=SIGHT, projection_dim=16)
    return matched_pairs(transformers.AltCLIPModel(config))


def dual_encoder() -> Made:
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**SIGHT, **NO_DROP), transformers.BertConfig(**BERT), projection_dim=16)
    return matched_pairs(transformers.VisionTextDualEncoderModel(config))


def blip_matching() -> Made:
    text = {**TEXT, **NO_DROP, "encoder_hidden_size": WIDTH, "sep_token_id": 2}
    config = transformers.BlipConfig(text_config=text, vision_config=SIGHT, projection_dim=16)
    return matched_pairs(transformers.BlipModel(config))


def blip_caption() -> Made:
    text = {**TEXT, **NO_DROP, "encoder_hidden_size": WIDTH, "sep_token_id": 2, "is_decoder": True}
    config = transformers.BlipConfig(text_config=text, vision_config=SIGHT, projection_dim=16,
                                     image_text_hidden_size=16)
    words = tokens(BATCH, LENGTH)
    return transformers.BlipForConditionalGeneration(config), {
        "input_ids": words, "pixel_values": pixels(24), "attention_mask": torch.ones_like(words), "labels": words}


def git() -> Made:
    config = transformers.GitConfig(vision_config=SIGHT, **{**BERT, "num_hidden_layers": 3}, use_cache=False)
    words = tokens(BATCH, LENGTH)
    return transformers.GitForCausalLM(config), {
        "input_ids": words, "pixel_values": pixels(24), "attention_mask": torch.ones_like(words), "labels": words}


def flava() -> Made:
    side = {**SIGHT, **NO_DROP}
    config = transformers.FlavaConfig(
        image_config=side, text_config={**TEXT, **NO_DROP}, hidden_size=WIDTH, projection_dim=16,
        multimodal_config={k: v for k, v in {**side, "num_hidden_layers": 2}.items()
                           if k not in ("image_size", "patch_size")})
    mask = ragged()
    return transformers.FlavaModel(config), {"input_ids": tokens(BATCH, LENGTH), "pixel_values": pixels(24),
                                             "attention_mask": mask}


def flava_loss(output: Any, target: None = None) -> Tensor:
    """All three towers count."""
    towers = [output.image_embeddings, output.text_embeddings, output.multimodal_embeddings]
    return sum((tower - torch.linspace(-1, 1, WIDTH)).pow(2).mean() for tower in towers)


def vilt() -> Made:
    config = transformers.ViltConfig(**BERT, image_size=24, patch_size=8, max_image_length=-1, num_labels=CLASSES)
    return transformers.ViltForQuestionAnswering(config), {
        "input_ids": tokens(BATCH, LENGTH), "attention_mask": ragged(), "pixel_values": pixels(24),
        "pixel_mask": torch.ones(BATCH, 24, 24, dtype=torch.long), "labels": torch.rand(BATCH, CLASSES)}


def visual_bert() -> Made:
    config = transformers.VisualBertConfig(**BERT, visual_embedding_dim=10, num_labels=CLASSES)
    return transformers.VisualBertForQuestionAnswering(config), {
        "input_ids": tokens(BATCH, LENGTH), "attention_mask": ragged(), "visual_embeds": torch.randn(BATCH, 5, 10),
        "visual_attention_mask": torch.ones(BATCH, 5, dtype=torch.long),
        "labels": torch.rand(BATCH, CLASSES).softmax(-1)}


def lxmert() -> Made:
    sizes = {k: v for k, v in BERT.items() if k != "num_hidden_layers"}
    config = transformers.LxmertConfig(**sizes, l_layers=2, r_layers=1, x_layers=2, visual_feat_dim=10,
                                       num_qa_labels=CLASSES, num_object_labels=4, num_attr_labels=3)
    return transformers.LxmertForQuestionAnswering(config), {
        "input_ids": tokens(BATCH, LENGTH), "attention_mask": ragged(), "visual_feats": torch.randn(BATCH, 5, 10),
        "visual_pos": torch.rand(BATCH, 5, 4), "labels": classes()}


def image_in_text(net: nn.Module) -> Made:
    """Text with as many image tokens at its start as there are patches."""
    words = tokens(BATCH, PATCHES + LENGTH)
    words[:, :PATCHES] = IMAGE_TOKEN
    return net, {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": pixels(24),
                 "labels": words.masked_fill(words == IMAGE_TOKEN, -100)}


def llava() -> Made:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**SIGHT, "num_hidden_layers": 3}),
        text_config=transformers.LlamaConfig(**{**ROTARY, "num_hidden_layers": 3}),
        image_token_id=IMAGE_TOKEN, vision_feature_layer=-2, vision_feature_select_strategy="default")
    return image_in_text(transformers.LlavaForConditionalGeneration(config))


def paligemma() -> Made:
    sight = {**SIGHT, "num_hidden_layers": 2, "projection_dim": WIDTH, "vision_use_head": False}
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**sight),
        text_config=transformers.GemmaConfig(**{**ROTARY, "num_hidden_layers": 3}, head_dim=8),
        image_token_id=IMAGE_TOKEN, projection_dim=WIDTH)
    net, inputs = image_in_text(transformers.PaliGemmaForConditionalGeneration(config))
    kinds = (inputs["input_ids"] != IMAGE_TOKEN).long()
    return net, {**inputs, "token_type_ids": kinds}


def captioner() -> Made:
    """An image encoder and a text decoder joined by cross-attention."""
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**{**SIGHT, "num_hidden_layers": 3}, **NO_DROP),
        transformers.BertConfig(**{**BERT, "num_hidden_layers": 3}, use_cache=False),
        decoder_start_token_id=1, pad_token_id=0)
    return transformers.VisionEncoderDecoderModel(config), {"pixel_values": pixels(24), "labels": tokens(BATCH, 8)}


def bert_to_bert() -> Made:
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**{**BERT, "num_hidden_layers": 3}),
        transformers.BertConfig(**{**BERT, "num_hidden_layers": 3}, use_cache=False),
        decoder_start_token_id=1, pad_token_id=0)
    return transformers.EncoderDecoderModel(config), {
        "input_ids": tokens(BATCH, LENGTH), "attention_mask": ragged(), "labels": tokens(BATCH, 8)}


def clipseg() -> Made:
    config = transformers.CLIPSegConfig(
        text_config=TEXT, vision_config=SIGHT, projection_dim=16, extract_layers=[1, 2, 3], reduce_dim=16,
        decoder_num_attention_heads=2, decoder_intermediate_size=24, decoder_attention_dropout=0.0,
        conditional_layer=0)
    net, inputs = matched_pairs(transformers.CLIPSegForImageSegmentation(config))
    del inputs["return_loss"]
    return net, {**inputs, "labels": torch.rand(BATCH, 24, 24).round()}


def video() -> Made:
    config = transformers.VideoMAEConfig(**SIGHT, **NO_DROP, num_frames=4, tubelet_size=2, num_labels=CLASSES)
    return transformers.VideoMAEForVideoClassification(config), {
        "pixel_values": torch.randn(BATCH, 4, 3, 24, 24), "labels": classes()}


def space_time() -> Made:
    config = transformers.TimesformerConfig(**SIGHT, **NO_DROP, num_frames=3, drop_path_rate=0, num_labels=CLASSES,
                                            attention_type="divided_space_time")
    return transformers.TimesformerForVideoClassification(config), {
        "pixel_values": torch.randn(BATCH, 3, 3, 24, 24), "labels": classes()}


def detection_loss(output: Any, target: None = None) -> Tensor:
    """Matching boxes to targets needs scipy; fixed targets pull on the same two heads."""
    return output.logits.logsumexp(-1).pow(2).mean() + (output.pred_boxes - 0.3).pow(2).sum(-1).mean()


def detr() -> Made:
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 1, 1],
                                         layer_type="basic", out_features=["stage4"])
    config = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=WIDTH,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=6, dropout=0.0, num_labels=CLASSES)
    return transformers.DetrForObjectDetection(config), {
        "pixel_values": pixels(64), "pixel_mask": torch.ones(BATCH, 64, 64, dtype=torch.long)}


def yolos() -> Made:
    config = transformers.YolosConfig(**{**SIGHT, "image_size": [24, 24]}, **NO_DROP, num_detection_tokens=5,
                                      use_mid_position_embeddings=True, num_labels=CLASSES)
    return transformers.YolosForObjectDetection(config), {"pixel_values": pixels(24)}


def decision_transformer() -> Made:
    config = transformers.DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=WIDTH, max_ep_len=16, vocab_size=1, n_positions=64, n_layer=DEPTH,
        n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    steps = 6
    return transformers.DecisionTransformerModel(config), {
        "states": torch.randn(BATCH, steps, 5), "actions": torch.randn(BATCH, steps, 3),
        "returns_to_go": torch.randn(BATCH, steps, 1), "timesteps": torch.arange(steps).repeat(BATCH, 1),
        "attention_mask": ragged(steps)}


def behaviour_loss(output: Any, target: None = None) -> Tensor:
    """Three heads, none of which has a target among the inputs."""
    heads = [output.state_preds, output.action_preds, output.return_preds]
    return sum((head - 0.5).pow(2).mean() for head in heads)


ENTRIES = [
    *(Entry(make.__name__, "multimodal", make) for make in [
        clip, siglip, chinese_clip, altclip, dual_encoder, blip_matching, blip_caption, git, vilt, visual_bert, lxmert,
        llava, paligemma, captioner, bert_to_bert, clipseg, video, space_time]),
    Entry("flava", "multimodal", flava, flava_loss),
    Entry("detr", "multimodal", detr, detection_loss),
    Entry("yolos", "multimodal", yolos, detection_loss),
    Entry("decision_transformer", "multimodal", decision_transformer, behaviour_loss),
]
