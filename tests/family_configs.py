"""The settings of each target family at a few thousandth of its size, nested as on disk."""

from typing import NamedTuple

TOKENS, END = 512, 2  # of the tokenizer
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# placeholders of images and the like lie behind the tokens that the tokenizer knows
IMAGE, VIDEO, AUDIO, IMAGE_START, IMAGE_END, AUDIO_START, AUDIO_END = range(TOKENS, TOKENS + 7)
MULTIMODAL = SIZES | {"vocab_size": TOKENS + 8}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
QWEN3_5 = MULTIMODAL | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN3_5_VLM = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
    },
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 184,  # no multiple of 128: the last FP8 block is cut, as at DeepSeek-V3's 576 rows
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
PIXELS = {"image_size": 16, "patch_size": 4}


class Family(NamedTuple):
    """A model class and the settings of its config, nested as on disk."""

    architecture: str
    model_type: str
    settings: dict


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", SIZES),
    "llama_tied": Family("LlamaForCausalLM", "llama", SIZES | {"tie_word_embeddings": True}),
    "granite": Family(
        "GraniteForCausalLM",
        "granite",
        SIZES
        | {
            "embedding_multiplier": 4.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", SIZES),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", SIZES | EXPERTS),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration", "qwen3_5", QWEN3_5_VLM | {"text_config": QWEN3_5}
    ),
    "qwen3_5_tied": Family(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        QWEN3_5_VLM
        | {
            "text_config": QWEN3_5 | {"tie_word_embeddings": True},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", "qwen3_5_text", QWEN3_5),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        QWEN3_5_VLM | {"text_config": QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 32}},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        SIZES | DEEPSEEK | {"num_nextn_predict_layers": 1},
    ),
    "kimi_k25": Family(
        "Kimi_K25ForConditionalGeneration",
        "kimi_k25",
        {
            "text_config": MULTIMODAL | DEEPSEEK | {"num_nextn_predict_layers": 0},
            "vision_config": VISION
            | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
            "projection_hidden_size": 32,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": IMAGE_START,
            "vision_end_token_id": IMAGE_END,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "text_config": MULTIMODAL
            | {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 16},
            "vision_config": VISION | PIXELS | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": IMAGE_START,
            "eoi_token_index": IMAGE_END,
        },
    ),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {
            "text_config": MULTIMODAL
            | {
                "tie_word_embeddings": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "global_head_dim": 32,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": MULTIMODAL["vocab_size"],
                "final_logit_softcapping": 4.0,
            },
            "vision_config": VISION
            | {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "position_embedding_size": 64,
            },
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
            "boi_token_id": IMAGE_START,
            "eoi_token_id": IMAGE_END,
            "boa_token_id": AUDIO_START,
            "eoa_token_index": AUDIO_END,
        },
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {
            "text_config": MULTIMODAL | {"model_type": "mistral"},
            "vision_config": VISION | PIXELS | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration",
        "llama4",
        {
            "text_config": MULTIMODAL
            | {
                "intermediate_size_mlp": 128,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 16,
            },
            "vision_config": VISION
            | PIXELS
            | {
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": IMAGE,
            "boi_token_index": IMAGE_START,
            "eoi_token_index": IMAGE_END,
        },
    ),
}
