"""An HTTP/1.1 client on asyncio.Protocol. It knows no model and no provider."""
