"""What a chat is told: the payload of each service, what it answers, and the files' automations."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.server.events.actions import SendNotification
from prefect.utilities.templating import apply_values

from registry.errors import InfrastructureError, UserError
from tasks import notifications
from tasks.deploy_file import read_automations
from tasks.deploying import deploy
from tasks.notifications import FILES, PAYLOADS, refusal, send_test, with_block

URL = "http://127.0.0.1:1/hook?access_token=planted"


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("slack", {"text": "*S*\nB"}),
        ("dingtalk", {"msgtype": "text", "text": {"content": "S\nB"}}),
        ("feishu", {"msg_type": "text", "content": {"text": "S\nB"}}),
    ],
)
def test_each_service_gets_what_it_documents(kind: str, sent: dict[str, object]) -> None:
    assert apply_values(PAYLOADS[kind], {"subject": "S", "body": "B"}) == sent


def test_a_message_cannot_draw_the_webhook_into_itself() -> None:
    words = {"subject": "{{webhook}}", "body": "{{ webhook }}", "webhook": URL}
    for payload in PAYLOADS.values():
        assert "planted" not in json.dumps(apply_values(payload, words))


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, "ok", ""),
        (200, '{"errcode":0,"errmsg":"ok"}', ""),
        (200, '{"code":0,"msg":"success"}', ""),
        (200, '{"StatusCode":0,"StatusMessage":"success"}', ""),
        (200, '{"errcode":310000,"errmsg":"keywords not in content"}', "keywords not in content"),
        (200, '{"code":19024,"msg":"Key Words Not Found"}', "Key Words Not Found"),
        (404, "no_service", "answered 404: no_service"),
        (302, "", "answered 302"),
    ],
)
def test_a_refusal_with_status_200_is_one(status: int, body: str, text: str) -> None:
    said = refusal(status, body)
    assert (text in said) if text else said == ""


def test_a_webhook_that_is_not_there_is_told_without_its_url() -> None:
    with pytest.raises(InfrastructureError, match="ConnectError") as failed:
        send_test(URL, PAYLOADS["slack"])
    assert "planted" not in str(failed.value)
    with pytest.raises(UserError, match=r"no http\(s\) URL") as wrong:
        send_test("hooks.slack.com/planted", PAYLOADS["slack"])
    assert "planted" not in str(wrong.value)


def test_a_night_that_did_not_take_place_is_told_too() -> None:
    """CANCEL_NEW: a night that finds the one before still at work is cancelled."""
    told = {entry["name"]: entry["trigger"]["expect"] for entry in read_automations(FILES)}
    assert "prefect.flow-run.Cancelled" in told["pilotage tells the night"]
    # Whoever cancels a release by hand knows.
    assert "prefect.flow-run.Cancelled" not in told["pilotage tells refusals"]


def test_a_mistake_in_the_files_is_told_before_any_server_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "messages.yaml").write_text("automations: [{name: pilotage tells}]\n")
    monkeypatch.setattr(notifications, "FILES", tmp_path)
    with pytest.raises(UserError, match=r"messages\.yaml: 1 \(pilotage tells\)"):
        deploy()


def test_the_files_are_templates_that_the_server_takes() -> None:
    block = uuid4()
    entries = with_block(read_automations(FILES), block)
    assert [entry["name"] for entry in entries] == [
        "pilotage tells refusals",
        "pilotage tells the night",
        "pilotage tells questions",
        "pilotage tells promotions",
    ]
    for entry in entries:
        for action in entry["actions"]:
            message = SendNotification.model_validate(action)
            assert message.block_document_id == block
            assert message.subject.startswith("pilotage: "), "DingTalk's and Feishu's keyword"
