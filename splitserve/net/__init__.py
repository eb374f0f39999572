"""HTTP/1.1 for every process: server protocol, pooled client, server-sent events, free ports. Knows no API."""
