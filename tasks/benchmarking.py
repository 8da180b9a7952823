"""`pilotage bench`: the largest request rate at which an endpoint keeps its SLA."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from eval_suites.load import LoadProfile
from eval_suites.loader import load_profile
from recipes.loader import short_name
from registry.digests import digest_of
from registry.errors import InfrastructureError, UserError
from registry.evidence import SUMMARY
from registry.settings import settings
from tasks.engines import load_prompts
from tasks.engines.kept_rate import Endpoint, Found, KeptRateSearch, Step
from tasks.engines.load_prompts import Prompts
from tasks.engines.vllm_bench import VllmBench
from tasks.progress import LOG

FIRST_PROMPT = "first_prompt"

PROBES = 5
"""Tries of the first question: an endpoint that refuses some requests is to be measured too."""


@dataclass(frozen=True)
class Benchmark:
    """A finished search and where its evidence lies."""

    found: Found
    profile: LoadProfile
    folder: Path


def bench_url(
    url: str,
    model: str,
    load: str,
    *,
    api_key: str = "",
    prompts: Path | None = None,
    tokenizer: Path | None = None,
    out: Path | None = None,
) -> Benchmark:
    """Search the kept rate of an endpoint. A search that was stopped in `out` goes on.

    Raises `UserError` for a wrong profile, URL, prompt file or folder, `InfrastructureError` when
    the endpoint does not answer or the generator fails.
    """
    profile = load_profile(load)
    if profile.search is None:
        raise UserError.at(
            f"load profile {load}", "has fixed rates and no search", "name one with `search`"
        )
    base = endpoint_base(url)
    reports_usage = probe(base, model, api_key)
    folder = out or _default_folder(profile, load, base, model)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / SUMMARY).exists():
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        finished = folder.with_name(f"{folder.name}-until-{stamp}")
        folder.rename(finished)
        LOG.info("the finished search is now %s", finished)
        folder.mkdir()
    endpoint = Endpoint(
        url=base,
        model=model,
        tokenizer=tokenizer or word_tokenizer(folder / "tokenizer"),
        count_words=not reports_usage,
        engine=f"openai {model}",
        hardware="whatever serves the URL",
    )
    with VllmBench(api_key or "none", log=folder / "generator.log") as generator:
        search = KeptRateSearch(
            profile,
            short_name(load),
            endpoint,
            generator,
            supply(profile, prompts, first_prompt(folder)),
            folder,
            say=LOG.info,
        )
        return Benchmark(search.run(), profile, folder)


def first_prompt(folder: Path) -> int:
    """Where this search's synthetic prompts begin.

    Drawn at random once for each folder: the endpoint may still have cached those of a search
    before, with the same profile.
    """
    file = folder / FIRST_PROMPT
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(str(secrets.randbits(32) << 24), encoding="utf-8")
        partial.replace(file)
    return int(file.read_text(encoding="utf-8"))


def supply(profile: LoadProfile, prompts: Path | None, first: int = 0) -> Prompts:
    """The prompts to send: a file's, or the profile's synthetic ones."""
    if prompts is not None:
        return load_prompts.from_file(prompts)
    if profile.synthetic is None:
        raise UserError.at(
            "--prompts", "none are named, and the profile has no `synthetic` ones",
            "name a JSONL file with `id` and `prompt` or `messages`",
        )  # fmt: skip
    return load_prompts.synthetic(profile.synthetic, profile.seed, first)


def endpoint_base(url: str) -> str:
    """The URL without `/v1`. Raises `UserError` for what is no http URL."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise UserError.at(f"--url {url}", str(error), "e.g. http://127.0.0.1:8000") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError.at(f"--url {url}", "is no http URL", "e.g. http://127.0.0.1:8000")
    return base


def probe(base: str, model: str, api_key: str) -> bool:
    """Ask one short question; whether the endpoint counts tokens. Raises `InfrastructureError`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for _ in range(PROBES):
        try:
            reply = httpx.post(
                f"{base}/v1/chat/completions", json=body, headers=headers, timeout=120
            )
        except httpx.HTTPError as error:
            raise InfrastructureError(f"{base} does not answer: {error!r}") from None
        if reply.status_code < 500:
            break
    if reply.status_code in (400, 401, 403, 404, 422):
        raise UserError.at(
            f"--url {base} --model {model}",
            f"the endpoint answers {reply.status_code}: {reply.text[:200]}",
            "correct the URL, the model's name or PILOTAGE_TEACHER_API_KEY",
        )
    if reply.status_code != 200:
        LOG.warning("%s answered the first question with %d", base, reply.status_code)
        return True
    return any(isinstance(chunk, dict) and chunk.get("usage") for chunk in _chunks(reply.text))


def _chunks(text: str) -> list[Any]:
    found = []
    for line in text.splitlines():
        content = line.removeprefix("data:").strip()
        if line.startswith("data:") and content != "[DONE]":
            try:
                found.append(json.loads(content))
            except ValueError:
                continue
    return found


def word_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are words: for counting, where the endpoint's own is not known."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _default_folder(profile: LoadProfile, load: str, base: str, model: str) -> Path:
    digest = digest_of({"profile": digest_of(profile), "url": base, "model": model})
    return settings().home / "bench" / f"{short_name(load)}-{digest[:12]}"


def document(done: Benchmark) -> dict[str, Any]:
    """What `pilotage bench --json` prints as its last line. Times in milliseconds."""
    rates = done.found.rates
    return {
        "verdict": done.found.verdict.value,
        "kept_rate": [rates.low, rates.high],
        "sla": [str(clause) for clause in done.profile.sla],
        "points": [_point(step) for step in done.found.steps],
        "requests_total": done.found.requests,
        "evidence": str(done.folder),
        "notes": done.found.notes,
        "unit": "ms",
    }


POINT_VERDICTS = {"kept": "PASS", "not kept": "FAIL", "undecided": "INCONCLUSIVE"}


def _point(step: Step) -> dict[str, Any]:
    result, point = step.result, step.point
    steady = next((name for name in point.bounds if name.startswith("e2el p99 ")), "")
    return {
        "rate": result.rate,
        "verdict": "ANOMALOUS" if result.void else POINT_VERDICTS[result.answer],
        "cause": result.cause,
        "n": result.n,
        "failed": result.failed,
        "hit_rate": result.hit_rate,
        "steady": result.steady,
        # Where the SLA asks for it, of the steady part, which the bound is of.
        "p99_e2el": point.values.get(steady, point.e2el_ms.get("p99")),
        "p99_e2el_bound": point.bounds.get(steady),
    }
