"""Field names of request bodies that are not acted on, as data. Any other field is a 400 that names it.

IGNORED changes nothing about an answer here, whatever its value (accounting, logging, hints).
NEUTRAL would change the answer and is not supported: only the listed values, which ask for nothing, are accepted.
null is accepted everywhere. Both lists hold what the openai client, sglang_router, vllm-router, bench_serving and
`vllm bench serve` send.
"""

from __future__ import annotations

from typing import Any

IGNORED_OPENAI = frozenset(
    """user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options
    moderation parallel_tool_calls prediction reasoning_effort verbosity spaces_between_special_tokens
    separate_reasoning stream_reasoning log_metrics no_logs background data_parallel_rank data_parallel_rank_decode
    return_cached_tokens_details cache_salt disagg_prefill_dp_rank routed_dp_rank include_reasoning""".split()  # noqa: SIM905
)

IGNORED_SGLANG = frozenset(
    """log_metrics no_logs background stream_reasoning separate_reasoning data_parallel_rank data_parallel_rank_decode
    conversation_id extra_key routing_key return_bytes user disagg_prefill_dp_rank
    routed_dp_rank received_time spaces_between_special_tokens""".split()  # noqa: SIM905
)

NEUTRAL_OPENAI: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "lora_path": ("",),
    "session_params": (),
    "custom_logit_processor": (),
    "chat_template": (),
    "documents": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_entropy": (False,),
    "logprob_start_len": (-1,),
}

NEUTRAL_SGLANG: dict[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "modalities": ([], ["text"]),
    "lora_path": ("",),
    "lora_id": (),
    "session_params": (),
    "session_id": (),
    "custom_logit_processor": (),
    "token_ids_logprob": ([],),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_entropy": (False,),
    "return_prompt_token_ids": (False,),
}

NEUTRAL_SGLANG_SAMPLING: dict[str, tuple[Any, ...]] = {
    "structural_tag": (),
    "stop_regex": ([],),
    "beam_width": (1,),
    "custom_params": ({},),
    "stream_interval": (1,),
}
