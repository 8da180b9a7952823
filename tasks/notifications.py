"""Who is told: a webhook of Slack, DingTalk or Feishu, as a Prefect block and its automations.

The webhook's URL is its password. It stands in the secrets of one block, `pilotage-notify`, which
Prefect's server alone reads when an automation of automations/notifications fires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks.deploy_file import AUTOMATIONS_DIR, read_automations

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient

BLOCK = "pilotage-notify"
FILES = AUTOMATIONS_DIR / "notifications"
SETTING = "PILOTAGE_NOTIFY_URL"
_SECRET = "webhook"
_TEST_SECONDS = 15.0

PAYLOADS: dict[str, dict[str, Any]] = {
    "slack": {"text": "*{{subject}}*\n{{body}}"},
    "dingtalk": {"msgtype": "text", "text": {"content": "{{subject}}\n{{body}}"}},
    "feishu": {"msg_type": "text", "content": {"text": "{{subject}}\n{{body}}"}},
}
"""What each service documents for a plain text message of a custom robot (an incoming webhook)."""


def register(client: SyncPrefectClient) -> dict[str, str]:
    """Make or renew the block and the automations that use it; what was done, by name.

    Without PILOTAGE_NOTIFY_URL nothing is made, and what an earlier call made is kept up to date. A
    new or changed webhook is sent one message, and what it answers is read. To be called after the
    deployments are registered: raises `UserError` for a webhook that refuses, `InfrastructureError`
    for one that does not answer; the deployments stay.
    """
    done: dict[str, str] = {}
    block = _known_block(client)
    url = settings().notify_url.get_secret_value()
    if url:
        payload = PAYLOADS[settings().notify_kind]
        if block is None or _content(block) != (url, payload):
            said = "registered" if block is None else "changed"
            send_test(url, payload)
            _save(url, payload)
            block = _known_block(client)
            done[f"block {BLOCK!r} ({settings().notify_kind})"] = said
    if block is None:
        return done
    for entry in with_block(read_automations(FILES), block.id):
        said = _automation(client, entry)
        if said:
            done[f"automation {entry['name']!r}"] = said
    return done


def with_block(entries: list[dict[str, Any]], block: UUID) -> list[dict[str, Any]]:
    """The files' automations with the block's id in place of the zeros. Pure."""
    return [
        {
            **entry,
            "actions": [{**action, "block_document_id": str(block)} for action in entry["actions"]],
        }
        for entry in entries
    ]


def send_test(url: str, payload: dict[str, Any]) -> None:
    """One message, so that a wrong URL is found now and not on the first night that is refused."""
    import httpx
    from prefect.utilities.templating import apply_values

    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError.at(SETTING, "is no http(s) URL", "copy the webhook's whole URL")
    words = {"subject": "pilotage", "body": "This chat is told of refusals, questions, promotions."}
    try:
        answer = httpx.post(url, json=apply_values(payload, words), timeout=_TEST_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # Not the error's own words: they may hold the URL.
        raise InfrastructureError(f"{SETTING}: no answer ({type(error).__name__})") from None
    problem = refusal(answer.status_code, answer.text)
    if problem:
        raise UserError.at(SETTING, problem, "see docs/notifications.md")


def refusal(status: int, body: str) -> str:
    """What the webhook's answer says went wrong; empty: nothing. Pure.

    DingTalk (`errcode`) and Feishu (`code`, in older answers `StatusCode`) refuse with status 200.
    """
    import json

    said = " ".join(body.split())[:200]
    if status >= 300:
        return f"answered {status}: {said}"
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(answer, dict):
        return ""
    codes = [answer[key] for key in ("errcode", "code", "StatusCode") if key in answer]
    return f"refused: {said}" if any(code != 0 for code in codes) else ""


# -- parts -----------------------------------------------------------------------------------


def _known_block(client: SyncPrefectClient) -> Any:
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_block_document_by_name(
            BLOCK, block_type_slug="custom-webhook", include_secrets=True
        )
    except ObjectNotFound:
        return None


def _content(block: Any) -> tuple[str, Any]:
    secrets = block.data.get("secrets") or {}
    return str(secrets.get(_SECRET, "")), block.data.get("json_data")


def _save(url: str, payload: dict[str, Any]) -> None:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.types import SecretDict

    CustomWebhookNotificationBlock(
        name="pilotage",
        url="{{" + _SECRET + "}}",
        json_data=payload,
        headers=None,
        cookies=None,
        secrets=SecretDict({_SECRET: url}),
    ).save(BLOCK, overwrite=True)


def _automation(client: SyncPrefectClient, entry: dict[str, Any]) -> str:
    from prefect.events.schemas.automations import AutomationCore

    core = AutomationCore.model_validate(entry)
    found = client.read_automations_by_name(core.name)
    if not found:
        client.create_automation(core)
        return "registered"
    # As Python: in JSON a set has another order each time.
    if found[0].model_dump(include=set(AutomationCore.model_fields)) == core.model_dump():
        return ""
    client.update_automation(found[0].id, core)
    return "changed"
