"""Who goes next, and how much of it: pure objects that the workers' engines feed and ask.

`keys` orders requests so that nobody starves, `queue` holds those that wait for room, `chunks` cuts prompts into steps,
`budget` learns how much a step may hold, `running` picks a decode batch and, when memory runs out, who gives way. No torch,
asyncio, Ray or clock: instants and durations are arguments. Each object belongs to the engine thread that made it.
"""
