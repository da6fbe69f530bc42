"""Vision models from transformers: patches, windows, pyramids and convolutions with batch statistics."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo.entry import BATCH, CLASSES, DEPTH, HEADS, WIDTH, Entry, Made, classes, pixels

VIT = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "image_size": 24,
    "patch_size": 8,
}
NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classifier(
    name: str, config: str, model: str, *, side: int = 32, dense: bool = False, entry: Any = None, **sizes: Any
) -> Entry:
    """One class per image, or one per pixel where ``dense``."""

    def make() -> Made:
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes, num_labels=CLASSES))
        labels = classes(BATCH, side, side) if dense else classes()
        return net, {"pixel_values": pixels(side), "labels": labels}

    return Entry(name, "vision", make, **(entry or {}))


def masked_patches(name: str, config: str, model: str, *, side: int = 24, **sizes: Any) -> Entry:
    """Pixels are rebuilt where patches were hidden; which ones is an input."""

    def make() -> Made:
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        hidden = torch.rand(BATCH, (side // sizes["patch_size"]) ** 2) < 0.5
        hidden[:, 0] = True
        return net, {"pixel_values": pixels(side), "bool_masked_pos": hidden}

    return Entry(name, "vision", make)


def upernet() -> Made:
    backbone = transformers.ConvNextConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 12, 16, 24], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, pool_scales=[1, 2], auxiliary_channels=8, auxiliary_in_channels=16,
        num_labels=CLASSES,
    )
    return transformers.UperNetForSemanticSegmentation(config), {
        "pixel_values": pixels(64), "labels": classes(BATCH, 64, 64)}


def dpt() -> Made:
    config = transformers.DPTConfig(
        **VIT, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 12, 16, 24], fusion_hidden_size=16,
        reassemble_factors=[4, 2, 1, 0.5], auxiliary_loss_weight=0.4, semantic_classifier_dropout=0.0,
        num_labels=CLASSES, is_hybrid=False, readout_type="project",
    )
    return transformers.DPTForSemanticSegmentation(config), {
        "pixel_values": pixels(24), "labels": classes(BATCH, 24, 24)}


SMALL_CONV = {"num_channels": 3, "embedding_size": 8, "hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 2, 1]}

ENTRIES = [
    classifier("vit", "ViTConfig", "ViTForImageClassification", side=24, **VIT),
    classifier("deit", "DeiTConfig", "DeiTForImageClassification", side=24, **VIT),
    classifier("beit", "BeitConfig", "BeitForImageClassification", side=24, **VIT, use_relative_position_bias=True,
               drop_path_rate=0.0),
    classifier("dinov2", "Dinov2Config", "Dinov2ForImageClassification", side=24, **{k: v for k,
               v in VIT.items() if k != "intermediate_size"}, mlp_ratio=2, drop_path_rate=0.0),
    classifier("dinov2_registers", "Dinov2WithRegistersConfig", "Dinov2WithRegistersForImageClassification", side=24,
               **{k: v for k, v in VIT.items() if k != "intermediate_size"}, mlp_ratio=2, num_register_tokens=2,
               drop_path_rate=0.0),
    classifier("dinov2_droppath", "Dinov2Config", "Dinov2ForImageClassification", side=24, **{k: v for k,
               v in VIT.items() if k != "intermediate_size"}, mlp_ratio=2, drop_path_rate=0.4, entry={"random": True}),
    classifier("swin", "SwinConfig", "SwinForImageClassification", image_size=32, patch_size=4, embed_dim=16,
               depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0, **NO_DROP),
    classifier("swinv2", "Swinv2Config", "Swinv2ForImageClassification", entry={"lr": 0.005}, image_size=32,
               patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0,
               **NO_DROP),
    classifier("resnet", "ResNetConfig", "ResNetForImageClassification", side=48, layer_type="basic", **SMALL_CONV),
    classifier("regnet", "RegNetConfig", "RegNetForImageClassification", side=48, groups_width=4, layer_type="y",
               **SMALL_CONV),
    classifier("convnext", "ConvNextConfig", "ConvNextForImageClassification", side=64, depths=[1, 1, 2, 1],
               hidden_sizes=[8, 12, 16, 24], drop_path_rate=0.0),
    classifier("convnextv2", "ConvNextV2Config", "ConvNextV2ForImageClassification", side=64, depths=[1, 1, 2, 1],
               hidden_sizes=[8, 12, 16, 24], drop_path_rate=0.0),
    classifier("mobilenet_v1", "MobileNetV1Config", "MobileNetV1ForImageClassification", entry={"lr": 0.001}, side=64,
               image_size=64, depth_multiplier=0.1, min_depth=8, classifier_dropout_prob=0.0, hidden_act="silu"),
    # Smooth activations: one clipped value that falls on the other side of 6 moves whole batch statistics.
    classifier("mobilenet_v2", "MobileNetV2Config", "MobileNetV2ForImageClassification", entry={"lr": 0.001}, side=64,
               image_size=64, depth_multiplier=0.2, min_depth=4, output_stride=16, classifier_dropout_prob=0.0,
               hidden_act="silu"),
    classifier("mobilevit", "MobileViTConfig", "MobileViTForImageClassification", side=64, image_size=64,
               hidden_sizes=[16, 20, 24], neck_hidden_sizes=[8, 8, 12, 16, 20, 24, 32], num_attention_heads=2,
               conv_kernel_size=3, expand_ratio=2.0, mlp_ratio=1.5, classifier_dropout_prob=0.0, **NO_DROP),
    classifier("efficientnet", "EfficientNetConfig", "EfficientNetForImageClassification", side=48, image_size=48,
               width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320, dropout_rate=0.0, drop_connect_rate=0.0,
               in_channels=[32, 16, 24], out_channels=[16, 24, 40], kernel_sizes=[3, 3, 5], strides=[1, 2, 2],
               num_block_repeats=[1, 2, 2], expand_ratios=[1, 4, 4], depthwise_padding=[]),
    classifier("poolformer", "PoolFormerConfig", "PoolFormerForImageClassification", side=64, depths=[1, 1, 2, 1],
               hidden_sizes=[8, 12, 16, 24], drop_path_rate=0.0),
    classifier("pvt", "PvtConfig", "PvtForImageClassification", side=32, image_size=32, depths=[1, 1, 1, 1],
               hidden_sizes=[8, 12, 16, 24], sequence_reduction_ratios=[4, 2, 1, 1], num_attention_heads=[1, 2, 2, 4],
               mlp_ratios=[2, 2, 2, 2], drop_path_rate=0.0, **NO_DROP),
    classifier("cvt", "CvtConfig", "CvtForImageClassification", side=64, entry={"lr": 0.004}, embed_dim=[8, 16, 24],
               num_heads=[1, 2, 2], depth=[1, 2, 3], drop_rate=[0.0] * 3, attention_drop_rate=[0.0] * 3,
               drop_path_rate=[0.0] * 3, mlp_ratio=[2.0] * 3),
    classifier("focalnet", "FocalNetConfig", "FocalNetForImageClassification", side=32, image_size=32, patch_size=4,
               embed_dim=16, hidden_sizes=[16, 32], depths=[2, 2], focal_levels=[2, 2], focal_windows=[3, 3],
               drop_path_rate=0.0, hidden_dropout_prob=0.0),
    classifier("swiftformer", "SwiftFormerConfig", "SwiftFormerForImageClassification", side=64, image_size=64,
               depths=[1, 1, 1, 1], embed_dims=[8, 12, 16, 24], mlp_ratio=2, drop_path_rate=0.0, drop_mlp_rate=0.0,
               drop_conv_encoder_rate=0.0),
    classifier("segformer", "SegformerConfig", "SegformerForSemanticSegmentation", side=32, dense=True,
               num_encoder_blocks=3, depths=[1, 2, 1], sr_ratios=[4, 2, 1], hidden_sizes=[8, 16, 24], patch_sizes=[7,
               3, 3], strides=[4, 2, 2], num_attention_heads=[1, 2, 4], mlp_ratios=[2, 2, 2], decoder_hidden_size=16,
               drop_path_rate=0.0, classifier_dropout_prob=0.0, **NO_DROP),
    masked_patches("vit_masked", "ViTConfig", "ViTForMaskedImageModeling", **VIT, encoder_stride=8),
    masked_patches("swin_masked", "SwinConfig", "SwinForMaskedImageModeling", side=32, image_size=32, patch_size=4,
                   embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0, encoder_stride=8,
                   **NO_DROP),
    Entry("upernet", "vision", upernet),
    Entry("dpt", "vision", dpt, random=True),
]
