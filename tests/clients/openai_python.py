"""The openai package for Python: python openai_python.py URL MODEL"""

import json
import sys
import threading
import time
import urllib.request

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "What is the capital of France? One word."}]
checks = 0


def check(what: bool, name: str) -> None:
    global checks
    assert what, name
    checks += 1


def unfinished() -> int:
    with urllib.request.urlopen(f"{url}/status") as reply:
        return json.load(reply)["requests"]


check([m.id for m in client.models.list()] == [model], "models")
whole = client.chat.completions.create(
    model=model, messages=MESSAGES, temperature=0, max_completion_tokens=16
)
text = whole.choices[0].message.content
check("Paris" in text, text)
check(whole.usage.completion_tokens <= 16, "usage")
parts = list(
    client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
)
check("".join(p.choices[0].delta.content or "" for p in parts if p.choices) == text, "stream")
check(parts[-1].usage == whole.usage or parts[-1].usage.total_tokens > 0, "usage of a stream")

completion = client.completions.create(
    model=model, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2, n=2
)
check("Paris" in completion.choices[0].text and len(completion.choices) == 2, "completion")
check(len(completion.choices[0].logprobs.tokens) == 4, "logprobs")
pieces = client.completions.create(
    model=model, prompt="The capital of France is", temperature=0, max_tokens=4, stream=True
)
check("".join(p.choices[0].text for p in pieces) == completion.choices[0].text, "pieces")

for fields, kind in (
    ({"model": "other"}, openai.NotFoundError),
    ({"temperature": -1}, openai.BadRequestError),
    ({"tool_choice": "required"}, openai.BadRequestError),
    ({"messages": [{"role": "user", "content": "x " * 4000}]}, openai.BadRequestError),
    ({"extra_body": {"nonsense": 1}}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(**({"model": model, "messages": MESSAGES} | fields))
    except kind as error:
        check(bool(error.body and error.body["message"]), str(fields))
    else:
        raise AssertionError(f"{fields} was not refused")

stream = client.chat.completions.create(
    model=model,
    messages=MESSAGES,
    max_completion_tokens=900,
    stream=True,
    extra_body={"ignore_eos": True, "top_k": 5},
)
next(iter(stream))
stream.close()  # ends its request, long before 900 tokens are there
deadline = time.monotonic() + 5
while unfinished() and time.monotonic() < deadline:
    time.sleep(0.05)
check(unfinished() == 0, "a closed stream ends its request")
answers: list[str] = []


def ask(i: int) -> None:
    got = client.completions.create(model=model, prompt=f"{i}, ", max_tokens=8, temperature=0)
    answers.append(got.choices[0].text)


threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
for t in threads:
    t.start()
for t in threads:
    t.join()
check(len(answers) == 12, "several at a time")
print(f"openai {openai.__version__}, {checks} checks")
