"""Episodes with adversarial tokens. `python -m tests.agents.fuzz 10000` plays as many of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from random import Random

from millrace.agents.request import ChatTurn, RequestError
from millrace.types import Message, Trajectory
from tests.agents.families import FAMILIES
from tests.agents.players import TOOLS, WORDS, Table, following, sent_back


def opening(family: str, random: Random, system: str = "be kind") -> list[Message]:
    """Return the first messages of an episode, with a system message where there may be one."""
    head: list[Message] = [{"role": "system", "content": system}]
    user: Message = {"role": "user", "content": random.choice(WORDS)}
    return [*(head if FAMILIES[family].system else []), user]


async def honest(family: str, seed: int, turns: int = 4) -> tuple[Table, Trajectory]:
    """Play an episode with a client that does not edit. Check where each request attaches."""
    random = Random(seed)
    table = Table.laid(family, seed)
    tools = TOOLS if FAMILIES[family].results else ()
    messages = opening(family, random)
    for n in range(turns):
        turn = await table.ask(*messages, tools=tools)
        assert table.session.turns[n].after == (n - 1 if n else None)
        assert turn.number == n and turn.tokens == table.engine.log[n][1]
        assert turn.prompt_tokens == len(table.engine.log[n][0])
        messages += [sent_back(turn, random), *following(turn, random, bool(tools))]
    trajectory = table.end()
    assert len(trajectory.threads) == 1 and not trajectory.dead_tokens, (family, seed)
    return table, trajectory


class Meddler:
    """A client that edits, compacts, forks, asks again, and starts sub-agents."""

    def __init__(self, family: str, seed: int, **options: str) -> None:
        self.random = Random(seed)
        self.family = family
        self.table = Table.laid(family, seed, **options)
        self.tools = TOOLS if FAMILIES[family].results else ()
        self.messages = opening(family, self.random)
        self.did: Counter[str] = Counter()

    async def ask(self, messages: list[Message]) -> ChatTurn:
        return await self.table.ask(*messages, tools=self.tools)

    def go_on(self, turn: ChatTurn) -> None:
        self.messages = [
            *self.messages,
            sent_back(turn, self.random),
            *following(turn, self.random, bool(self.tools)),
        ]

    async def move(self) -> None:
        name = self.random.choice(("plain", "plain", "again", "edit", "compact", "fork",
                                   "agent", "gone", "gather"))  # fmt: skip
        self.did[name] += 1
        try:
            await getattr(self, name)()
        except RequestError as error:  # a history with two calls, where one is the most
            assert "single tool-calls" in str(error) or "Only one tool call" in str(error)
            self.did["refused"] += 1
            await self.compact()

    async def again(self) -> None:  # a genuine second sample: the first or the second is used
        first, second = await self.ask(self.messages), await self.ask(self.messages)
        self.go_on(self.random.choice((first, second)))

    async def gone(self) -> None:  # nobody receives the first answer
        lost = await self.ask(self.messages)
        self.table.talk.undelivered(lost.number)
        turn = await self.ask(self.messages)
        self.table.talk.delivered(turn.number)
        self.go_on(turn)

    async def gather(self) -> None:  # parallel samples of one request
        turns = await asyncio.gather(*(self.ask(self.messages) for _ in range(3)))
        assert len({t.number for t in turns}) == 3
        self.go_on(turns[self.random.randrange(3)])

    async def edit(self) -> None:  # an earlier answer is rewritten
        said = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        if said:
            i = self.random.choice(said)
            changed = {"role": "assistant", "content": f"edited {self.random.random()}"}
            after = {"role": "user", "content": "go on"}
            self.messages = [*self.messages[:i], changed, after]
        await self.plain()

    async def compact(self) -> None:
        self.messages = opening(self.family, self.random)
        self.messages[-1] = {"role": "user", "content": f"so far: {self.random.random()}"}
        await self.plain()

    async def fork(self) -> None:  # back to an earlier request, with other words
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        i = self.random.choice(asked)
        changed = {"role": "user", "content": f"rather {self.random.random()}"}
        self.messages = [*self.messages[:i], changed]
        await self.plain()

    async def agent(self) -> None:
        system = f"you are agent {self.random.random()}"
        await self.ask(opening(self.family, self.random, system))

    async def plain(self) -> None:
        self.go_on(await self.ask(self.messages))

    async def play(self, moves: int) -> Trajectory:
        for _ in range(moves):
            await self.move()
        return self.table.end()


async def main(count: int) -> None:
    """Play half of the episodes with clients that edit, half with clients that do not."""
    start, used = time.perf_counter(), time.process_time()
    did: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(count):
        family = list(FAMILIES)[seed // 2 % len(FAMILIES)]
        if seed % 2:
            await honest(family, seed)
            continue
        meddler = Meddler(family, seed, history="keep" if seed % 4 else "template")
        counts.update((await meddler.play(3)).counts)
        did += meddler.did
    wall, cpu = time.perf_counter() - start, time.process_time() - used
    sys.stdout.write(
        f"{count} episodes in {wall:.1f} s, {cpu:.1f} s of one core\n{dict(did)}\n{dict(counts)}\n"
    )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
