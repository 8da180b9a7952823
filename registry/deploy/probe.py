"""Readiness of a served bundle: it has just generated a token, and its memory is not full.

Needs nothing but Python's own library. Prints one line; exit status 0 is ready, 1 is not.

The environment says what to ask:
  PROBE_MODEL           served model name (required)
  PROBE_URL             default http://127.0.0.1:8000
  PROBE_TIMEOUT         seconds for one answer, default 18
  PROBE_VERSION         vLLM version that was gated; not compared where it is empty
  PROBE_MEMORY_SHARE    share of the container's memory that may be used, default 0.9
  PROBE_MEMORY_SECONDS  how long more than that is borne, default 60
  PROBE_CGROUP          default /sys/fs/cgroup
  PROBE_STATE           file that remembers since when memory is full,
                        default /tmp/pilotage-memory-full-since
  VLLM_API_KEY          sent as the bearer token

Memory is what the container holds and the kernel cannot take back: file pages are left out (the
weights are read through them). GPU memory is no sign: vLLM takes all it may have at the start.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path

NO_LIMIT = 1 << 60
"""Version 1 of cgroups says "no limit" with a number near 2 to the 63rd."""


class NotReady(Exception):
    pass


def memory_share(cgroup: Path) -> float | None:
    """Used share of the container's memory limit; None where there is no limit to see."""
    for used, limit, stat, keys in (
        ("memory.current", "memory.max", "memory.stat", ("inactive_file", "active_file")),
        (
            "memory/memory.usage_in_bytes",
            "memory/memory.limit_in_bytes",
            "memory/memory.stat",
            ("total_inactive_file", "total_active_file"),
        ),
    ):
        try:
            most = (cgroup / limit).read_text().strip()
            if most == "max" or int(most) >= NO_LIMIT:
                return None
            held = int((cgroup / used).read_text())
            lines = (line.split() for line in (cgroup / stat).read_text().splitlines())
            held -= sum(int(value) for name, value in lines if name in keys)
            return held / int(most)
        except FileNotFoundError:
            continue
    return None


def check_memory(
    share: float | None, most: float, patience: float, state: Path, now: float
) -> None:
    """Raise `NotReady` when memory has been above `most` for `patience` seconds."""
    if share is None or share <= most:
        state.unlink(missing_ok=True)
        return
    try:
        since = float(state.read_text())
    except (FileNotFoundError, ValueError):
        since = now
    if since > now:  # written before the machine was started anew
        since = now
    state.write_text(repr(since))
    if now - since >= patience:
        raise NotReady(f"memory is at {share:.0%} for {now - since:.0f} s, {most:.0%} are allowed")


def check_version(url: str, wanted: str, timeout: float) -> None:
    """Raise `NotReady` when another vLLM than the gated one answers; builds (+cpu) may differ."""
    with OPENER.open(f"{url}/version", timeout=timeout) as answer:
        version = json.load(answer)["version"]
    if version.partition("+")[0] != wanted.partition("+")[0]:
        raise NotReady(f"vLLM {version} answers, {wanted} was gated")


def check_token(url: str, model: str, key: str, timeout: float) -> None:
    """Raise `NotReady` unless one token is generated."""
    common = {
        "model": model,
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked: tuple[tuple[str, dict[str, object]], ...] = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        # A model without a chat template answers 400 to the first.
        ("/v1/completions", {"prompt": "Hello"}),
    )
    for path, body in asked:
        request = urllib.request.Request(
            url + path,
            data=json.dumps({**common, **body}).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        try:
            with OPENER.open(request, timeout=timeout) as answer:
                if generated_tokens(answer) >= 1:
                    return
            raise NotReady("the engine answered without a token")
        except urllib.error.HTTPError as error:
            if error.code not in (400, 404) or path == asked[-1][0]:
                raise NotReady(f"{path} answered {error.code}") from None


def generated_tokens(lines: Iterable[bytes]) -> int:
    """Completion tokens that a stream of events says it generated."""
    tokens = 0
    for line in lines:
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            event = json.loads(line[5:])
            tokens = max(tokens, (event.get("usage") or {}).get("completion_tokens") or 0)
    return tokens


# No proxy stands between a container and itself.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(env: Mapping[str, str]) -> int:
    url = env.get("PROBE_URL", "http://127.0.0.1:8000").rstrip("/")
    timeout = float(env.get("PROBE_TIMEOUT", "18"))
    try:
        check_memory(
            memory_share(Path(env.get("PROBE_CGROUP", "/sys/fs/cgroup"))),
            float(env.get("PROBE_MEMORY_SHARE", "0.9")),
            float(env.get("PROBE_MEMORY_SECONDS", "60")),
            Path(env.get("PROBE_STATE", "/tmp/pilotage-memory-full-since")),
            time.monotonic(),
        )
        if env.get("PROBE_VERSION"):
            check_version(url, env["PROBE_VERSION"], timeout)
        check_token(url, env["PROBE_MODEL"], env.get("VLLM_API_KEY", ""), timeout)
    except NotReady as reason:
        print(f"not ready: {reason}")
        return 1
    except Exception as error:  # whatever it is, the pod takes no traffic
        print(f"not ready: {type(error).__name__}: {error}")
        return 1
    print("ready")
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
