"""State of requests: allocated (pages, pool), shared by prefix (tree), handed out (cache). See splitserve.spec."""
