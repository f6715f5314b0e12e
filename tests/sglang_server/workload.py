"""Prompts, the answers they should get, and clients that ask for them at the same time."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from server import PAGE_SIZE, Generation, ServerClient

# Log probabilities in float32 differ by some 1e-5 with the shapes they were computed in; a single wrong page changes them by
# 0.1 and more (test_one_other_page_changes_the_answer).
FLOAT32_TOLERANCE = 1e-3
FIRST_TOKEN, TOKENS = 5, 300


@dataclass(frozen=True)
class Question:
    """A prompt whose `answer` was computed without any cache."""

    prompt: tuple[int, ...]
    answer: Generation


def difference(one: Generation, other: Generation) -> float:
    """The largest between the log probabilities of two answers of the same tokens; infinity where the tokens differ."""
    if one.token_ids != other.token_ids:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def check_answer(answer: Generation, cold: Generation) -> None:
    assert answer.token_ids == cold.token_ids
    assert difference(answer, cold) < FLOAT32_TOLERANCE


def check_no_call_failed(server: ServerClient) -> None:
    """The backend turns every error into misses, which the answers alone would not show."""
    log = server.log_path.read_text(errors="replace")
    for sign in ("counts as nothing found", "were not moved", "a call on pool", "TypeError"):
        assert sign not in log


def random_tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(FIRST_TOKEN, FIRST_TOKEN + TOKENS) for _ in range(count))


def ask_cold(server: ServerClient, prompt: Sequence[int], new_tokens: int, salt: str) -> Generation:
    """An answer that uses no page of any other request: SGLang's keys begin with the salt, which must be new."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "extra_key": salt,
    }
    answer = json.loads(server._request("POST", "/generate", body))
    meta = answer["meta_info"]
    assert meta["cached_tokens"] == 0
    logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
    return Generation(answer["text"], tuple(answer["output_ids"]), logprobs, 0, {})


def mixed_questions(server: ServerClient, seed: int, count: int, new_tokens: int = 4) -> list[Question]:
    """Prompts that share beginnings of many lengths, asked cold of `server`. All seeds' prompts differ."""
    chance = random.Random(seed)
    stems = [random_tokens(chance, 24 * PAGE_SIZE) for _ in range(5)]
    prompts = [
        chance.choice(stems)[: chance.randrange(2 * PAGE_SIZE, 24 * PAGE_SIZE)]
        + random_tokens(chance, chance.randrange(1, 6 * PAGE_SIZE))
        for _ in range(count)
    ]
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(
            lambda at: ask_cold(server, prompts[at], new_tokens, f"mixed {seed} {at}"), range(count)
        )
    return [Question(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def ask_together(server: ServerClient, questions: Sequence[Question]) -> list[Generation]:
    """All at the same time, each from a client of its own; every answer is checked."""

    def ask(question: Question) -> Generation:
        answer = server.generate(question.prompt, max_new_tokens=len(question.answer.token_ids))
        check_answer(answer, question.answer)
        return answer

    with ThreadPoolExecutor(len(questions)) as clients:
        return list(clients.map(ask, questions))


def conversations(server: ServerClient, seed: int, count: int, turns: int) -> list[list[Question]]:
    """Each turn's prompt is all that was said before, the model's answers included, and something new."""
    chance = random.Random(seed)
    system = random_tokens(chance, 2 * PAGE_SIZE)
    said = [[random_tokens(chance, chance.randrange(32, 64)) for _ in range(turns)] for _ in range(count)]

    def talk(at: int) -> list[Question]:
        asked: list[Question] = []
        prompt = system
        for turn, new in enumerate(said[at]):
            prompt += new
            answer = ask_cold(server, prompt, 4, f"talk {seed} {at} {turn}")
            asked.append(Question(prompt, answer))
            prompt += answer.token_ids
        return asked

    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(talk, range(count)))
