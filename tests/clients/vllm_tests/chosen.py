"""Which of vLLM's tests apply to another server, and why the others do not."""

from __future__ import annotations

from typing import Final

# Files in which a server is asked for text over HTTP.
FILES: Final = (
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/completion/test_prompt_validation.py",
    "entrypoints/openai/completion/test_token_in_token_out.py",
    "entrypoints/openai/models/test_models.py",
    "entrypoints/openai/responses/test_basic.py",
    "entrypoints/openai/responses/test_function_call.py",
    "entrypoints/openai/responses/test_namespace_tool_separator.py",
    "entrypoints/openai/responses/test_simple.py",
    "entrypoints/openai/responses/test_stateful.py",
    "entrypoints/openai/responses/test_structured_output.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/test_openai_schema.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/middleware/test_optional_middleware.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "entrypoints/tool_parsers/test_hermes_tool_parser.py",
    "tool_use/test_chat_completions.py",
    "tool_use/test_parallel_tool_calls.py",
    "tool_use/test_tool_calls.py",
)

_CLASSES: Final = "calls vLLM's own classes, no server"
_OTHER_MODEL: Final = "about a model of another kind or family"
# Folders and files beside them, and why nothing in there applies; the longest name counts.
LEFT: Final = {
    "entrypoints": _CLASSES,
    "entrypoints/cli": "vLLM's command line",
    "entrypoints/cohere": "Cohere's API: not served here",
    "entrypoints/generate": "endpoints of vLLM's own: scoring and decisions",
    "entrypoints/launchers": "vLLM's processes, flags and signals",
    "entrypoints/llm": "vLLM as a library",
    "entrypoints/multimodal": "images, audio and video: not served here",
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py": (
        "an endpoint of vLLM's own: batches of chats"
    ),
    "entrypoints/openai/chat_completion/test_chat_completion_with_prompt_embeds.py": (
        "prompts as embeddings: not served here"
    ),
    "entrypoints/openai/chat_completion/test_extra_content_fields.py": _OTHER_MODEL,
    "entrypoints/openai/chat_completion/test_serving_chat.py": _CLASSES,
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py": _OTHER_MODEL,
    "entrypoints/openai/completion/test_completion_with_prompt_embeds.py": (
        "prompts as embeddings: not served here"
    ),
    "entrypoints/openai/completion/test_tensorizer_entrypoint.py": "a loader of vLLM's",
    "entrypoints/openai/correctness": _OTHER_MODEL,
    "entrypoints/openai/responses/test_harmony.py": _OTHER_MODEL,
    "entrypoints/openai/responses/test_mcp_tools.py": _OTHER_MODEL,
    "entrypoints/openai/responses/test_parsable_context.py": "MCP servers as tools: not served",
    "entrypoints/pooling": "embeddings and scores: not served here",
    "entrypoints/rl": "endpoints of vLLM's own: weights of a model in training",
    "entrypoints/scale_out": "endpoints of vLLM's own",
    "entrypoints/serve/dev": "endpoints of vLLM's own",
    "entrypoints/serve/instrumentator/test_metrics.py": "names of vLLM's own metrics",
    "entrypoints/serve/instrumentator/test_orca_metrics.py": "a response header of vLLM's own",
    "entrypoints/serve/instrumentator/test_uds.py": "Unix sockets: not served here",
    "entrypoints/serve/lora": "LoRA adapters: not served here",
    "entrypoints/serve/sagemaker": "SageMaker's endpoints: not served here",
    "entrypoints/serve/tokenize/test_tokenization_vlm.py": _OTHER_MODEL,
    "entrypoints/serve/tokenize/test_tokenize_then_chat_vlm.py": _OTHER_MODEL,
    "entrypoints/speech_to_text": "speech: not served here",
    "entrypoints/tool_parsers/test_granite4_tool_parser.py": _OTHER_MODEL,
    "entrypoints/tool_parsers/test_openai_tool_parser.py": _OTHER_MODEL,
    "tool_use": _CLASSES,
    "tool_use/mistral": _OTHER_MODEL,
}

