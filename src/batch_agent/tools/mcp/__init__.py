"""Tools of MCP servers: ``Tool.mcp`` and ``Tool.mcp_file``.

``address`` reads which server is meant, ``listing`` makes tools of what it offers, ``connection`` is the session that
all calls of a run share, ``stdio`` and ``http`` carry its messages, ``results`` turns an answer into text. The last
four need the package ``mcp``, which is imported only when a server is used.
"""
