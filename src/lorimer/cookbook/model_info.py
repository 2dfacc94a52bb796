"""Which renderer fits a model, by the name that the model has at a hub; as the official cookbook recommends.

A model that is not in the table, or whose official renderer is not here or has no images here, gets ``auto``: the chat
template of its own tokenizer.
"""

from lorimer.errors import InvalidInput

AUTO = ("auto",)
LLAMA3, ROLE_COLON, QWEN3_INSTRUCT = ("llama3",), ("role_colon",), ("qwen3_instruct",)
QWEN3 = ("qwen3", "qwen3_disable_thinking")
QWEN3_5 = ("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking")
QWEN3_8 = ("qwen3_8_xhigh_reasoning", "qwen3_8_disable_thinking", "qwen3_8_medium_reasoning", "qwen3_8_low_reasoning")
DEEPSEEKV3 = ("deepseekv3", "deepseekv3_thinking")
DEEPSEEKV4_1 = (
    *("deepseekv4_1", "deepseekv4_1_low_reasoning", "deepseekv4_1_max_reasoning"),
    *("deepseekv4_1_disable_thinking", "deepseekv4_1_preserve_thinking"),
)
GLM5_3 = ("glm5_3_max_reasoning", "glm5_3_low_reasoning", "glm5_3_high_reasoning")
GPT_OSS = ("gpt_oss_no_sysprompt", "gpt_oss_medium_reasoning")
NEMOTRON3 = ("nemotron3", "nemotron3_disable_thinking", "nemotron3_preserve_thinking")
NEMOTRON3_SUPER = (*NEMOTRON3, "nemotron3_low_thinking")
NEMOTRON3_ULTRA = (
    *("nemotron3_ultra", "nemotron3_ultra_disable_thinking"),
    *("nemotron3_ultra_medium_thinking", "nemotron3_ultra_preserve_thinking"),
)
NEMOTRON3_LIGHTNING = tuple(name for name in NEMOTRON3_ULTRA if name != "nemotron3_ultra_medium_thinking")

RENDERERS = {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA3,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA3,
    "meta-llama/Llama-3.2-1B": ROLE_COLON,
    "meta-llama/Llama-3.2-3B": ROLE_COLON,
    "meta-llama/Llama-3.1-8B": ROLE_COLON,
    "meta-llama/Llama-3.1-70B": ROLE_COLON,
    "Qwen/Qwen3-8B-Base": ROLE_COLON,
    "Qwen/Qwen3-30B-A3B-Base": ROLE_COLON,
    "Qwen/Qwen3.5-9B-Base": ROLE_COLON,
    "Qwen/Qwen3.5-35B-A3B-Base": ROLE_COLON,
    "Qwen/Qwen3-8B": QWEN3,
    "Qwen/Qwen3-32B": QWEN3,
    "Qwen/Qwen3-30B-A3B": QWEN3,
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3_INSTRUCT,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": QWEN3_INSTRUCT,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": QWEN3_INSTRUCT,
    "Qwen/Qwen3.5-4B": QWEN3_5,
    "Qwen/Qwen3.5-9B": QWEN3_5,
    "Qwen/Qwen3.5-27B": QWEN3_5,
    "Qwen/Qwen3.5-35B-A3B": QWEN3_5,
    "Qwen/Qwen3.5-397B-A17B": QWEN3_5,
    "Qwen/Qwen3.6-27B": QWEN3_5,
    "Qwen/Qwen3.6-35B-A3B": QWEN3_5,
    "Qwen/Qwen3.8-27B": QWEN3_8,
    "deepseek-ai/DeepSeek-V3.1": DEEPSEEKV3,
    "deepseek-ai/DeepSeek-V3.1-Base": ROLE_COLON,
    "deepseek-ai/DeepSeek-V4.1-Flash": DEEPSEEKV4_1,
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": DEEPSEEKV4_1,
    "moonshotai/Kimi-K2-Thinking": ("kimi_k2",),
    "moonshotai/Kimi-K2.5": ("kimi_k25", "kimi_k25_disable_thinking"),
    "moonshotai/Kimi-K2.6": ("kimi_k26", "kimi_k26_disable_thinking", "kimi_k26_preserve_thinking"),
    "zai-org/GLM-5.3": GLM5_3,
    "zai-org/GLM-5.3-Flash": GLM5_3,
    "openai/gpt-oss-20b": GPT_OSS,
    "openai/gpt-oss-120b": GPT_OSS,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": NEMOTRON3,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": NEMOTRON3_SUPER,
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": NEMOTRON3_ULTRA,
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": NEMOTRON3_LIGHTNING,
}
"""Facts of ``tinker_cookbook.model_info`` 0.5.8; a test of ``make cookbook-official`` compares them."""


def get_recommended_renderer_names(model_name: str) -> list[str]:
    """The renderers made for a model, the best first; a colon and what follows, a checkpoint's name, is ignored."""
    if not isinstance(model_name, str) or not model_name:
        raise InvalidInput(f"the name of a model is {model_name!r}; a text such as 'Qwen/Qwen3-8B' is accepted")
    return list(RENDERERS.get(model_name.partition(":")[0], AUTO))


def get_recommended_renderer_name(model_name: str) -> str:
    return get_recommended_renderer_names(model_name)[0]
