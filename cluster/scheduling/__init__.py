"""Which requests go next, and how much of each: pure objects that the engines of the workers feed and ask.

* `keys`: the order of requests, in which no request starves
* `queue`: requests that wait for room
* `admission`: which prompts get memory next
* `chunks`: cuts prompts into steps
* `fit`, `budget`: learn how long a step lasts, and how much it may hold
* `running`: selects a decode batch and, if memory runs out, the request that is preempted

No torch, asyncio, Ray or clock: instants and durations are arguments. Each object belongs to the engine
thread that made it.
"""
