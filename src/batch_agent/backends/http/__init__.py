"""HTTP for every wire: connections, requests, errors, streams."""