_LORA: Final = "LoRA adapters: not served here"
_PRIVATE: Final = "an endpoint of vLLM's own"
_FIGURES: Final = "figures of another model's tokenizer"
_VOCABULARY: Final = "token ids that the demo model does not have"
_CONTEXT: Final = "a prompt longer than the demo model's context"
_ANSWERS: Final = "the demo model cannot know the answer that is expected"
_CALLS: Final = "the demo model does not choose to call a tool"
_REASONS: Final = "the demo model does not reason"
_SAME: Final = "the same test for another model's files"
_TEMPLATE: Final = "the texts of another model's chat template"
_WORDS: Final = "the very words of vLLM's error message"
_ENDLESS: Final = "a string or number without a bound, which the demo model does not end"
_EOS: Final = "the demo model's last token is EOS, which has no text"
_HEADER: Final = "a flag of vLLM's, about a header that is always there here"

# A pattern of a test's id, and why what it names cannot apply; the first that fits counts.
RULES: Final = (
    (r"prompt_embeds|test_responses_api_logprobs_with|test_health_check_engine_dead", _CLASSES),
    (r"lora|test_check_models", _LORA),
    (r"test_chat\.py.*test_invocations|test_completion\.py.*test_invocations", _PRIVATE),
    (r"test_tokenizer_info|test_show_version", _PRIVATE),
    (r"test_chat\.py.*test_single_chat_session", _FIGURES),
    (r"test_completion\.py.*test_single_completion", _FIGURES),
    (r"test_tokenize_(completions|chat)|test_tokenize_with_return", _FIGURES),
    (r"test_logprob_token_ids(_stream|_returns|$)", _VOCABULARY),
    (r"test_chunked_prompt\.py|test_request_cancellation|streaming_cache_usage", _CONTEXT),
    (r"test_chat_streaming\[|test_comparison_with_prompt_logprobs", _EOS),
    (r"test_server_load", "the demo model has answered before the test looks"),
    (r"test_structured_outputs_json_chat|anthropic_structured_output", _ENDLESS),
    (r"test_named_tool_use|streaming_types\[\w+-(required|tool_choice2)", _ENDLESS),
    (r"streaming_forced_tool_choice\[(required|tool_choice2)", _ENDLESS),
    (r"test_kv_transfer", "a field of vLLM's own way to disaggregate"),
    (r"test_chat_echo.*_logprobs$", "the logprobs of a whole vocabulary: a flag of vLLM's"),
    (r"test_batch_completions", "beam search: refused here"),
    (r"api_token|skips_auth", "an API key of four characters: refused here"),
    (r"test_response_format_json_(object|schema)$|test_complex_message_content", _ANSWERS),
    (r"test_(simple_input|instructions|chat|previous_response_id)$", _ANSWERS),
    (r"test_two_responses_with_same_prev_id|structured_output\.py", _ANSWERS),
    (r"test_tool_call_with_results|parallel_tool_calls_with_results", _ANSWERS),
    (r"test_long_seed|test_empty_prompt|test_out_of_vocab", _WORDS),
    (r"test_no_request_id_header", _HEADER),
    (r"tool_parsers.*test_hermes|test_namespace_tool", _CALLS),
    (r"test_parallel_tool_calls\[|test_parallel_tool_calls_false", _CALLS),
    (r"test_tool_call_and_choice|test_chat_completion_full_logprobs", _CALLS),
    (r"test_anthropic_tool_call$|streaming_expected_arguments", _CALLS),
    (r"forced_tool_choice\[auto|function_calling\.py.*tool_use\[plain-.*-auto-", _CALLS),
    (r"function_calling\.py.*tool_use\[plain-True-", _REASONS),
    (r"responses.*test_function_tool_use|reasoning_item|reasoning_tokens_e2e", _REASONS),
    (r"include_reasoning_true|reasoning_tokens_in_usage|default_includes_reasoning", _REASONS),
    (r"test_return_token_ids\.py::test_chat", _TEMPLATE),
    (r"tool_use/.*\[(?!hermes)", _SAME),
)


def why_left(file: str) -> str:
    """Why nothing in this file applies; empty: it is among `FILES`."""
    names = [name for name in LEFT if file == name or file.startswith(f"{name}/")]
    return "" if file in FILES else LEFT[max(names, key=len)]
