"""`splitserve compare FILE`: one workload on the same devices as a split pair, as unified replicas, and as one engine.

arms      the three deployments of a file, as files of their own
measure   one arm that is up: load it, read its marks and step sums
main      tune the chunk, measure in random order and repeat, judge
report    table, JSON and one page
"""
