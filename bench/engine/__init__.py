"""The cluster against other inference servers, over HTTP, with the same weights on the same cores. See
README.md.
"""
