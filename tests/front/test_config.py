"""Settings: sources, their order, errors, automatic choices, and the page that describes them."""

from __future__ import annotations

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specserve_kernels import tree_pool_size

from specserve.config import (
    SETTINGS,
    Settings,
    load_settings,
    make_settings,
    resolve,
    resolve_paths,
    unused,
)
from specserve.config import paths as config_paths
from specserve.config.notes import Notes, log_notes
from specserve.config.sampling import resolve_sampling
from specserve.config.sources import exit_code
from specserve.config.speculation import resolve_speculation
from specserve.layers.batch import Softmax
from specserve.methods import JOIN
from specserve.tools.reference import settings_reference
from tests.engines import drafting, shaped

ROOT = Path(__file__).parents[2]
LLAMA: Any = SimpleNamespace(
    most_levels=None,
    architecture="LlamaForCausalLM",
    longest_context=(2048, "max_position_embeddings"),
    dtype="float32",
    vocab_size=100,
    layers=(SimpleNamespace(head_dim=128, softmax=Softmax(), latent=None, experts=None),),
    states=(),
)
QWEN: Any = SimpleNamespace(**{**vars(LLAMA), "architecture": "Qwen3ForCausalLM"})


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "m").mkdir()
    return str(tmp_path / "m")


def load(line: str, **environ: str) -> Settings:
    return load_settings(line.split(), environ)


def speculative(model: str, **values: Any) -> Settings:
    return Settings(
        model_path=model, speculative_algorithm="EAGLE3", speculative_draft_model_path=model, **values
    )


def test_sources_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text("page-size: 64\nport: 1\nhost: from-yaml\nmem_fraction: 1\noverlap_schedule: off\n")
    environ = {"SPECSERVE_PORT": "2", "SPECSERVE_HOST": "from-env", "SPECSERVE_API_KEY": "", "HOME": "x"}
    found = load_settings(["--config", str(file), "--port", "3"], environ)
    assert (found.port, found.host, found.page_size) == (3, "from-env", 64)
    assert (found.mem_fraction_static, found.api_key, found.overlap_schedule) == (1.0, None, "off")
    assert load_settings([], {"SPECSERVE_CONFIG": str(file)}).port == 1
    assert load_settings([], {}) == Settings()


def test_only_the_first_source_is_checked(tmp_path: Path) -> None:
    """A flag is enough where an environment or a file can't be changed. Names are always checked."""
    file = tmp_path / "conf.yaml"
    file.write_text("port: x\npage_size: 3\n")
    environ = {"SPECSERVE_PORT": "y", "SPECSERVE_CONFIG": str(file)}
    found = load_settings(["--port", "3", "--page-size", "64"], environ)
    assert (found.port, found.page_size) == (3, 64)
    with pytest.raises(ValueError, match=r"conf\.yaml: page_size: must be a power of two"):
        load_settings(["--port", "3"], environ)
    with pytest.raises(ValueError, match="SPECSERVE_PORT: must be an integer, found 'y'"):
        load_settings(["--page-size", "64"], environ)
    with pytest.raises(ValueError, match="SPECSERVE_PROT: unknown setting"):
        load_settings(["--port", "3"], {"SPECSERVE_PROT": "3"})


LINKS = {
    "SPECSERVE_SERVICE_HOST": "10.0.0.1",
    "SPECSERVE_SERVICE_PORT": "30000",
    "SPECSERVE_SERVICE_PORT_HTTP": "30000",
    "SPECSERVE_PORT": "tcp://10.0.0.1:30000",
    "SPECSERVE_PORT_30000_TCP": "tcp://10.0.0.1:30000",
    "SPECSERVE_PORT_30000_TCP_PROTO": "tcp",
    "SPECSERVE_PORT_30000_TCP_PORT": "30000",
    "SPECSERVE_PORT_30000_TCP_ADDR": "10.0.0.1",
    "SPECSERVE_CHAT_SERVICE_HOST": "10.0.0.2",
    "SPECSERVE_CHAT_PORT": "tcp://10.0.0.2:80",
}


