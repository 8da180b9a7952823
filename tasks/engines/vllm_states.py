"""Answers and hidden states of a target from a running vLLM server, one sample per prompt.

`python -m tasks.engines.vllm_states JOB RESULT`, with the server's key in PILOTAGE_STATES_KEY.

Job:    {"target", "prompts_file", "samples_dir", "layer_ids", "url", "served_name", "max_length",
         "response_tokens", "response_temperature", "held_out_share", "seed", "threads"}
Result: {"samples", "state_errors": see `check_states`}

The server runs with what `server_arguments` says: vLLM 0.32's speculative method
`extract_hidden_states`, which collects the outputs of the layers it is told and keeps them in
blocks of the KV cache, and a KV connector that writes a request's states to a file when it ends.
vLLM's layer id i is the output after i layers, and the id of the last layer is what comes before
the final norm, as in `draft_states`. That this is so is not believed: one sample is computed by
transformers too, and the stage fails with the numbers where the two are not the same states.

Each prompt is asked twice: for the answer, and then with prompt and answer as one prompt, whose
states are kept. Samples lie on the disk, four hidden states per token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from registry.errors import InfrastructureError, StageFailed
from tasks.engines.draft_states import (
    Prompt,
    Sample,
    fitting,
    load_target,
    record_states,
    render_prompts,
    sample_of,
    split,
)
from tasks.engines.sample_files import write_index
from tasks.engines.subprocesses import job_main

AT_ONCE = 32
TRIES = 3
IN_SERVER = Path(__file__).parent / "in_server"

MAX_STATE_ERROR = 0.1
"""Median over tokens of |vLLM - transformers| / |transformers|. Measured on the demo's bfloat16
student: 0.004 to 0.008 for the same layer (0.019 to 0.023 in W8A8, whose activations both engines
quantize), 0.5 and more for its neighbour, 1.5 for the last states behind the final norm. Neighbours
are closer in deep models (0.20 to 0.57 in SmolLM2-135M), so the nearest layer is asked for too."""

WRONG_TOKEN, MAX_WRONG_TOKENS = 0.5, 0.05
"""A token's states that are this far off are another token's, or none. A median sees only half of
them."""


# -- the server ------------------------------------------------------------------------------


def server_arguments(
    engine_args: Mapping[str, Any], layer_ids: Sequence[int], folder: Path, *, cuda: bool
) -> dict[str, Any]:
    """Production's arguments, with those added by which vLLM gives its hidden states.

    Prefix caching is off, so that every state is computed where it is asked for; the blocks
    that hold states cannot be quantized.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    connector: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    if not cuda:
        connector |= {
            "kv_connector": "CpuStatesConnector",
            "kv_connector_module_path": "cpu_states_connector",
        }
    return {
        **engine_args,
        "kv-cache-dtype": None,
        "enable-prefix-caching": False,
        "speculative-config": speculative,
        "kv-transfer-config": connector,
    }


def server_environment(env: Mapping[str, str], *, cuda: bool) -> dict[str, str]:
    return dict(env) if cuda else {**env, "PYTHONPATH": str(IN_SERVER)}


