"""What the teacher's answers have cost, and whether more may be asked.

Counted are all answers that the stage keeps, those of earlier tries too, by the `usage` that the
endpoint sends with them. What it takes for requests without an answer is not known.

A budget is looked at before each request. Those that are open when it is spent are still answered,
so it is overrun by at most `concurrency` answers (with `ray`, by those that the workers were sent
before they heard of it).
"""

from __future__ import annotations

from recipes.schema import TeacherRecipe
from registry.errors import Problem
from tasks.teacher_rows import AnswerFile

MILLION = 1_000_000


def cost_of(prompt_tokens: int, completion_tokens: int, recipe: TeacherRecipe) -> float | None:
    """In `recipe.currency`; None where the recipe names no prices."""
    prompt = recipe.price_per_million_prompt_tokens
    completion = recipe.price_per_million_completion_tokens
    if prompt is None or completion is None:
        return None
    return (prompt_tokens * prompt + completion_tokens * completion) / MILLION


def budget_problem(answers: AnswerFile, recipe: TeacherRecipe) -> Problem | None:
    """Why no more may be asked under the recipe's budgets; None where none is spent."""
    tokens, money = recipe.max_total_tokens, recipe.max_cost
    if tokens is None and money is None:
        return None
    if answers.uncounted:
        field = "max_total_tokens" if money is None else "max_cost"
        return Problem(
            f"teacher_data: {field}",
            f"the teacher does not say how many tokens {answers.uncounted} of its answers took",
            f"a budget needs an endpoint that sends `usage`; remove {field}",
        )
    if tokens is not None and answers.tokens >= tokens:
        return _spent("max_total_tokens", f"{tokens} tokens", str(answers.tokens), answers)
    if money is not None:
        cost = cost_of(answers.prompt_tokens, answers.completion_tokens, recipe)
        assert cost is not None, "the recipe was refused without prices"
        if cost >= money:
            return _spent("max_cost", f"{money:g} {recipe.currency}", f"{cost:.6g}", answers)
    return None


def _spent(field: str, budget: str, spent: str, answers: AnswerFile) -> Problem:
    wanted = "prompts have no answer" if answers.samples == 1 else "samples have no answer"
    return Problem(
        f"teacher_data: {field}",
        f"the budget of {budget} is spent ({spent}), and {answers.count_missing()} {wanted} yet",
        "raise it in the teacher recipe: the next run asks for these only",
    )