def test_how_other_servers_are_told_to_speculate(tmp_path: Path) -> None:
    """vLLM's object from each source, its probabilities and means, and variables for the same means."""
    given = {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    }
    drawn = {**given, "rejection_sample_method": "synthetic"}
    chain = Settings(**drafting("STANDALONE", Path("d"), (3, 1, 4)))
    file = tmp_path / "conf.yaml"
    file.write_text(json.dumps({"speculative-config": given}))
    for found in (
        load_settings(["--speculative-config", json.dumps(given)], {}),
        load_settings(["-sc", json.dumps(given), "--model-path", "m"], {}),
        load_settings([], {"SPECSERVE_SPECULATIVE_CONFIG": json.dumps(given)}),
        load_settings(["--config", str(file)], {}),
        make_settings(speculative_config=given),
    ):
        assert replace(found, model_path=None) == chain
    shape = ["--config", str(file), "--speculative-num-steps", "5"]
    assert load_settings(shape, {}).speculative_num_steps == 5
    for key, value, text in (
        ("synthetic_acceptance_length", 2.5, "2.5"),
        ("synthetic_acceptance_rates", [0.8, 0.4, 0], "0.8,0.5,0,0"),
        ("synthetic_acceptance_rates", [1, 1, 1], "1,1,1,0"),
    ):
        found = make_settings(speculative_config={**drawn, key: value})
        assert found == replace(chain, speculative_synthetic_acceptance=text)
    for environ, mean in (
        ({"SGLANG_SIMULATE_ACC_LEN": "3.39", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}, "3.39"),
        ({"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "2.39"}, "3.39"),
        ({"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "0.0", "SGLANG_SIMULATE_ACC_LEN": "-1"}, None),
        ({"SGLANG_SIMULATE_ACC_LEN": "x", "SPECSERVE_SPECULATIVE_SYNTHETIC_ACCEPTANCE": "0.5"}, "0.5"),
        ({"SGLANG_SIMULATE_ACC_METHOD": "multinomial"}, None),
    ):
        assert load_settings([], environ).speculative_synthetic_acceptance == mean
    assert [*unused([], {"SGLANG_SIMULATE_ACC_LEN": "3"})] == [
        "SGLANG_SIMULATE_ACC_LEN is read as --speculative-synthetic-acceptance, unless that is given"
    ]
    assert unused([], {"SGLANG_SIMULATE_ACC_LEN": "0"}) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "nosuch"}, "speculative_config: method: must be one of NONE, EAGLE, EAGLE3, "),
        ({"model": "d"}, "speculative_config: method is needed"),
        ({"prompt_lookup_max": 4}, "prompt_lookup_max is not accepted; accepted are method, model, "),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is not accepted; accepted are"),
        ("eagle3", "speculative_config: must be a JSON object: "),
        (3, "speculative_config: must be a JSON object, found 3"),
        ({"num_speculative_tokens": "x"}, "num_speculative_tokens: must be an integer, found 'x'"),
        ({"rejection_sample_method": "block"}, "must be one of standard, strict, synthetic, found 'block'"),
        ({"rejection_sample_method": "synthetic"}, "needs one of synthetic_acceptance_length and synthetic_"),
        ({"synthetic_acceptance_length": 2}, "rejection_sample_method synthetic, and no other, needs one of"),
        ({"length": 0.5}, "synthetic_acceptance_length: must be from 1 to 64, found 0.5"),
        ({"rates": [0.5]}, "must be a list of num_speculative_tokens numbers from 1 down to 0, found [0.5]"),
        ({"rates": [0.5, 0.6, 0.1]}, "numbers from 1 down to 0, found [0.5, 0.6, 0.1]"),
        ({"rates": [0.5, "x", 0.1]}, "numbers from 1 down to 0, found [0.5, 'x', 0.1]"),
        ({"rates": [1.5, 1, 0.1]}, "numbers from 1 down to 0, found [1.5, 1, 0.1]"),
    ],
)  # fmt: skip
def test_what_is_not_taken_from_other_servers(given: Any, words: str) -> None:
    if isinstance(given, dict) and (key := next(iter(given))) in ("length", "rates"):
        given = {"num_speculative_tokens": 3, f"synthetic_acceptance_{key}": given[key]}
        given["rejection_sample_method"] = "synthetic"
    if isinstance(given, dict) and "model" not in given:
        given = {"method": "eagle3", **given}
    with pytest.raises(ValueError, match=r".") as error:
        make_settings(speculative_config=given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_variables_of_kubernetes_are_no_settings() -> None:
    """For Services named specserve and specserve-chat."""
    assert load_settings([], LINKS) == Settings()
    assert load_settings(["--port", "5"], {**LINKS, "SPECSERVE_PAGE_SIZE": "64"}).port == 5
    (note,) = unused([], {**LINKS, "SPECSERVE_PAGE_SIZE": "64", "HOME": "x"})
    assert note == f"{', '.join(sorted(LINKS))}: not read: Kubernetes makes such variables for a Service"
    assert unused([], {"SPECSERVE_PORT": "30000"}) == {}
    for name, text in (
        ("SPECSERVE_PORT", "http://x"),
        ("SPECSERVE_CHAT_PORT", "80"),
        ("SPECSERVE_SERVICE", "x"),
    ):
        with pytest.raises(ValueError, match=name):
            load_settings([], {name: text})


def test_every_flag_of_the_contract_exists() -> None:
    contract = """
        --model-path --model --tokenizer-path --skip-tokenizer-init --trust-remote-code --served-model-name
        --host --port --device --dtype --api-key --max-running-requests --max-total-tokens --context-length
        --mem-fraction-static --mem-fraction --page-size --chunked-prefill-size --disable-radix-cache
        --disable-cuda-graph --disable-overlap-schedule --cuda-graph-max-bs --attention-backend --log-level
        --random-seed --speculative-algorithm --speculative-draft-model-path --speculative-num-steps
        --speculative-eagle-topk --speculative-num-draft-tokens --speculative-token-map
        --speculative-draft-quantization --enable-torch-compile --torch-compile-max-bs
        --requests-all-greedy"""
    flags = {flag for declared in SETTINGS.values() for flag in declared.flags}
    assert set(contract.split()) <= flags


def test_values_of_all_kinds() -> None:
    found = load(
        "--model m --served-model-name a b --served-model-name c --disable-radix-cache "
        "--requests-all-greedy false --speculative-algorithm eagle3 --mem-fraction .5 "
        "--chunked-prefill-size -1",
        SPECSERVE_REQUESTS_ALL_GREEDY="yes",
    )
    assert found.model_path == "m"
    assert found.served_model_name == ("a", "b", "c")
    assert (found.disable_radix_cache, found.requests_all_greedy) == (True, False)
    assert (found.speculative_algorithm, found.mem_fraction_static) == ("EAGLE3", 0.5)
    assert found.chunked_prefill_size == -1
    assert load("", SPECSERVE_SERVED_MODEL_NAME="a,b").served_model_name == ("a", "b")
    assert make_settings(served_model_name=["a"], port=5).served_model_name == ("a",)


@pytest.mark.parametrize(
    ("line", "environ", "words"),
    [
        ("--page-sise 3", {}, "--page-sise: unknown flag; the nearest known one is --page-size"),
        ("--fastapi-docs", {}, "--fastapi-docs: unknown flag; --help lists all"),
        ("--hf-token x", {}, "--hf-token: unknown flag; here it is the variable HF_TOKEN"),
        ("--draft-model-path x", {}, "unknown flag; here it is --speculative-draft-model-path"),
        ("--enable-radix-cache", {}, "unknown flag; leave it out: there is only --disable-radix-cache"),
        ("--no-disable-cuda-graph", {}, "unknown flag; leave it out: there is only --disable-cuda-graph"),
        ("--tp_size 2", {}, "--tp_size: unknown flag; write --tp-size"),
        ("--speculative-num-step=3", {}, "nearest known one is --speculative-num-steps"),
        ("--kv-cache-dtype FP8_E5M2", {}, "--kv-cache-dtype: FP8_E5M2 is refused: it has a mantissa bit less than"),
        ("--quantization=gguf", {}, "--quantization: must be one of none, fp8, int8, int4, awq, gptq"),
        ("--generation-config vllm", {}, "here it is --sampling-defaults (model for auto, openai for vllm)"),
        ("--sampling-defaults vllm", {}, "--sampling-defaults: must be one of model, openai, found 'vllm'"),
        ("--port 5 serve", {}, "unexpected argument 'serve'"),
        ("--enable-prefix-caching org/name", {}, "unexpected argument 'org/name'"),
        ("a --model b", {}, "--model-path: given twice, first as 'a'"),
        ("--port", {}, "--port: expected one argument"),
        ("--port x", {}, "--port: must be an integer, found 'x'"),
        ("--port 70000", {}, "--port: must be from 0 to 65535, found 70000"),
        ("--speculative-max-slowdown 0.9", {}, "must be at least 1 or none, found 0.9"),
        ("--speculative-max-slowdown x", {}, "--speculative-max-slowdown: must be a number or none, found 'x'"),
        ("--page-size 3", {}, "--page-size: must be a power of two from 1 to 256, found 3"),
        ("--mem-fraction nan", {}, "--mem-fraction-static: must be a number"),
        ("--disable-radix-cache maybe", {}, "--disable-radix-cache: must be true or false, found 'maybe'"),
        ("--speculative-algorithm EAGLE2", {}, "EAGLE2 is refused: EAGLE-2's drafts and trees are those of EAGLE"),
        ("--speculative-algorithm eagle-2", {}, "eagle-2 is refused: EAGLE-2's drafts and trees are those of EAGLE"),
        ("--speculative-algorithm NOSUCH", {}, "must be one of NONE, EAGLE, EAGLE3, "),
        ("--speculative-algorithm EAGEL3", {}, "found 'EAGEL3'; the nearest is EAGLE3"),
        ("--tp 0", {}, "--tensor-parallel-size: must be from 1 to 64, found 0"),
        ("--nnodes 2", {}, "--nnodes: not accepted: ranks run on one machine"),
        ("--enable-dp-attention", {}, "--enable-dp-attention: not accepted: attention is shared out by heads"),
        ("--pp-size 2", {}, "--pp-size: not accepted: every layer is shared out, by --tensor-parallel-size"),
        ("--attn-cp-size 2", {}, "--attn-cp-size: not accepted: attention is shared out by heads, by --tensor-paral"),
        ("--moe-dp-size 2", {}, "--moe-dp-size: not accepted: experts are shared out by --expert-parallel-size and"),
        ("--data-parallel-rank 1", {}, "--data-parallel-rank: not accepted: a server is one replica; start several"),
        ("--base-gpu-id 1", {}, "--base-gpu-id: unknown flag; here it is the variable CUDA_VISIBLE_DEVICES"),
        ("--speculative-accept-threshold-single 0.9", {}, "must be 1, because speculation never changes the text"),
        ("--chunked-prefill-size 0", {}, "must be -1 or at least 1, found 0"),
        ("--max-running-requests -1", {}, "--max-running-requests: must be from 1 to 65536, found -1"),
        ("--disable-overlap-schedule --overlap-schedule on", {}, "contradicts"),
        ("--api-key=", {}, "--api-key: must be texts, none empty"),
        ("--api-key c2VjcmV0IGtleSBvZiBvdXJz= team-a=", {}, "--api-key: must not be NAME= without a key"),
        ("--api-key=schlüssel", {}, "--api-key: must be printable ASCII, as it is sent in a header"),
        ("", {"SPECSERVE_API_KEY": "a\nb"}, "SPECSERVE_API_KEY: must be printable ASCII"),
        ("--cors-origin foo", {}, "--cors-origin: must be * or what browsers send, like https://example.com:8443"),
        ("--cors-origin http://a.com http://b.com/", {}, "found 'http://b.com/'"),
        ("--cors-origin http://[::1", {}, "--cors-origin: must be * or what browsers send"),
        ("--cors-origin https://Example.com", {}, "in lower case"),
        ("--cors-origin https://*.a.com", {}, "found 'https://*.a.com'"),
        ("--cors-origin https://a.com:443", {}, "or the scheme's own port"),
        ("--cors-origin https://", {}, "found 'https://'"),
        ("--served-model-name a b a", {}, "--served-model-name: must name each model once, found 'a' again"),
        ("--cpu-threads 100000", {}, "the cores of this machine, found 100000"),
        ("--max-running-requests 65537", {}, "--max-running-requests: must be from 1 to 65536, found 65537"),
        ("--config /nowhere.yaml", {}, "/nowhere.yaml can't be read"),
        ("", {"SPECSERVE_ENABLE_METRICS": "1"}, "not accepted: metrics are always at /metrics; leave it out"),
        ("", {"SPECSERVE_PAGESIZE": "3"}, "unknown setting; the nearest known one is SPECSERVE_PAGE_SIZE"),
        ("", {"SPECSERVE_PORT": "x"}, "SPECSERVE_PORT: must be an integer"),
        ("", {"SPECSERVE_MODEL": "a", "SPECSERVE_MODEL_PATH": "b"}, "given twice"),
        ('-sc {"method":"mtp"} --speculative-algo MTP', {}, "given twice, under two names"),
        ("", {"SGLANG_SIMULATE_ACC_LEN": "x"}, "SGLANG_SIMULATE_ACC_LEN: must be a number, found 'x'"),
        ("", {"SGLANG_SIMULATE_ACC_LEN": "0.5"}, "SGLANG_SIMULATE_ACC_LEN: must be from 1 to 64, found 0.5"),
        ("", {"SGLANG_SIMULATE_ACC_LEN": "2", "SGLANG_SIMULATE_ACC_METHOD": "multinomial"},
         "SGLANG_SIMULATE_ACC_METHOD: must be match-expected, found 'multinomial'"),
        ("", {"SGLANG_SIMULATE_ACC_LEN": "2", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed"},
         "SGLANG_SIMULATE_ACC_TOKEN_MODE: must be real-draft-token, found 'fixed'"),
        ("", {"SGLANG_SIMULATE_ACC_LEN": "2", "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "1"}, "both set; set one"),
    ],
)  # fmt: skip
def test_errors_name_the_setting(line: str, environ: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load(line, **environ)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_model_may_come_first() -> None:
    assert load("org/name --port 5").model_path == load("serve org/name").model_path == "org/name"
    assert load("serve").model_path is None


def test_all_wrong_flags_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load("--foo -3 --port x --dp=2 --max-model-len 5 --enable-metrics --page-size 16")
    flags = [line.split(":")[0] for line in str(error.value).splitlines()]
    assert flags == ["--foo", "--max-model-len", "--dp", "--port"]


def test_flags_of_other_servers_that_change_nothing() -> None:
    """Those in the commands that people copy; each is told with its reason."""
    line = (
        "--enable-metrics --cuda-graph-bs 1 2 4 --skip-server-warmup --model-impl=auto --port 5 "
        "--enable-auto-tool-choice --dtype half --attention-backend FA3 -tp 1 -dp 1 --pp-size=1"
    )
    found = load(line)
    assert (found.port, found.dtype, found.attention_backend) == (5, "float16", "fa3")
    notes = list(unused(line.split(), {}))
    assert [note.split()[0] for note in notes] == [
        *("--enable-metrics", "--cuda-graph-bs", "--skip-server-warmup", "--model-impl"),
        *("--enable-auto-tool-choice", "--dp", "--pp-size"),
    ]
    assert notes[0] == "--enable-metrics has no effect: metrics are always at /metrics"


def test_flags_of_states_and_latents() -> None:
    """In commands for Qwen3.5 and DeepSeek."""
    line = "--mamba-track-interval 64 --linear-attn-decode-backend flashinfer --attention-backend flashmla"
    found = load(f'{line} -sc {{"method":"qwen3_next_mtp","num_speculative_tokens":2}}')
    assert (found.speculative_algorithm, found.attention_backend) == ("MTP", "flashmla")
    interval, backend = unused(line.split(), {})
    assert interval.startswith("--mamba-track-interval has no effect: states are cached where")
    assert backend.endswith("no effect: there is one implementation of layers that keep a state")
    with pytest.raises(ValueError, match=r"--mamba-cache-dtype: .*--mamba-ssm-dtype"):
        load("--mamba-cache-dtype float32")


def test_flags_of_experts() -> None:
    """Each is told by its name, and a switch does not swallow what follows."""
    line = "--enable-eplb --moe-a2a-backend deepep --moe-runner-backend triton --enable-deepep-waterfill"
    assert load(f"{line} --port 5").port == 5
    kernel = "how experts are stored decides their kernel"
    one = "outputs of experts are added over ranks like all others, and experts stay where they are"
    assert list(unused(line.split(), {})) == [
        f"--enable-eplb has no effect: {one}",
        f"--moe-a2a-backend has no effect: {one}",
        f"--moe-runner-backend has no effect: {kernel}",
        f"--enable-deepep-waterfill has no effect: {one}",
    ]
    alone = load("-ep --distributed-timeout-seconds 9 --device cpu")
    assert alone.enable_expert_parallel
    assert (
        "--dist-timeout, --enable-expert-parallel has no effect: there is one rank"
        in resolve(alone, LLAMA)[1]
    )
    given = load("--enable-ep-moe --tp 2 --device cpu --speculative-draft-tensor-parallel-size 1")
    for each, told in (
        (given, "--enable-expert-parallel: must not be set"),
        (load("--tp 2 --ep 2 --device cpu"), "--expert-parallel-size: must be 1"),
    ):
        with pytest.raises(ValueError, match=f"{told} for LlamaForCausalLM, which has no experts"):
            resolve(each, LLAMA)
    for each, told in (
        (load("--tp 2 --ep 4 --device cpu"), "divide --tensor-parallel-size 2, found 4"),
        (replace(given, expert_parallel_size=4), "be 2 with --enable-expert-parallel, found 4"),
    ):
        with pytest.raises(ValueError, match=f"--expert-parallel-size: must {told}"):
            resolve(each, LLAMA)
    with pytest.raises(ValueError, match="-metrics: not accepted: which experts are chosen is not recorded"):
        load("--enable-expert-distribution-metrics")


def test_keywords_of_other_servers_that_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert make_settings(pipeline_parallel_size=1, disable_custom_all_reduce=True, port=5).port == 5
    assert [each.getMessage().split(":")[0] for each in caplog.records] == [
        "pipeline_parallel_size has no effect",
        "disable_custom_all_reduce has no effect",
    ]
    for name, value, words in (
        ("pipeline_parallel_size", 2, "every layer is shared out"),
        ("enable_prefix_caching", False, "prefixes are cached unless --disable-radix-cache"),
    ):
        with pytest.raises(ValueError, match=f"{name}: not accepted: {words}"):
            make_settings(**{name: value})


def test_lines_of_other_servers_that_change_nothing(tmp_path: Path) -> None:
    """SGLang's documentation begins with such a file."""
    file = tmp_path / "config.yaml"
    file.write_text("port: 5\ntensor-parallel-size: 1\ndp-size: 1\nenable-metrics: true\n")
    assert load(f"--config {file}").port == 5
    notes = [*unused(["--config", str(file)], {})]
    assert [note.split()[0] for note in notes] == ["--dp-size", "--enable-metrics"]
    file.write_text("dp-size: 2\n")
    with pytest.raises(
        ValueError, match="dp_size: not accepted: a server is one replica; start several behind a proxy"
    ):
        load(f"--config {file}")


def test_other_names_of_values() -> None:
    assert load("--dtype BF16 --kv-cache-dtype fp8").kv_cache_dtype == "fp8_e4m3"
    assert make_settings(dtype="half").dtype == "float16"
    found, notes = resolve(Settings(attention_backend="fa3", device="cpu"), LLAMA)
    assert found.attention_backend == "torch"
    assert "--attention-backend has no effect: this server has no such backend" in notes


def test_what_is_always_refused_is_not_listed() -> None:
    for declared in SETTINGS.values():
        taken = {choice.lower() for choice in declared.choices}
        assert not {*declared.refused, *declared.synonyms, *declared.foreign} & taken
        assert {*declared.synonyms.values()} <= {*declared.choices}
    assert "fp8_e5m2" not in settings_reference()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page_sise: 1", "page_sise: unknown setting; the nearest known one is page_size"),
        ("page_size: '16x'", "page_size: must be an integer"),
        ("page_size: true", "page_size: must be an integer, found True"),
        ("host: 5", "host: must be text, found 5"),
        ("served_model_name: [1]", "served_model_name: must be texts"),
        ("- a", "must contain lines of `name: value`"),
        ("a: [", "can't be read"),
        ("page-size: 16\npage_size: 32", "page_size: given twice"),
        ("port: 1\nhost: a\nport: 2", "port: given twice"),
        ("api_key: ''", "api_key: must be texts, none empty"),
    ],
)
def test_yaml_errors(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"conf\.yaml") as error:
        load(f"--config {file}")
    assert words in str(error.value)


def test_settings_are_checked_however_they_are_made() -> None:
    with pytest.raises(ValueError, match="--port: must be an integer, found 'x'"):
        Settings(port="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--device: needs a value"):
        Settings(device=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="modle_path: unknown setting; the nearest known one is model_path"):
        make_settings(modle_path="x")


def test_origins_as_browsers_write_them() -> None:
    given = ("*", "null", "http://a.com", "https://b.com:8443", "http://[::1]:3000", "chrome-extension://abc")
    assert Settings(cors_origin=given).cors_origin == given


def test_secrets_are_not_shown() -> None:
    assert Settings(api_key=("k3y", "b=k4y")).public()["api_key"] == "(set)"
    assert Settings().public()["api_key"] is None


@pytest.mark.parametrize(
    "line", ["api_key: 271828", "api_key: [271828]", "api_key: '271828", "api_key: 271828: x"]
)
def test_secrets_are_not_in_errors(tmp_path: Path, line: str) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text(line)
    with pytest.raises(ValueError, match=r"conf\.yaml") as error:
        load(f"--config {file}")
    assert "271828" not in str(error.value)


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        load_settings(["--help"], {})
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert all(declared.flag in printed for declared in SETTINGS.values())


def test_automatic_choices_on_a_cpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, notes = resolve(resolve_paths(Settings(model_path=model))[0], LLAMA)
    expected = {
        "device": "cpu", "dtype": "float32", "attention_backend": "torch", "context_length": 2048,
        "watchdog_timeout": 3000, "max_running_requests": 16, "chunked_prefill_size": 512, "max_total_tokens": None,
        "page_size": 16,
        "overlap_schedule": "off", "served_model_name": ("m",), "tokenizer_path": model,
        "speculative_num_steps": None,
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.random_seed is not None
    for name in ("device", "dtype", "context_length", "random_seed"):
        assert any(note.startswith(f"{name} = {getattr(found, name)}: ") for note in notes), name
    assert resolve(found, LLAMA) == (found, {}), "resolving twice changes nothing"


def test_automatic_choices_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found, _ = resolve(Settings(model_path=model, chunked_prefill_size=-1), LLAMA)
    assert (found.device, found.dtype, found.max_running_requests) == ("cuda", "bfloat16", 256)
    assert found.watchdog_timeout == 300
    assert (found.max_total_tokens, found.overlap_schedule, found.chunked_prefill_size) == (None, "on", 2048)
    assert (found.attention_backend, found.disable_cuda_graph, found.cuda_graph_max_bs) == (
        "triton",
        False,
        256,
    )
    few = resolve(Settings(model_path=model, max_running_requests=8, cuda_graph_max_bs=64), LLAMA)[0]
    assert few.cuda_graph_max_bs == 8
    exact = resolve(Settings(model_path=model, dtype="float64", cuda_graph_max_bs=4), LLAMA)[0]
    assert (exact.attention_backend, exact.disable_cuda_graph, exact.cuda_graph_max_bs) == (
        "torch",
        True,
        None,
    )
    half = SimpleNamespace(**{**vars(LLAMA), "dtype": "float16"})
    assert resolve(Settings(model_path=model), half)[0].dtype == "float16"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "window", "why"),
    [
        (80, None, "triton supports head sizes (32, 64, 128, 256, 512), the model's is 80"),
        (64, 79, "triton supports windows of at least 80 tokens, the model's is 79"),
    ],
)
def test_layers_that_the_kernels_do_not_have(
    head_dim: int, window: int | None, why: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    layer = SimpleNamespace(head_dim=head_dim, softmax=Softmax(window=window), latent=None)
    odd = SimpleNamespace(**{**vars(LLAMA), "layers": (*LLAMA.layers, layer)})
    found, notes = resolve(Settings(model_path=model), odd)  # type: ignore[arg-type]
    assert (found.attention_backend, found.disable_cuda_graph) == ("torch", True)
    assert f"attention_backend = torch: {why}" in notes
    assert "disable_cuda_graph = True: the torch attention backend reads lengths on the host" in notes
    with pytest.raises(ValueError, match=re.escape(f"--attention-backend triton: {why}; use torch")):
        resolve(Settings(model_path=model, attention_backend="triton"), odd)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"context_length": 4096},
            "--context-length: the model's max_position_embeddings is 2048, found 4096",
        ),
        ({"device": "cuda"}, "--device cuda"),
        ({"attention_backend": "triton"}, "--attention-backend triton needs a GPU"),
        (
            {"enable_deterministic_inference": True},
            "--enable-deterministic-inference needs --dtype bfloat16",
        ),
        ({"max_total_tokens": 8}, "--max-total-tokens: must be at least a page of 16"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    model: str, values: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        resolve(Settings(model_path=model, **values), LLAMA)


def test_the_same_bits_are_told(model: str) -> None:
    """SGLang's flag: always on where it holds, refused elsewhere."""
    name, given = "enable_deterministic_inference", Settings(model_path=model, dtype="bfloat16")
    found, notes = resolve(given, LLAMA, has_gpu=True)
    assert getattr(found, name)
    assert any(note.startswith(f"{name} = True: ") for note in notes)
    assert getattr(resolve(replace(given, **{name: True}), LLAMA, has_gpu=True)[0], name)
    for changed in ({"dtype": "float16"}, {"attention_backend": "torch"}):
        assert not getattr(resolve(replace(given, **changed), LLAMA, has_gpu=True)[0], name)
        with pytest.raises(ValueError, match="--enable-deterministic-inference needs"):
            resolve(replace(given, **changed, **{name: True}), LLAMA, has_gpu=True)


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (
            "--speculative-draft-model-path {0} --speculative-num-steps 3",
            "--speculative-draft-model-path, --speculative-num-steps",
        ),
        ("--speculative-token-map dynamic", "--speculative-token-map"),
        ("--speculative-datastore file", "--speculative-datastore"),
        ("--speculative-lookahead-window 7", "--speculative-lookahead-window"),
        ("--speculative-adaptive", "--speculative-adaptive"),
        ("--speculative-draft-model-revision main", "--speculative-draft-model-revision"),
        (
            "--speculative-algorithm NGRAM --speculative-draft-model-path {0}",
            "--speculative-draft-model-path",
        ),
        (
            "--enable-torch-compile --torch-compile-max-bs 2",
            "--enable-torch-compile, --torch-compile-max-bs",
        ),
        ("--revision main", "--revision"),
        ("--speculative-max-slowdown none", "--speculative-max-slowdown"),
        (
            "--speculative-algorithm NGRAM --speculative-adaptive false --speculative-max-slowdown 1.2",
            "--speculative-max-slowdown",
        ),
    ],
)
def test_what_has_no_effect_is_a_warning(
    model: str, line: str, flags: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = load(f"--model {model} {line.format(model)}")
    local, notes = resolve_paths(found)
    _, more = resolve(local, LLAMA, has_gpu=False)
    with caplog.at_level(logging.INFO, "specserve"):
        log_notes(logging.getLogger("specserve"), notes | more)
    (warning,) = [record for record in caplog.records if record.levelno > logging.INFO]
    assert warning.levelno == logging.WARNING
    assert warning.getMessage().startswith(f"{flags} has no effect: ")
    assert any(record.getMessage().startswith("dtype = float32: ") for record in caplog.records)


def test_a_number_that_is_replaced_is_a_warning(model: str, caplog: pytest.LogCaptureFixture) -> None:
    shape = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 9}
    _, notes = resolve(speculative(model, **shape), LLAMA, has_gpu=False)
    log_notes(logging.getLogger("specserve"), notes)
    (warning,) = caplog.messages
    assert warning.startswith("speculative_num_draft_tokens = 4: ")
    assert warning.endswith("9 was given")


