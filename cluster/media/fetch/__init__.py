"""Reads media from where a client points: data URIs and https URLs. Clients must not get access to the
cluster's network this way.

The threat: every client chooses the URL, its DNS answers, its redirects and every byte of the answer.

* A URL may aim at hosts that only this machine can reach. Therefore only https on port 443 is allowed, and
  names are resolved here. Every answer must be a public address, and exactly these addresses are dialled. The
  socket and its peer are checked again, and every redirect is checked from the start. Odd spellings of hosts
  and addresses are refused, not interpreted. No proxy of the environment is used.
* A URL may waste resources. Therefore bytes, headers, redirects, total time and simultaneous downloads are
  limited. A compressed answer is refused. Name lookups have their own threads.
* A URL may try to obtain secrets. Therefore no cookie, credential or Referer is ever sent. Messages contain
  no address, query or user name. The content of a URL is kept only for the tenant that asked for it, and only
  as long as its host allows.
* The hosts in `FetchPolicy.internal_hosts` are trusted: every client may read any URL there.

`urls`, `addresses`, `policy`: what may be read (pure). `dial`: connects to public addresses only. `download`:
one URL over HTTP. `single_flight`, `cache`: the same URL once. `fetcher`: all of it together.
"""

from cluster.media.fetch.fetcher import FetchedMedia, Fetcher
from cluster.media.fetch.policy import FetchPolicy

__all__ = ["FetchPolicy", "FetchedMedia", "Fetcher"]
