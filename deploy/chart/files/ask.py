"""Asks a running cluster one question, about an image if it has encoders, and fails unless an answer comes.

`helm test` runs it in a pod: `python -c SCRIPT URL image|text`. With the demo model the answer must be right.
EPDG_API_KEY is sent as the API key.
"""

import base64
import json
import os
import sys
import urllib.request

TIMEOUT_S = 120.0
EXPECTED = "The image shows a red circle."


def call(url: str, key: str, body: dict | None = None) -> dict:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def question(kind: str) -> list:
    if kind == "text":
        return [{"type": "text", "text": "Say hello."}]
    from cluster.config.settings import REPOSITORY  # where the image's packages lie

    image = (REPOSITORY / "deploy/demo_model/examples/red_circle.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Describe the image."},
    ]


def main(url: str, kind: str) -> int:
    key = os.environ.get("EPDG_API_KEY", "")
    model = call(f"{url}/v1/models", key)["data"][0]["id"]
    messages = [{"role": "user", "content": question(kind)}]
    body = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0}
    text = call(f"{url}/v1/chat/completions", key, body)["choices"][0]["message"]["content"]
    print(f"{model}: {text}")
    wrong = not text or (model == "demo_model" and kind == "image" and text != EXPECTED)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[-2:]))
