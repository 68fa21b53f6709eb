"""Tools of MCP servers: ``Tool.mcp`` and ``Tool.mcp_file``.

``address`` parses the address of a server, ``listing`` makes tools from its list, ``connection`` is the session that
all calls of a run share, over standard input and output or HTTP. All but the first need the package ``mcp``, which is
imported only when a server is used.
"""
