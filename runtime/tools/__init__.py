"""The kinds of tools that a session may have, and what calls of those that live outside its sandbox come to.

A tool is built in, a command in the sandbox, an HTTP request, or what an MCP server offers: one that runs in the
sandbox and is talked with over its standard input and output, or one that answers at a URL. What leaves the node goes
through `egress`, which reaches only hosts that the operator listed.
"""