SAMPLED: list[tuple[dict[str, Any], dict[str, Any], dict[str, float], str]] = [
    (
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05},
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05},
        "get temperature 0.6, top_k 20, top_p 0.95, min_p 0.05, repetition_penalty 1.05 (generation_config.json); --s",
    ),
    ({"max_new_tokens": 2048}, {}, {"max_tokens": 2048}, "get max_tokens 2048 (generation_config.json)"),
    ({"do_sample": False, "temperature": 0.6, "top_k": None}, {}, {"temperature": 0}, "get temperature 0 ("),
    (
        {"do_sample": True, "eos_token_id": [1], "transformers_version": "5", "_from_model_config": True},
        {},
        {},
        "",
    ),
    ({"num_beams": 4, "max_length": 99}, {}, {}, "generation_config.json: num_beams, max_length not read"),
    ({"temperature": 200, "top_k": "x"}, {"sampling_defaults": "openai"}, {}, ""),
    (
        {"temperature": 0.6, "top_p": 0.9},
        {"requests_all_greedy": True},
        {"temperature": 0, "top_p": 0.9},
        "temperature 0.6 of generation_config.json has no effect: --requests-all-greedy",
    ),
    ({}, {"requests_all_greedy": True, "sampling_defaults": "openai"}, {"temperature": 0}, ""),
]


