"""Refusals: what an assistant says instead of an answer, in English and Chinese.

A refusal is a short answer that *begins* with one of these patterns and asks for nothing. That a
business cannot do something is an answer ("We cannot refund after 30 days"), and so is the wish
for what is missing ("I can't find the order, please send its number"). So the English patterns
name what only an assistant says of itself: that it cannot help with *that request*, that it is an
AI, that its guidelines forbid it. What is missed costs a training row of poor value; what is
flagged wrongly costs a good one, and so the patterns are narrow. A recipe adds its own under
`quality.refused.patterns`: regular expressions, matched at the start, case ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 400
"""Characters, a Chinese one counted twice. A longer answer says more than a refusal."""

_SORRY = (
    r"(?:(?:i'm|i am|we're|we are)\s+(?:very |so |really |truly )?(?:sorry|afraid)|sorry|"
    r"(?:i |my )?apolog(?:ies|ise|ize)|unfortunately|regrettably)"
    r"(?:\s+for [^,.;]{1,40})?[,.;:!]?\s*(?:but\s+|that\s+)?"
)
_CANNOT = (
    r"(?:can't|cannot|can not|could not|couldn't|won't|will not|"
    r"(?:am|'m)? ?(?:not able|unable)(?: to)?|(?:will not|won't) be able to|must decline to|"
    r"have to decline to|decline to)"
)
_THAT = (
    r"(?:(?:with|to|in|on) )?(?:that|this|it|your|the|such|these|those)\b"
    r"(?: (?:kind|type|sort)s? of)?"
    r"(?: (?:request|question|task|topic|content|matter|prompt|query|requests|topics|questions))?"
    r"(?=\s*(?:[.!,;:—–-]|$))"
)

ENGLISH = (
    rf"(?:{_SORRY})?i(?:'m)?\s*{_CANNOT}\s+(?:assist|help)(?: you)?\s+(?=with ){_THAT}",
    rf"(?:{_SORRY})?i(?:'m)?\s*{_CANNOT}\s+(?:comply|assist|help|engage)\s*[.!]",
    rf"(?:{_SORRY})?i(?:'m)?\s*{_CANNOT}\s+"
    r"(?:comply with|fulfill?|answer|respond to|continue with|engage (?:with|in)|discuss)\s+"
    rf"{_THAT}",
    rf"(?:{_SORRY})?i(?:'m)?\s*{_CANNOT}\s+(?:comply with|fulfill?) (?:this|that|your) request\b",
    rf"(?:{_SORRY})?i(?:'m)?\s*{_CANNOT}\s+"
    r"(?:provide|create|generate|write|produce|give|offer)\s+(?:\w+ ){0,4}"
    r"(?:content|instructions|advice|guidance) (?:that|which|on how|for illegal|about how)\b",
    rf"(?:{_SORRY})?as an? (?:\w+ )?(?:ai|artificial intelligence|(?:large )?language model|"
    r"chatbot|virtual assistant)\b[^.!?]{0,90}?,?\s*i(?:'m)?\s*(?:can't|cannot|can not|"
    r"(?:am )?unable|do not|don't|am not|not|won't|will not)\b",
    rf"(?:{_SORRY})?(?:i am|i'm) (?:just |only )?an? (?:\w+ )?(?:ai|language model)\b"
    r"[^.!?]{0,60}?\b(?:can't|cannot|can not|not able|unable|don't|do not|not)\b",
    rf"(?:{_SORRY})?i(?: am|'m)? (?:not|do not feel|don't feel) comfortable (?:with )?"
    r"(?:answering|assisting|creating|discussing|engaging|generating|helping|providing|"
    r"responding|writing)\b",
    rf"(?:{_SORRY})?i (?:must|have to) (?:respectfully |politely )?decline\b",
    rf"(?:{_SORRY})?(?:this|that|your) (?:request|question|prompt|content) "
    r"(?:violates|goes against|is against)\b",
    r"it (?:is|would be) (?:against|in violation of) my (?:programming|guidelines|policy|policies)",
)

CHINESE = (
    r"(?:(?:非常|很|十分|实在|真的)?(?:抱歉|遗憾|对不起|不好意思|對不起)[，,。!！、\s]*)?"
    r"(?:但是?|但|不过)?(?:我|本人|我们)?(?:目前|暂时)?"
    r"(?:无法|不能|不可以|没办法|没有办法|没法|不便|無法|不能够)"
    r"(?:为您|为你|向您|向你|给您|给你|就此)?"
    r"(?:继续)?(?:回答|回应|讨论|协助|帮助|满足|参与|回覆|回复|遵从|執行|执行|提供)"
    r"(?:您|你)?(?:完成)?(?:的|这个|这类|这种|此类|此|该|这|那个|相关|任何)*"
    r"(?:问题|请求|要求|话题|内容|主题|任务|指令|問題|請求)(?=[，,。.！!；;、\s]|$)",
    r"(?:(?:非常|很)?(?:抱歉|对不起)[，,。\s]*)?(?:作为|身为|我是|我只是|我作为)"
    r"(?:一个|一名|一款|一種|一种)?(?:\w{0,6})?"
    r"(?:AI|人工智能|人工智慧|语言模型|大模型|智能助手|虚拟助手)[^。！？]{0,20}?[，,]\s*"
    r"(?:所以|因此)?(?:我)?(?:无法|不能|不会|没有|并不|不具备|無法)",
    r"(?:(?:非常|很)?(?:抱歉|对不起)[，,。\s]*)?(?:您|你)?(?:的|这个|该|此)*(?:问题|请求|要求|内容)"
    r"(?:违反|涉及敏感|涉及违法)",
    r"(?:让我们|我们|咱们)?(?:来)?换(?:个|一个)话题",
    r"我还没有?学(?:会|习)(?:如何|怎么)?回答这个问题",
)

_BUILT_IN = tuple(re.compile(pattern, re.IGNORECASE) for pattern in (*ENGLISH, *CHINESE))

_ASKS = re.compile(
    r"\b(?:please|could you|can you|would you|kindly)\b[^.!?]{0,30}?\b(?:send|provide|share|give|"
    r"tell|confirm|enter|check|upload|specify|clarify|include|attach|reply with|call|contact)\b"
    r"|\b(?:without|unless|until)\b"
    r"|请(?:您|你)?(?:先|再|重新)?(?:提供|发送|发|告知|告诉|补充|确认|说明|核对|输入|上传|联系|致电)",
    re.IGNORECASE,
)


def compiled(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """The patterns of a recipe, as `refusal_in` takes them."""
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)


def refusal_in(text: str, own: Sequence[re.Pattern[str]] = ()) -> str | None:
    """The words with which an answer refuses, by the patterns above and `own` ones; else None."""
    plain = text.strip().lstrip("*_>#\"'“”‘’ \n").replace("’", "'")
    if len(plain) + len(re.findall(r"[\u3400-\u9fff]", plain)) > LONGEST:
        return None
    patterns = own if _ASKS.search(plain) else (*own, *_BUILT_IN)
    found = next(filter(None, (pattern.match(plain) for pattern in patterns)), None)
    return found.group().strip() if found else None
