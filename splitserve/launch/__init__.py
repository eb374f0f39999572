"""From a deployment file to running processes: read, place, start, watch, stop.

    deploy/x.toml ─ deployment.load ─▶ Deployment ─┐
    sysfs, cgroup ─ topology.read ───▶ Topology ───┴─ placement.place ─▶ ProcSpecs ─ ports.claim ─▶ commands
                                                                                                       │
             lifecycle.Lifecycle (pure: events in, actions out)  ◀──▶  supervisor (acts: processes, sockets, files)

Everything up to the supervisor is data in, data out. It serves nothing itself: the children do.
"""