@pytest.mark.parametrize(("fields", "settings", "expected", "words"), SAMPLED)
def test_sampling_values_of_a_checkpoint(
    fields: dict[str, Any], settings: dict[str, Any], expected: dict[str, float], words: str, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    notes: Notes = {}
    assert resolve_sampling(make_settings(model_path=str(tmp_path), **settings), notes) == expected
    said = "\n".join(notes)
    assert words in said
    assert bool(words) == bool(notes)
    assert ("get temperature 0.6" in said) == (expected.get("temperature") == 0.6)


def test_a_checkpoint_without_sampling_values(tmp_path: Path) -> None:
    notes: Notes = {}
    assert resolve_sampling(make_settings(model_path=str(tmp_path)), notes) == {}
    assert notes == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature must be in [0, 100], found -1.*--sampling-defaults openai"),
        ({"temperature": "0.6"}, "temperature: expected `float`, got `str`"),
        ({"top_k": 20.5}, "top_k: expected `int`, got `float`"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], found 1.5"),
        ({"repetition_penalty": True}, "repetition_penalty: expected `float`, got `bool`"),
        (
            {"max_new_tokens": 2**63},
            "max_new_tokens must be in [0, 4611686018427387904], found 9223372036854775808",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, found 0"),
        ({"do_sample": "no"}, "do_sample must be true or false, found 'no'"),
    ],
)
def test_sampling_values_that_no_request_may_have(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    pattern = r"/generation_config\.json: " + re.escape(words).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern):
        resolve_sampling(make_settings(model_path=str(tmp_path)), [])


