"""Several hosts: which engine goes where (spread.py, pure), what runs on each (crew.py), and Ray between (cluster.py).

    up ─ Supervisor ─┬─ router
                     └─ relay ─ Ray ─▶ Crew of host A ─▶ prefill-0      one relay here for each engine there: it prints
                     └─ relay ─ Ray ─▶ Crew of host B ─▶ decode-0       its lines, passes on signals, ends as it ends

So the supervisor and the lifecycle know nothing of hosts. Ray is an extra (`pip install 'splitserve[ray]'`): it finds
the hosts, reserves their cpus and GPUs (a placement group for each engine) and carries the calls.
"""
