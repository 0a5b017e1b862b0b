"""The door: OpenAI's HTTP API, and the decision which workers serve a request.

http         what any HTTP API needs: edge, keys, limits, bodies, errors, event streams
api          the endpoints: request bodies to calls, deltas to answers
prompts      text and media become a prompt
admission    which requests start now, which wait, which are refused
policy       pure: where a request goes, by predicted time to first token
scaling      pure: how many workers each pool should have
flow         pure: what a request does from its submission to its end
dispatcher   drives the flow on the event loop; members: the connections to workers
generation   tokens become text, stop strings, usage
overlong     refusals of what is longer than the model's context
telemetry    metrics, traces, timelines
door         composes all of it
"""