def test_flags_without_effect_are_noted(model: str) -> None:
    given = load(
        f"--model {model} --cuda-graph-max-bs 4 --speculative-num-steps 3 --device cpu --mem-fraction 0.6 "
        "--enable-torch-compile --torch-compile-max-bs 2 --tp 1 --speculative-accept-threshold-acc 1 "
        "--max-total-tokens 4096"
    )
    found, notes = resolve(given, LLAMA)
    for flag in (
        "--cuda-graph-max-bs", "--speculative-num-steps", "--enable-torch-compile", "--torch-compile-max-bs",
        "--mem-fraction-static",
    ):  # fmt: skip
        assert any(flag in note and "has no effect" in note for note in notes), flag
    assert found.speculative_num_steps is None
    assert resolve(found, LLAMA) == (found, {})


@pytest.mark.parametrize(
    ("given", "architecture", "expected"),
    [
        ((5, 8, 64), LLAMA, (5, 8, 64)),
        ((3, 1, 9), LLAMA, (3, 1, 4)),
        ((2, 2, 7), LLAMA, (2, 2, 7)),
        ((63, 1, 2), LLAMA, (63, 1, 64)),
        ((8, 64, 64), LLAMA, (8, 64, 64)),
    ],
)
def test_speculation_shapes(model: str, given: Any, architecture: Any, expected: Any) -> None:
    found, notes = resolve(speculative(model, **shaped(*given)), architecture)
    shape = (found.speculative_num_steps, found.speculative_eagle_topk, found.speculative_num_draft_tokens)
    assert shape == expected
    assert any("speculati" in note for note in notes) == (given != expected)


