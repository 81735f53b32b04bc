"""Find mismatches between the files of model, draft and tokenizer, and describe their consequences."""

from __future__ import annotations

from specserve.config.engine import EngineConfig
from specserve.engine.memory import DeviceMemory, device_memory
from specserve.frontend.tokenizer import Tokenizer
from specserve.methods import DraftSettings
from specserve.models.config import ModelConfig
from specserve.models.draft.eagle_family import open_draft
from specserve.models.draft.fields import FLAG, KINDS
from specserve.models.read_config import end_tokens
from specserve.process.assemble import what_states_take
from specserve.tools.check.memory import expected_memory, shares
from specserve.tools.check.report import CheckReport

_NARROWER = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 2}


def find_mismatches(
    config: EngineConfig, tokenizer: Tokenizer | None, report: CheckReport, there: DeviceMemory | None
) -> None:
    """Add them to the report, with the memory expected. ``there``: that of a device, None: of this machine's. Raises
    ValueError for what can't be loaded if nothing is going to be, that is, with ``there``, and for what is larger than
    a CPU's memory, where loading would end the process."""
    _dtype(config, report)
    _ends(config, report)
    if config.tensor_parallel_size > 1:
        report.ranks += shares(config)
    if tokenizer is not None:
        _tokenizer(tokenizer, config.model, report)
    if config.draft is not None and set(KINDS).intersection(config.draft.method.heads):
        _draft(config.draft, config, report)
    _memory(config, report, there)


def _dtype(config: EngineConfig, report: CheckReport) -> None:
    stored, served = config.model.dtype or "", config.dtype
    if served != stored and _NARROWER[served] >= _NARROWER.get(stored, 9):
        why = ": values over 65504 overflow" if served == "float16" else ""
        report.remarks.append(f"dtype: the checkpoint is {stored}, served as {served}{why}; texts may differ")


def _ends(config: EngineConfig, report: CheckReport) -> None:
    found, model = end_tokens(config.model_path, config.tokenizer_path), config.model
    if bad := [token for token in found if token not in model.eos_token_ids]:
        report.problems.append(f"end tokens {bad} are not among the model's {model.vocab_size} tokens")
    if not model.eos_token_ids:
        report.problems.append(
            "neither the model nor its tokenizer has an end token: answers end only at their length limit"
        )


def _memory(config: EngineConfig, report: CheckReport, there: DeviceMemory | None) -> None:
    try:
        report.memory = found = expected_memory(config, there)
    except ValueError:
        if there is not None:
            raise
        return  # loading reports the error
    has, tokens = (there or device_memory(config.device)).total, found.longest_request
    pool = 0 if config.max_total_tokens is None else found.pool
    wanted = max(found.weights + found.draft + found.states + pool, found.loading)
    more = what_states_take(found.states)
    if tokens == 0 and config.device != "cpu":
        wanted = max(wanted, int((found.weights + found.draft) / config.mem_fraction_static))
    if wanted > has or tokens == 0:
        words = (
            f"{config.device} has {has / 2**30:.1f} GiB, over {wanted / 2**30:.1f} GiB are needed: use a smaller "
            f"--dtype, model or --max-total-tokens, or a larger --mem-fraction-static or --tensor-parallel-size{more}"
        )
        if wanted > has and config.device == "cpu":
            raise ValueError(words)
        report.problems.append(words)
    elif tokens < config.context_length:
        report.problems.append(
            f"the KV pool holds {tokens} tokens, a context {config.context_length}: longer requests are "
            f"refused{more}"
        )


def _tokenizer(tokenizer: Tokenizer, model: ModelConfig, report: CheckReport) -> None:
    if tokenizer.token_bytes(model.vocab_size):
        report.problems.append(
            f"the tokenizer has more tokens than the model's {model.vocab_size}: prompts with them are refused"
        )
    for token in model.eos_token_ids:
        if text := tokenizer.decode([token]):
            report.remarks.append(
                f"end token {token} is not a special token: answers would end with {text!r}"
            )
    try:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except ValueError as error:
        report.remarks.append(f"chat is refused: {error}")


def _draft(draft: DraftSettings, config: EngineConfig, report: CheckReport) -> None:
    """Check the draft. Anything that loading would refuse is a problem."""
    model, context = config.model, config.context_length
    try:
        reading = open_draft(draft, model)
    except ValueError as error:
        report.problems.append(f"draft: {error}")
        return
    source, (found, problems) = reading.source, reading.read()
    report.problems += [f"draft: {problem}" for problem in problems]
    if (few := found.get("draft_vocab_size", model.vocab_size)) < model.vocab_size:
        report.remarks.append(
            f"draft: it knows {few} of {model.vocab_size} tokens and never guesses the others"
        )
    rope, base = found.get("rope", model.rope), model.rope.theta
    if rope.theta != base and "rope_theta" not in source.overrides:
        report.remarks.append(
            f"draft {reading.rope_words(rope)}; the target's base is {base:g}. Right for the published EAGLE heads, "
            "which were trained with 10000; a head trained with the target's base accepts less the longer the text, "
            f"and needs {FLAG} '{{\"rope_theta\": {base:g}}}'"
        )
    longest = source.config.get("max_position_embeddings")
    if isinstance(longest, int) and longest < context:
        report.remarks.append(
            f"draft: max_position_embeddings {longest}, the context is {context}: the draft was probably not "
            "trained beyond that, and fewer of its guesses are accepted there; texts don't change"
        )
