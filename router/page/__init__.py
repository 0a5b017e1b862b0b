"""The page that the door serves at `/`: a chat, the timeline of each answer, the pools.

site     routes: static files, read once, and the report on the pools
pools    what the door knows of its workers, as JSON
static   the page itself: HTML, CSS, JavaScript modules; no build step, no other host

The page and its files need no API key, because they hold nothing of the cluster. What the page asks for
(`/v1/…`, `/pools`) does.
"""