def test_without_a_shape_the_controller_chooses(model: str) -> None:
    found, notes = resolve(speculative(model), LLAMA)
    assert found.speculative_adaptive
    assert found.speculative_num_steps is None
    assert any("speculative_adaptive = true: none of --speculative-num-steps," in note for note in notes)
    assert resolve(found, LLAMA)[0] == found
    assert not resolve(Settings(model_path=model), LLAMA)[0].speculative_adaptive


@pytest.mark.parametrize(
    ("device", "dtype", "given", "expected"),
    [
        ("cuda", "bfloat16", "auto", "int8"),
        ("cuda", "float16", "auto", "int8"),
        ("cuda", "float32", "auto", "none"),
        ("cpu", "float32", "auto", "none"),
        ("cuda", "bfloat16", "none", "none"),
        ("cuda", "bfloat16", "fp8", "fp8"),
    ],
)
def test_drafts_are_read_in_8_bits_where_that_saves_bytes(
    model: str, device: str, dtype: str, given: str, expected: str
) -> None:
    settings = speculative(model, device=device, dtype=dtype, speculative_draft_quantization=given)
    notes: Notes = {}
    assert resolve_speculation(settings, LLAMA, notes).speculative_draft_quantization == expected
    assert any("speculative_draft_quantization = int8" in note for note in notes) == (expected == "int8")
    plain = Settings(model_path=model, device=device, dtype=dtype)
    assert resolve_speculation(plain, LLAMA, []).speculative_draft_quantization == "none"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, None, None), "--speculative-num-steps is given without --speculative-eagle-topk and"),
        ((3, 2, None), "without --speculative-num-draft-tokens"),
        ((2, 2, 8), "2 steps of topk 2 draft 6 candidates, so at most 7 tokens"),
        (
            (9, 64, 64),
            "9 steps of topk 64 draft 32832 candidates, at most 32768 .* this topk at most 8 steps",
        ),
        ((63, 24, 64), "with this topk at most 57 steps"),
    ],
)
def test_speculation_shapes_that_fit_nothing(model: str, shape: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(speculative(model, **shaped(*shape)), LLAMA)


@pytest.mark.parametrize(("name", "value"), [
    ("speculative_num_steps", 0), ("speculative_eagle_topk", 0), ("speculative_num_draft_tokens", 1),
    ("speculative_num_draft_tokens", 65), ("speculative_num_steps", 64), ("speculative_eagle_topk", 65),
])  # fmt: skip
def test_speculation_bounds(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
        Settings(**{name: value})  # type: ignore[arg-type]


def test_pool_size_counts_candidates() -> None:
    for steps, topk in ((1, 1), (1, 5), (4, 1), (3, 4)):
        frontier, pool = 1, 0
        for _ in range(steps):
            pool += frontier * topk
            frontier = topk
        assert tree_pool_size(steps, topk) == pool


def test_paths(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--model-path: /no/where does not exist"):
        resolve_paths(Settings(model_path="/no/where"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a directory"):
        resolve_paths(Settings(model_path=str(tmp_path / "file")))
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ValueError, match="GGUF files are not read; convert one with"):
        resolve_paths(Settings(model_path=str(tmp_path)))
    with pytest.raises(ValueError, match="GGUF files are not read"):
        resolve_paths(Settings(model_path=str(tmp_path / "x.gguf")))
    for file, words in (("adapter_config.json", "merge_and_unload"), ("params.json", "Mistral's own files")):
        (tmp_path / file).mkdir()
        (tmp_path / file / file).touch()
        with pytest.raises(ValueError, match=words):
            resolve_paths(Settings(model_path=str(tmp_path / file)))
    with pytest.raises(
        ValueError, match="--speculative-draft-model-path: needed for --speculative-algorithm EAGLE"
    ):
        resolve_paths(Settings(model_path=model, speculative_algorithm="EAGLE"))
    with pytest.raises(ValueError, match="--tokenizer-path: /no/where"):
        resolve_paths(Settings(model_path=model, tokenizer_path="/no/where"))


def test_bundled_model_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, draft = tmp_path / "chat", tmp_path / "eagle3"
    chat.mkdir()
    draft.mkdir()
    monkeypatch.setattr(config_paths, "BUNDLED_MODEL", chat)
    monkeypatch.setattr(config_paths, "BUNDLED_DRAFTS", {"EAGLE3": draft})
    found, notes = resolve_paths(Settings(speculative_algorithm="EAGLE3"))
    assert (found.model_path, found.speculative_draft_model_path) == (str(chat), str(draft))
    assert found.served_model_name == ("specserve-chat",)
    assert len(notes) == 2
    assert resolve_paths(found) == (found, {})
    named, _ = resolve_paths(Settings(model_path=str(chat), served_model_name=("x",)))
    assert named.served_model_name == ("x",)


def test_heads_that_are_bundled() -> None:
    """Each alone, and with every lookup."""
    alone = {name for name in config_paths.BUNDLED_DRAFTS if JOIN not in name}
    assert alone == {"EAGLE", "EAGLE3", "DSPARK", "MEDUSA", "MLP_SPECULATOR", "NAIVE_EAGLE"}
    merged = {
        f"{name}{JOIN}{lookup}" for name in alone - {"NAIVE_EAGLE"} for lookup in ("NGRAM", "SUFFIX", "REST")
    }
    assert set(config_paths.BUNDLED_DRAFTS) == alone | merged


@pytest.mark.parametrize("algorithm", config_paths.BUNDLED_DRAFTS)
def test_bundled_drafts_need_no_path(algorithm: str) -> None:
    found, notes = resolve_paths(Settings(speculative_algorithm=algorithm))
    draft = Path(found.speculative_draft_model_path or "")
    assert draft == config_paths.BUNDLED_DRAFTS[algorithm]
    assert {file.suffix for file in draft.iterdir()} == {".json", ".safetensors"}
    assert any("using the bundled draft" in note for note in notes)


def test_none_is_no_bound(model: str, tmp_path: Path) -> None:
    assert load("").speculative_max_slowdown == 1.1
    assert load("--speculative-max-slowdown none").speculative_max_slowdown is None
    (tmp_path / "conf.yaml").write_text("speculative_max_slowdown: none\n")
    assert load(f"--config {tmp_path / 'conf.yaml'}").speculative_max_slowdown is None
    given = speculative(model, speculative_max_slowdown=None)
    assert resolve(given, LLAMA)[0].speculative_max_slowdown is None


def test_without_a_shape_and_not_adaptive(model: str) -> None:
    found, notes = resolve(speculative(model, speculative_adaptive=False), LLAMA)
    assert not found.speculative_adaptive
    assert (found.speculative_num_steps, found.speculative_eagle_topk) == (3, 1)
    assert found.speculative_num_draft_tokens == 4
    assert any("--speculative-adaptive is false" in note for note in notes)
    assert resolve(found, LLAMA)[0] == found


def test_commands_run_in_threads() -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(exit_code, lambda: 3).result() == 3
