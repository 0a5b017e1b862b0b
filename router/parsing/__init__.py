"""Parses the text of an answer to content, reasoning and calls of tools.

calls    the text of one call, from its first letter on, to pieces for the client
parser   an answer's text to regions, by transformers' `ResponseParser`
formats  which parser, and which structure, a request gets
"""
