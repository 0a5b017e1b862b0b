"""The request's flow: what a request does from its arrival until every stage has let go of it."""
