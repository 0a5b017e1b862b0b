"""Media from where a client points: data URIs and https URLs, read without becoming the client's hand inside the cluster.

The threat: whoever can send a request chooses the URL, its DNS answers, its redirects and every byte of the answer.

* They aim at what only this machine reaches. So only https on port 443, names are resolved here, every answer must be a
  public address, exactly these addresses are dialled, the socket and its peer are checked again, and every redirect
  starts over. Odd spellings of hosts and addresses are refused, not interpreted. No proxy of the environment is used.
* They waste what we have. So the bytes, the headers, the redirects, the whole time and the downloads at once are capped;
  a compressed answer is refused; name lookups have threads of their own.
* They look for secrets. No cookie, no credential and no Referer is ever sent; messages hold no address, query or user name;
  what a URL gave is remembered for the tenant that asked, and only as long as its host allows.
* What the operator names in `FetchPolicy.internal_hosts` is trusted: every client may read any URL there.

`urls`, `addresses`, `policy`: what may be read (pure). `dial`: only public addresses are connected to. `download`: one URL
over HTTP. `flight`, `cache`: the same URL once. `fetcher`: all of it together.
"""

from cluster.media.fetch.fetcher import FetchedMedia, Fetcher
from cluster.media.fetch.policy import FetchPolicy

__all__ = ["FetchPolicy", "FetchedMedia", "Fetcher"]
