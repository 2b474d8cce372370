"""A worker of `agents.remote=true`: `python worker.py RUN/agents.json`.

It claims episodes until none is left.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

run = json.loads(Path(sys.argv[1]).read_text())


def post(url, token, **body):
    head = {"authorization": "Bearer " + token, "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


while (claim := post(run["url"] + "/episodes/claim", run["token"], wait_s=20))["episode"]:
    task, key = claim["task"], claim["api_key"]
    chat = {"model": task["model"], "messages": task["messages"]}
    answer = post(claim["base_url"] + "/chat/completions", key, **chat)
    said = answer["choices"][0]["message"]["content"]
    reward = float(said == task["ground_truth"])
    post(run["url"] + "/episodes/finish", run["token"], api_key=key, reward=reward)
