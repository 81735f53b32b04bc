"""Values of settings that other folders know, or that come from other servers' commands."""

CALL_FORMATS = (
    *("hermes", "qwen", "qwen25", "qwen3", "qwen3_coder", "qwen3_xml"),
    *("llama3", "llama3_json", "mistral", "pythonic", "llama4_pythonic", "gemma4", "gpt-oss", "openai"),
    *("glm45", "glm47", "glm", "minimax_m2", "minimax-m2", "deepseek_v3", "deepseekv3", "deepseek_v31"),
    *("deepseekv31", "deepseek_v32", "deepseekv32", "deepseek_v4", "deepseekv4", "kimi_k2"),
)
REASONING_FORMATS = (
    *("qwen3", "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v4"),
    *("deepseek-v4", "glm45", "glm47", "minimax_m2", "minimax", "mimo", "qwen3-thinking"),
    *("kimi_k2", "gemma4", "gpt-oss", "openai_gptoss"),
)
DUMMY = "dummy"  # load_format
LOADERS = (
    *("safetensors", "pt", "npcache", "hf", "mistral", "fastsafetensors", "sharded_state", "layered"),
    *("runai_streamer", "tensorizer", "remote", "bitsandbytes", "gguf"),
)
NO_OPS = ("enable_torch_compile", "torch_compile_max_bs")
"""Settings that are accepted from SGLang's commands and never read, because torch.compile is not used."""
