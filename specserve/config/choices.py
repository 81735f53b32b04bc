"""Values of settings that other folders know, or that come from other servers' commands."""

CALL_FORMATS = (
    *("hermes", "qwen", "qwen25", "qwen3", "qwen3_coder"),
    *("llama3", "llama3_json", "mistral", "pythonic", "gemma4", "gpt-oss"),
)
REASONING_FORMATS = ("qwen3", "deepseek_r1", "deepseek-r1", "mimo", "gemma4", "gpt-oss")
DUMMY = "dummy"  # load_format
LOADERS = (
    *("safetensors", "pt", "npcache", "hf", "mistral", "fastsafetensors", "sharded_state", "layered"),
    *("runai_streamer", "tensorizer", "remote", "bitsandbytes", "gguf"),
)
NO_OPS = ("enable_torch_compile", "torch_compile_max_bs")
"""Settings that are accepted from SGLang's commands and never read, because torch.compile is not used."""