def asked_layers(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """Layer ids that the server is asked for: the draft's and the last, ascending, each once."""
    return sorted({*layer_ids, num_layers})


# -- asking ----------------------------------------------------------------------------------


def gather(job: dict[str, Any]) -> dict[str, Any]:
    """Leave `samples_dir` for `sample_files.read_samples`.

    Raises `StageFailed` where the server renders a prompt otherwise than transformers, or where
    its states are not transformers'; `InfrastructureError` where it does not answer.
    """
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(int(job["threads"]))
    tokenizer = AutoTokenizer.from_pretrained(job["target"], trust_remote_code=False)
    prompts = render_prompts(Path(job["prompts_file"]), tokenizer)
    train, held_out = split(prompts, float(job["held_out_share"]), int(job["seed"]))
    warm = float(job["response_temperature"])
    folder = Path(job["samples_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    layer_ids = [int(layer) for layer in job["layer_ids"]]
    with _client(job) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [(prompt, warm) for prompt in train] + [(prompt, 0.0) for prompt in held_out]
        room = {prompt.id for prompt in fitting(prompts, int(job["max_length"]))}
        wanted = [one for one in asked if one[0].id in room]
        answers = pool.map(lambda one: _answer(client, job, *one), wanted)
        samples = [sample for sample in answers if sample is not None]
        print(f"answers: {len(samples)} of {len(asked)} prompts", flush=True)
        if samples:
            tokens = sum(
                pool.map(
                    lambda place: _states(
                        client, job, samples[place], layer_ids, folder / f"{place}.safetensors"
                    ),
                    range(len(samples)),
                )
            )
            print(f"states: {tokens} tokens", flush=True)
    if not samples:
        raise StageFailed.at(
            job["prompts_file"],
            f"none of {len(prompts)} prompts gave an answer of two tokens or more",
            "give more draft prompts, or a larger `max_length`",
        )
    target = load_target(job["target"])
    longest = max(samples, key=lambda sample: len(sample.tokens))
    errors = check_states(target, longest, layer_ids)
    write_index(folder, samples)
    return {"samples": len(samples), "state_errors": errors}


def _client(job: Mapping[str, Any]) -> httpx.Client:
    key = os.environ.get("PILOTAGE_STATES_KEY", "")
    return httpx.Client(
        trust_env=False,
        timeout=600.0,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        base_url=str(job["url"]).rstrip("/") + "/",
    )


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    said = ""
    for _ in range(TRIES):
        try:
            reply = client.post(path, json=body)
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}"
            continue
        if reply.status_code == 200:
            answer: dict[str, Any] = reply.json()
            return answer
        said = f"HTTP {reply.status_code}: {reply.text[:300]}"
        if reply.status_code < 500:
            raise StageFailed.at(
                f"{path} of the server of hidden states",
                said,
                "`max_length` of the draft recipe must fit into the serve recipe's max-model-len",
            )
    raise InfrastructureError(f"the server of hidden states gives no answer: {said}")


def _answer(
    client: httpx.Client, job: Mapping[str, Any], prompt: Prompt, temperature: float
) -> Sample | None:
    room = int(job["max_length"]) - len(prompt.tokens)
    body = {
        "model": job["served_name"],
        **prompt.row,
        "max_tokens": min(int(job["response_tokens"]), room),
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "seed": int(job["seed"]),
        "return_token_ids": True,
    }
    reply = _post(client, "chat/completions", body)
    rendered = list(reply["prompt_token_ids"])
    if rendered != list(prompt.tokens):
        raise StageFailed.at(
            f"prompt {prompt.id}",
            f"the server renders it as {len(rendered)} tokens {rendered[:8]}..., "
            f"transformers as {len(prompt.tokens)} tokens {list(prompt.tokens[:8])}...",
            "the target's chat template or tokenizer means two things; repair its files",
        )
    # The states of the prompt alone, which nobody reads.
    _drop(reply)
    choice = reply["choices"][0]
    # A call of a tool ends an answer too, where the serve recipe parses them.
    finished = choice["finish_reason"] in ("stop", "tool_calls")
    return sample_of(prompt, choice["token_ids"], finished, int(job["max_length"]))


def _states(
    client: httpx.Client,
    job: Mapping[str, Any],
    sample: Sample,
    layer_ids: Sequence[int],
    file: Path,
) -> int:
    """Ask for the sample's states and keep them in `file`; the number of its tokens."""
    import torch
    from hs_connectors.transfer import FileTransfer
    from safetensors.torch import save_file
    from speculators.data_generation.offline import check_hidden_states

    body = {
        "model": job["served_name"],
        "prompt": sample.tokens,
        "max_tokens": 1,
        "temperature": 0.0,
    }
    reply = _post(client, "completions", body)
    given = reply.get("kv_transfer_params") or {}
    found = FileTransfer(file.parent).get_generated(given) if given else None
    if found is None:
        raise InfrastructureError(f"the server wrote no states for {sample.id}: {given}")
    try:
        check_hidden_states(found, sample.tokens)
    except ValueError as error:
        raise StageFailed.at(f"states of {sample.id}", str(error), "see the server's log") from None
    _drop(reply)
    states = found["hidden_states"]
    # As `asked_layers` has them; the last layer is the highest.
    places = {layer: place for place, layer in enumerate(sorted({*layer_ids}))}
    chosen = torch.cat([states[:, places[layer]] for layer in layer_ids], dim=-1)
    save_file({"states": chosen.contiguous(), "last_states": states[:, -1].contiguous()}, file)
    sample.states_file = file
    return len(sample.tokens)


def _drop(reply: Mapping[str, Any]) -> None:
    """Remove what the server wrote for a request, once it has."""
    from hs_connectors.transfer import wait_for_lock

    path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
    if path is None:
        return
    # Gone after the states were read: the reader takes it away.
    if Path(f"{path}.lock").exists():
        wait_for_lock(f"{path}.lock")
    Path(path).unlink(missing_ok=True)


# -- the same states -------------------------------------------------------------------------


def check_states(target: Any, sample: Sample, layer_ids: Sequence[int]) -> dict[str, float]:
    """By layer id, and `final` for the last before the norm: the relative error, median token.

    Raises `StageFailed` where one is above `MAX_STATE_ERROR`, where another layer of the target is
    nearer, and where more than `MAX_WRONG_TOKENS` of the tokens are `WRONG_TOKEN` off.
    """
    layers = range(target.config.get_text_config().num_hidden_layers + 1)
    own = replace(sample, states=None, last_states=None, states_file=None)
    record_states(target, [own], list(layers))
    every, own_last = own.recorded()
    width = own_last.shape[-1]
    by_layer = [part.float() for part in every.split(width, dim=-1)]
    states, last = sample.recorded()
    given = {
        f"layer {layer}": (layer, part)
        for layer, part in zip(layer_ids, states.split(width, dim=-1), strict=True)
    }
    given["final"] = (layers[-1], last)

    errors: dict[str, float] = {}
    told = []
    for name, (layer, part) in given.items():
        off = [_off(part.float(), one) for one in by_layer]
        medians = [float(one.median()) for one in off]
        errors[name] = round(medians[layer], 6)
        nearest = min(layers, key=lambda one: medians[one])
        if medians[nearest] < medians[layer]:
            told.append(f"{name} is nearest to layer {nearest} ({medians[nearest]:.3f})")
        wrong = float((off[layer] > WRONG_TOKEN).float().mean())
        if wrong > MAX_WRONG_TOKENS:
            told.append(f"{wrong:.0%} of the tokens of {name} are not its states")
    if told or not all(error <= MAX_STATE_ERROR for error in errors.values()):
        numbers = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
        raise StageFailed.at(
            f"states of {sample.id}",
            f"vLLM's differ from transformers': {numbers} (at most {MAX_STATE_ERROR})"
            + "".join(f"; {one}" for one in told),
            "set `states: transformers` in the draft recipe, and report the model's architecture",
        )
    return errors


def _off(given: Any, own: Any) -> Any:
    """|given - own| / |own| of every token."""
    return (given - own).norm(dim=-1) / own.norm(dim=-1)


if __name__ == "__main__":
    job_main(gather)
